"""`penstock pipeline`: staged pipelines, their runs and what those share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.groups import Commands
from penstock.cli.ids import meant
from penstock.cli.paper import emit, print_json
from penstock.cli.parameters import DURATION, PAIR, as_json
from penstock.cli.pipeline_config import changed_fields, explained, gather
from penstock.cli.pipeline_display import (
    Board,
    breakers_table,
    item_errors,
    items_table,
    print_pipeline,
    print_pipelines,
    runs_table,
    status_page,
)
from penstock.cli.pipeline_follow import (
    Interrupts,
    ending,
    follow,
    print_events,
    say_how_to_go_on,
)
from penstock.cli.place import Place, api_at, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import short_id
from penstock.core.errors import InvalidRequest, NotFound, NotRunning, PenstockError, Unavailable
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.interface import CancelAnswer, RunQuery
from penstock.workloads.pipeline.records import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineInfo,
    PipelineRecord,
    pipeline_of,
)
from penstock.workloads.pipeline.views import item_view, view_of

if TYPE_CHECKING:
    from penstock.app import Client


@click.group(cls=Commands)
def pipeline() -> None:
    """Start, watch and look into staged pipelines."""


@pipeline.command("list")
@as_json
@placed
@click.pass_obj
def list_pipelines(place: Place, json: bool) -> None:
    """List the pipelines that can be started."""
    found = run(_declared(place))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no pipelines; 'penstock up --app MODULE:APP' serves those of an app", err=True)
    else:
        print_pipelines(found)


@pipeline.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def show(place: Place, name: str, json: bool) -> None:
    """Draw a pipeline: its stages, its config, its alerts.

    If no engine is running, NAME is MODULE:PIPELINE.
    """
    found = run(_shown(place, name))
    print_json(msgspec.to_builtins(found)) if json else print_pipeline(found)


async def _declared(place: Place) -> list[PipelineInfo]:
    async with api_at(place) as api:
        return await api.pipelines.list()


async def _shown(place: Place, name: str) -> PipelineInfo:
    """What the running engine says; if none runs, what is installed here."""
    try:
        async with api_at(place) as api:
            return await api.pipelines.show(name)
    except NotRunning:
        if place.connect:
            raise
    echo("penstock: no engine is running; this is what is installed here", err=True)
    from penstock.workloads.pipeline.definition import load_pipeline

    return load_pipeline(name).info()


# -- starting and following ------------------------------------------------------

followed = click.option(
    "--follow/--detach",
    "follows",
    default=None,
    help="Show it until it ends, or return at once, as it does if nothing is said.",
)
strict_too = click.option(
    "--strict", is_flag=True, help="End with 1 rather than 0 if the run ends PARTIAL."
)


@pipeline.command()
@click.argument("name")
@click.option(
    "--set",
    "pairs",
    type=PAIR,
    multiple=True,
    metavar="KEY=VALUE",
    help="A field of its config, as JSON or text; OUTER.INNER=VALUE; may be repeated.",
)
@click.option("--config", "file", metavar="FILE", help="Its config: a file .json or .toml.")
@click.option("--key", help="An idempotency key: the same key again is the same run.")
@click.option("--tenant", default="default", help="Whom it belongs to.")
@followed
@strict_too
@as_json
@placed
@click.pass_obj
def start(
    place: Place,
    /,
    name: str,
    pairs: tuple[tuple[str, str], ...],
    file: str | None,
    key: str | None,
    tenant: str,
    follows: bool | None,
    strict: bool,
    json: bool,
) -> int:
    """Start a run of a pipeline; prints its id.

    With --follow it shows the run until it ends, and the exit code says how: COMPLETED and
    PARTIAL 0 (PARTIAL 1 with --strict), FAILED 1 (6 and 7 if its job was DENIED or ended
    TIMEOUT), CANCELLED 5. Ctrl-C leaves the run alone.
    If no engine is running, the run goes on in this process and is always followed: NAME is
    MODULE:PIPELINE then; Ctrl-C cancels it.
    """
    config = gather(file, pairs)
    options = {"tenant": tenant, "idempotency_key": key}

    async def begin(api: EngineApi) -> PipelineRecord:
        return await api.pipelines.start(name, config, tenant=tenant, idempotency_key=key)

    try:
        if not place.connect and follows is not False and run(_nobody(place)):
            return _here(place, name, config, options, strict, json)
        return _begin(place, begin, bool(follows), strict, json)
    except InvalidRequest as error:
        raise explained(error, pairs) from error


async def _nobody(place: Place) -> bool:
    """Whether no engine is running. Asked first: an engine that is lost later on may have
    begun the run, which must not be begun here once more."""
    try:
        async with api_at(place):
            return False
    except NotRunning:
        return True


@pipeline.command("retry-failed")
@click.argument("job")
@followed
@strict_too
@as_json
@placed
@click.pass_obj
def retry_failed(place: Place, job: str, follows: bool | None, strict: bool, json: bool) -> int:
    """Start a run of what failed in an ended one; prints its id.

    It does again what failed and what depends on it, and takes over the rest. --follow shows
    it until it ends, as with 'start'.
    """

    async def begin(api: EngineApi) -> PipelineRecord:
        old = await run_meant(api, job)
        return await api.pipelines.retry_failed(old.id)

    return _begin(place, begin, bool(follows), strict, json)


@pipeline.command()
@click.argument("job")
@strict_too
@click.option("--json", "json", is_flag=True, help="Print its events as JSON lines.")
@placed
@click.pass_obj
def watch(place: Place, job: str, strict: bool, json: bool) -> int:
    """Show a run, live, until it ends.

    Without a terminal it is a line when a stage begins and one when it ends, from the first
    stage on. The exit code says how the run ended, as that of 'start --follow'. Ctrl-C leaves
    the run alone.
    """
    found: list[str] = []

    async def work() -> int:
        async with reading_at(place) as api:
            record = await run_meant(api, job)
            found.append(record.id)
            shown = print_events if json else follow
            return await ending(api, await shown(api, record), place, strict=strict)

    return _detachable(place, found, work)


def _begin(
    place: Place,
    begin: Callable[[EngineApi], Awaitable[PipelineRecord]],
    follows: bool,
    strict: bool,
    json: bool,
) -> int:
    """Begin a run on the running engine. Once it has begun, Ctrl-C leaves it alone."""
    begun: list[str] = []

    async def work() -> int:
        async with api_at(place) as api:
            record = await begin(api)
            begun.append(record.id)
            if follows:
                return await _to_the_end(api, record, place, strict, json)
        print_json(view_of(record)) if json else echo(record.id)
        return Exit.OK

    return _detachable(place, begun, work)


def _detachable(
    place: Place, begun: list[str], work: Callable[[], Coroutine[Any, Any, int]]
) -> int:
    try:
        return run(work())
    except KeyboardInterrupt:
        if not begun:
            raise
        say_how_to_go_on(place, begun[0])
        return Exit.INTERRUPTED
    except Unavailable as error:
        if begun and not error.hint:
            again = f"penstock {place.spelled()}pipeline watch {short_id(begun[0])}"
            error.hint = f"the run may go on; follow it with '{again}'"
        raise


async def _to_the_end(
    api: EngineApi,
    record: PipelineRecord,
    place: Place,
    strict: bool,
    json: bool,
    board: Board | None = None,
) -> int:
    """`board`: that of a run whose engine is this process."""
    ended = await follow(api, record, silent=json, board=board)
    if json:
        print_json(view_of(ended))
    return await ending(api, ended, place, strict=strict, here=board is not None)


def _here(
    place: Place,
    name: str,
    config: dict[str, Any],
    options: dict[str, Any],
    strict: bool,
    json: bool,
) -> int:
    """Run it in an engine of this process."""
    from penstock.app.pipelines import run_here

    echo("penstock: no engine is running; the run goes on in this process", err=True)
    codes: list[int] = []

    async def on_start(client: Client, record: PipelineRecord) -> None:
        board = Board(record)
        async with Interrupts(client.api.pipelines, board):
            codes.append(await _to_the_end(client.api, record, place, strict, json, board))

    data = place.settings().data_dir
    run(run_here(name, config, data=data, on_start=on_start, **options))
    return codes[0]


# -- runs and their items --------------------------------------------------------

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


@pipeline.command()
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
        emit(runs_table(found, time.time()))
        if len(found) == limit:
            echo(f"there may be more: --before {short_id(found[-1].id)}", err=True)


def _place(record: PipelineRecord) -> tuple[float, str]:
    return record.created_at, record.id


@pipeline.command()
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
        emit(items_table(found, inputs), *item_errors(found))
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


@pipeline.command()
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


@pipeline.command()
@click.argument("job")
@as_json
@placed
@click.pass_obj
def status(place: Place, job: str, json: bool) -> None:
    """Tell how far a run is: stages, errors, alerts."""

    async def look() -> tuple[PipelineRecord, str, dict[str, str]]:
        async with reading_at(place) as api:
            record = await run_meant(api, job)
            try:
                schema = (await api.pipelines.show(record.pipeline)).config_schema
            except PenstockError:  # nobody serves it any more
                schema = {}
            why = "" if record.is_final else await api.why(record.id)
            return record, why, changed_fields(record.config, schema)

    record, why, config = run(look())
    if json:
        print_json(view_of(record))
    else:
        emit(*status_page(record, why, config, place, time.time()))


# -- breakers --------------------------------------------------------------------


@pipeline.group(cls=Commands, acts=True)
@as_json
@placed
@click.pass_context
def breakers(ctx: click.Context, json: bool) -> None:
    """List the circuit breakers that runs share.

    An open one keeps items from being tried; `breakers reset` closes it by hand.
    """
    if ctx.invoked_subcommand is None:
        found = run(_list(ctx.obj))
        if json:
            print_json([shown(one) for one in found])
        elif not found:
            echo("no breakers: none has counted a failure yet", err=True)
        else:
            emit(breakers_table(found, time.time()))


async def _list(place: Place) -> list[Breaker]:
    async with reading_at(place) as api:
        return await api.pipelines.breakers()


@breakers.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def reset(place: Place, name: str, json: bool) -> None:
    """Close a breaker by hand: its items are tried again."""

    async def close() -> Breaker:
        async with api_at(place) as api:
            return await api.pipelines.reset_breaker(name)

    closed = run(close())
    print_json(shown(closed)) if json else echo(f"{closed.name} is {closed.state}")


def shown(one: Breaker) -> dict[str, object]:
    """Every field, also those that have their defaults."""
    return {name: msgspec.to_builtins(getattr(one, name)) for name in one.__struct_fields__}
