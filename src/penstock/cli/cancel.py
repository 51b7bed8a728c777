"""`penstock cancel`."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace

from penstock.cli.bulk import confirm, report, sure
from penstock.cli.exits import Exit, exit_of
from penstock.cli.filters import filtered, is_narrowed, query_of
from penstock.cli.ids import job_ids, meant
from penstock.cli.paper import print_json, record
from penstock.cli.parameters import DURATION, STATE, as_json
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.core.errors import PenstockError
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.engine_api import Cancellation, EngineApi


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB...]")
@click.option("--children", is_flag=True, help="And the jobs that they are parents of.")
@click.option("--reason", default="", help="Why; kept in the history.")
@click.option(
    "--timeout",
    type=DURATION,
    default="10s",
    show_default=True,
    help="How long to wait for running work to end.",
)
@click.option("--state", type=STATE, multiple=True, help="In this state; may be repeated.")
@filtered
@click.option("--all", "everything", is_flag=True, help="Every job that has not ended.")
@sure
@as_json
@placed
@click.pass_obj
def cancel(
    place: Place,
    /,
    jobs: tuple[str, ...],
    children: bool,
    reason: str,
    timeout: float,
    state: tuple[str, ...],
    everything: bool,
    yes: bool,
    json: bool,
    **filters: Any,
) -> int:
    """End jobs.

    Those named, or all unfinished ones that match. Says of each job named which won: the
    cancellation, or an end that came first (exit code 4). `-` reads ids from standard input.
    With conditions it asks first, then asks every job that matches to end, and does not wait
    for them.
    """
    narrowed = bool(state) or is_narrowed(filters)
    if bool(jobs) + narrowed + everything != 1:
        raise click.UsageError("say which jobs: their ids, or conditions, or --all")
    if jobs:
        return run(_cancel(place, job_ids(jobs), children, reason, timeout, json))
    if children:
        raise click.UsageError("--children goes with ids; conditions match children, too")
    states = tuple(map(JobState, state))
    if ended := [one.value for one in states if one in TERMINAL]:
        raise click.UsageError(f"--state {ended[0]}: what has ended can't be cancelled")
    return run(_cancel_many(place, filters, states, reason, yes, json))


async def _cancel_many(
    place: Place,
    filters: dict[str, Any],
    states: tuple[JobState, ...],
    reason: str,
    yes: bool,
    json: bool,
) -> int:
    async with api_at(place) as api:
        query = await query_of(api, filters, states=states)
        unfinished = states or tuple(state for state in JobState if state not in TERMINAL)
        if not await confirm(api, replace(query, states=unfinished), "cancel", yes=yes):
            return Exit.OK
        bulk = await api.cancel_many(query, reason=reason)
        return report(bulk, "asked {} to end", json=json)


async def _cancel(
    place: Place, texts: list[str], children: bool, reason: str, timeout: float, json: bool
) -> int:
    code, answers = Exit.OK, []
    async with api_at(place) as api:
        for text in texts:
            ended, answer = await _cancel_one(api, text, children, reason, timeout, json)
            code = code or ended
            answers.append(answer)
    if json:
        print_json(answers)
    return code


async def _cancel_one(
    api: EngineApi, text: str, children: bool, reason: str, timeout: float, json: bool
) -> tuple[Exit, Any]:
    try:
        job = await meant(api, text)
        done = await api.cancel(job.job_id, reason=reason, children=children, timeout=timeout)
    except PenstockError as error:
        echo(f"penstock: {error.message}", err=True)
        return exit_of(error), {"job_id": text, "error": error.code, "message": error.message}
    code, said = _answer(done)
    if not json:
        echo(f"{done.job.job_id} {said}")
    return code, {**record(done.job), "ended": done.ended}


def _answer(done: Cancellation) -> tuple[Exit, str]:
    if done.job.state is JobState.CANCELLED:
        return Exit.OK, "cancelled"
    if done.job.is_final:
        return Exit.CONFLICT, f"had ended already: {done.job.state}"
    return Exit.NOT_YET, f"was asked to end and is still {done.job.state}"
