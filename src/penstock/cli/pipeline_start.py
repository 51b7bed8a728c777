"""`penstock pipeline start`, `watch` and `retry-failed`: what begins or follows a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.exits import Exit
from penstock.cli.paper import print_json
from penstock.cli.parameters import PAIR, as_json
from penstock.cli.pipeline_config import explained, gather
from penstock.cli.pipeline_display import Board
from penstock.cli.pipeline_follow import (
    Interrupts,
    ending,
    follow,
    print_events,
    say_how_to_go_on,
)
from penstock.cli.pipeline_runs import run_meant
from penstock.cli.place import Place, api_at, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import short_id
from penstock.core.errors import InvalidRequest, NotRunning, Unavailable
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.records import PipelineRecord
from penstock.workloads.pipeline.views import view_of

if TYPE_CHECKING:
    from penstock.app import Client

followed = click.option(
    "--follow/--detach",
    "follows",
    default=None,
    help="Show it until it ends, or return at once, as it does if nothing is said.",
)
strict_too = click.option(
    "--strict", is_flag=True, help="End with 1 rather than 0 if the run ends PARTIAL."
)


@click.command()
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


@click.command("retry-failed")
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


@click.command()
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
