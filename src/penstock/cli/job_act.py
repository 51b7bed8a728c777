"""`penstock cancel`, `retry`, `approve` and `reject`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import click
from msgspec.structs import replace

from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.groups import command
from penstock.cli.options import options, waits
from penstock.cli.output import record
from penstock.cli.selection import (
    Done,
    each,
    filtered,
    find_job,
    in_bulk,
    is_narrowed,
    job_ids,
    query_of,
)
from penstock.core.job import Job
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.engine_api import EngineApi

_optional = click.argument("jobs", nargs=-1, metavar="[JOB...]")
_required = click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
_WHICH = "no jobs selected: give ids, filters or --all"


def _each_job(
    engine: EngineRef,
    jobs: tuple[str, ...],
    act: Callable[[EngineApi, str], Awaitable[Done]],
    json: bool,
) -> int:
    """Do something to each job that is named, by whole id."""
    given = job_ids(jobs)

    async def to_all(api: EngineApi) -> int:
        async def to_one(text: str) -> Done:
            return await act(api, (await find_job(api, text)).job_id)

        return await each(given, to_one, json=json)

    return engine.ask(to_all)


@command()
@_optional
@options(
    """
    --children           And the jobs that they are parents of.
    --all as everything  Every job that has not ended.
    """
)
@waits("10s", "How long to wait for running work to end.")
@filtered
def cancel(
    engine: EngineRef,
    /,
    jobs: tuple[str, ...],
    children: bool,
    reason: str,
    wait_timeout: float,
    states: tuple[str, ...],
    everything: bool,
    yes: bool,
    json: bool,
    **filters: Any,
) -> int:
    """Cancel jobs.

    The jobs named, or all unfinished ones that match. For each job named it prints whether it was
    cancelled or had already ended (exit code 4). `-` reads ids from standard input. With filters it
    asks for confirmation, then asks every job that matches to end, and does not wait for them.
    """
    narrowed = bool(states) or is_narrowed(filters)
    if bool(jobs) + narrowed + everything != 1:
        raise click.UsageError(_WHICH)
    if jobs:

        async def cancel_one(api: EngineApi, job_id: str) -> Done:
            done = await api.cancel(job_id, reason=reason, children=children, timeout=wait_timeout)
            code, said = _cancelled(done.job)
            view = {**record(done.job), "ended": done.ended}
            return code, view, f"{done.job.job_id} {said}"

        return _each_job(engine, jobs, cancel_one, json)
    if children:
        raise click.UsageError("--children goes with ids; filters match children, too")
    wanted = tuple(map(JobState, states))
    if ended := [one.value for one in wanted if one in TERMINAL]:
        raise click.UsageError(f"--state {ended[0]}: what has ended can't be cancelled")
    unfinished = wanted or tuple(state for state in JobState if state not in TERMINAL)

    async def cancel_all(api: EngineApi) -> int:
        query = await query_of(api, filters, states=wanted)
        return await in_bulk(
            api,
            query,
            lambda query: api.cancel_many(query, reason=reason),
            "cancel",
            "asked {} to end",
            concerns=replace(query, states=unfinished),
            yes=yes,
            json=json,
        )

    return engine.ask(cancel_all)


def _cancelled(job: Job) -> tuple[Exit, str]:
    if job.state is JobState.CANCELLED:
        return Exit.OK, "cancelled"
    if job.is_final:
        return Exit.CONFLICT, f"had ended already: {job.state}"
    return Exit.NOT_YET, f"was asked to end and is still {job.state}"


@command()
@_optional
@filtered
@options("--all as everything  All dead jobs.")
def retry(
    engine: EngineRef,
    /,
    jobs: tuple[str, ...],
    everything: bool,
    yes: bool,
    json: bool,
    **filters: Any,
) -> int:
    """Retry jobs that failed or timed out.

    The jobs named, or all dead ones that match: those that ended FAILED or TIMEOUT and were not
    retried ('penstock ps --dead' lists them). A retry is a new job, which keeps every field of the
    old and passes the safety rules again. Prints the ids of the new jobs, or with filters how many
    there are. `-` reads ids from standard input.
    """
    if bool(jobs) + is_narrowed(filters) + everything != 1:
        raise click.UsageError(_WHICH)
    if jobs:

        async def retry_one(api: EngineApi, job_id: str) -> Done:
            new = await api.retry(job_id)
            return Exit.OK, record(new), new.job_id

        return _each_job(engine, jobs, retry_one, json)

    async def retry_all(api: EngineApi) -> int:
        query = await query_of(api, filters, dead=True)
        return await in_bulk(api, query, api.retry_many, "retry", "retried {}", yes=yes, json=json)

    return engine.ask(retry_all)


@command()
@_required
@options("--snapshot SNAPSHOT=  Only if the job is held by this snapshot of the rules.")
def approve(
    engine: EngineRef, jobs: tuple[str, ...], reason: str, snapshot: str, json: bool
) -> int:
    """Approve jobs that are awaiting approval.

    Says of each whether it goes on or needs more approvals. `-` reads ids from standard input.
    """

    async def approve_one(api: EngineApi, job_id: str) -> Done:
        job = await api.approvals.approve(job_id, reason=reason, snapshot=snapshot)
        return Exit.OK, record(job), f"{job.job_id} {_approved(job)}"

    return _each_job(engine, jobs, approve_one, json)


def _approved(job: Job) -> str:
    hold = job.hold
    if hold is None or hold.approved:
        return "approved: it goes on"
    missing = hold.terms.needed - len(hold.votes)
    return f"approved by {len(hold.votes)} of {hold.terms.needed}: {missing} more needed"


@command()
@_required
def reject(engine: EngineRef, jobs: tuple[str, ...], reason: str, json: bool) -> int:
    """Reject jobs that are awaiting approval: they end DENIED.

    `-` reads ids from standard input.
    """

    async def reject_one(api: EngineApi, job_id: str) -> Done:
        job = await api.approvals.reject(job_id, reason=reason)
        return Exit.OK, record(job), f"{job.job_id} rejected"

    return _each_job(engine, jobs, reject_one, json)
