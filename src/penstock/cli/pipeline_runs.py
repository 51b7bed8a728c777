"""`penstock pipeline runs`, `items` and `cancel`: runs and their items."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click

from penstock.cli.exits import Exit
from penstock.cli.ids import meant
from penstock.cli.paper import WIDE, Listing, console, emit, print_json
from penstock.cli.parameters import DURATION, as_json
from penstock.cli.pipeline_display import elapsed, job_status, outcome
from penstock.cli.place import Place, api_at, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import short_id, span
from penstock.core.errors import NotFound, PenstockError
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.interface import CancelAnswer, RunQuery
from penstock.workloads.pipeline.records import ItemOutcome, ItemRecord, PipelineRecord, pipeline_of
from penstock.workloads.pipeline.views import item_view, view_of

STATUS = click.Choice([status.value for status in PipelineJobStatus], case_sensitive=False)
OUTCOME = click.Choice([outcome.value for outcome in ItemOutcome], case_sensitive=False)
_GLANCE = 200
"""Bytes of an item's input that are looked at."""


async def run_meant(api: EngineApi, text: str) -> PipelineRecord:
    """The run with this id, or a beginning or end of one that is enough."""
    job = await meant(api, text)
    if pipeline_of(job.request.topic) is None:
        raise NotFound(
            f"job {job.job_id} is no run of a pipeline: its topic is {job.request.topic}",
            hint=f"'penstock show {short_id(job.job_id)}' tells of it",
        )
    return await api.pipelines.get(job.job_id)


@click.command()
@click.option("--pipeline", "name", metavar="NAME", help="Of this pipeline.")
@click.option("--status", type=STATUS, multiple=True, help="With this status; may be repeated.")
@click.option("--tenant", help="Of this tenant.")
@click.option("--retry-of", metavar="JOB", help="That retry this one.")
@click.option("--before", metavar="JOB", help="Older than this one: the next page.")
@click.option(
    *("-n", "--limit"),
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Maximum number of results.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
@as_json
@placed
@click.pass_obj
def runs(
    place: Place,
    /,
    name: str | None,
    status: tuple[str, ...],
    tenant: str | None,
    retry_of: str | None,
    before: str | None,
    limit: int,
    quiet: bool,
    json: bool,
) -> None:
    """List runs of pipelines, newest first."""

    async def find() -> list[PipelineRecord]:
        async with reading_at(place) as api:
            query = RunQuery(
                pipeline=name,
                statuses=tuple(map(PipelineJobStatus, status)),
                tenant=tenant,
                retry_of=None if retry_of is None else (await run_meant(api, retry_of)).id,
                before=None if before is None else _place(await run_meant(api, before)),
                limit=limit,
            )
            return await api.pipelines.runs(query)

    found = run(find())
    if json:
        print_json([view_of(record) for record in found])
    elif quiet:
        echo("".join(f"{record.id}\n" for record in found), nl=False)
    elif not found:
        echo("no such runs; start one with 'penstock pipeline start NAME'", err=True)
    else:
        emit(_listing(found, time.time()))
        if len(found) == limit:
            echo(f"there may be more: --before {short_id(found[-1].id)}", err=True)


def _place(record: PipelineRecord) -> tuple[float, str]:
    return record.created_at, record.id


def _listing(found: list[PipelineRecord], now: float) -> Listing:
    wide = console().width >= WIDE
    tenants = {record.tenant for record in found} != {"default"}
    listing = Listing(
        *("JOB", "PIPELINE", *(["TENANT"] if tenants else []), "STATUS", "AGE", "TOOK", "NOTE"),
        flexible=("JOB", "PIPELINE", "TENANT", "NOTE"),
        right=("AGE", "TOOK"),
    )
    for record in found:
        listing.add(
            record.id if wide else short_id(record.id),
            record.pipeline,
            *([record.tenant] if tenants else []),
            job_status(record.status),
            span(now - record.created_at),
            "" if record.started_at is None else span(elapsed(record, now)),
            _note(record),
        )
    return listing


def _note(record: PipelineRecord) -> str:
    if record.is_final:
        again = f"retry of {short_id(record.retry_of)}" if record.retry_of else ""
        return "; ".join(filter(None, (outcome(record), again)))
    if record.cancel_requested:
        return "asked to stop"
    return f"in {record.current_stage}" if record.current_stage else ""


@click.command()
@click.argument("job")
@click.argument("stage")
@click.option("--outcome", type=OUTCOME, multiple=True, help="That ended so; may be repeated.")
@click.option("--after", type=int, default=-1, metavar="SEQ", help="The next page: after this one.")
@click.option(
    *("-n", "--limit"),
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Maximum number of results.",
)
@as_json
@placed
@click.pass_obj
def items(
    place: Place,
    /,
    job: str,
    stage: str,
    outcome: tuple[str, ...],
    after: int,
    limit: int,
    json: bool,
) -> None:
    """List the items of a stage, and how each ended.

    Tells after how many attempts, in what time, and why it failed. With --json it is an array
    that also has what each was given and what it gave.
    """

    async def find() -> tuple[list[ItemRecord], list[str]]:
        async with reading_at(place) as api:
            record = await run_meant(api, job)
            outcomes = tuple(map(ItemOutcome, outcome))
            found = await api.pipelines.items(
                record.id, stage, after=after, limit=limit, outcomes=outcomes
            )
            if json:
                return found, []
            return found, await asyncio.gather(*(_glance(api, one.input) for one in found))

    found, inputs = run(find())
    if json:
        print_json([item_view(one) for one in found])
    elif not found:
        echo("no such items", err=True)
    else:
        emit(_items(found, inputs), *_errors(found))
        if len(found) == limit:
            echo(f"there may be more: --after {found[-1].seq}", err=True)


async def _glance(api: EngineApi, pointer: str) -> str:
    """The beginning of what an item was given."""
    if not pointer:
        return ""
    try:
        data = await api.read_blob(pointer, 0, _GLANCE)
    except PenstockError as error:
        return error.message
    return " ".join(data.decode("utf-8", "replace").split())


def _items(found: list[ItemRecord], inputs: list[str]) -> Listing:
    """With the errors in the same line where there is room; else see `_errors`."""
    from rich.text import Text

    wide = console().width >= WIDE
    listing = Listing(
        *("SEQ", "KEY", "OUTCOME", "TRIES", "CLASS", "TOOK", *(["ERROR"] if wide else []), "INPUT"),
        flexible=("KEY", "ERROR", "INPUT"),
        right=("SEQ", "TRIES", "TOOK"),
    )
    for one, given in zip(found, inputs, strict=True):
        listing.add(
            str(one.seq),
            one.key,
            Text(one.outcome.value, _OUTCOMES[one.outcome]),
            str(one.attempts) if one.attempts else "",
            one.error_class.value if one.error_class is not None else "",
            span(one.duration_ms / 1000) if one.attempts else "",
            *([_error(one)] if wide else []),
            given,
        )
    return listing


def _errors(found: list[ItemRecord]) -> list[Listing | str]:
    failed = [(str(one.seq), _error(one)) for one in found if _error(one)]
    if not failed or console().width >= WIDE:
        return []
    listing = Listing("SEQ", "ERROR", flexible=("ERROR",), folded=("ERROR",), right=("SEQ",))
    for seq, error in failed:
        listing.add(seq, error)
    return ["", listing]


def _error(one: ItemRecord) -> str:
    return " ".join(": ".join(filter(None, (one.error_code, one.error))).split())


_OUTCOMES = {
    ItemOutcome.PENDING: "dim",
    ItemOutcome.OK: "green",
    ItemOutcome.FAILED: "red",
    ItemOutcome.SKIPPED: "dim",
}


@click.command()
@click.argument("job")
@click.option("--reason", default="", help="Why; kept in the history.")
@click.option(
    "--timeout",
    type=DURATION,
    default="10s",
    show_default=True,
    help="How long to wait for running items to stop.",
)
@as_json
@placed
@click.pass_obj
def cancel(place: Place, job: str, reason: str, timeout: float, json: bool) -> int:
    """End a run.

    Says which won: the cancellation, or an end that came first (exit code 4); and what would
    not stop and was abandoned. A run that still stops when the time is over is exit code 9.
    """

    async def ask() -> tuple[CancelAnswer, PipelineRecord]:
        async with api_at(place) as api:
            record = await run_meant(api, job)
            answer = await api.pipelines.cancel(record.id, reason=reason, timeout=timeout)
            return answer, await api.pipelines.get(record.id)

    answer, record = run(ask())
    code, said = _answer(answer, record)
    if json:
        print_json({**_built(record), "accepted": answer.accepted, "reason": answer.reason})
        return code
    echo(f"{record.id} {said}")
    for name in record.abandoned_items:
        echo(f"  abandoned, it would not stop: {name}")
    return code


def _built(record: PipelineRecord) -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(view_of(record))
    return fields


def _answer(answer: CancelAnswer, record: PipelineRecord) -> tuple[Exit, str]:
    """Which won. Somebody else may have cancelled it before, which is no less an end."""
    if record.status is PipelineJobStatus.CANCELLED:
        return (
            (Exit.OK, "cancelled") if answer.accepted else (Exit.CONFLICT, _TOO_LATE + "CANCELLED")
        )
    if not record.is_final:
        return Exit.NOT_YET, f"was asked to stop and is still {record.status}"
    if answer.accepted:
        return Exit.CONFLICT, f"ended {record.status} before the cancellation took effect"
    return Exit.CONFLICT, _TOO_LATE + record.status


_TOO_LATE = "had already ended "
