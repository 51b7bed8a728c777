"""`penstock pipeline`: staged pipelines, their runs and what those share."""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli import pipeline_display as display
from penstock.cli.exits import Exit
from penstock.cli.groups import Commands
from penstock.cli.ids import meant
from penstock.cli.paper import emit, print_json
from penstock.cli.parameters import DURATION, as_json, limited, read_object, read_source, several
from penstock.cli.pipeline_follow import Board, Json, ctrl_c_cancels, ending, follow
from penstock.cli.place import Place, api_at, ask_engine, placed, reading_at
from penstock.cli.terminal import echo
from penstock.cli.words import short_id
from penstock.core.errors import InvalidRequest, NotFound, NotRunning, PenstockError, Unavailable
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.interface import CancelAnswer, RunQuery, item_view
from penstock.workloads.pipeline.records import ItemOutcome, ItemRecord, PipelineRecord, pipeline_of

if TYPE_CHECKING:
    from penstock.workloads.pipeline.definition import Definition

F = Callable[..., Any]
STATUS = click.Choice([status.value for status in PipelineJobStatus], case_sensitive=False)
OUTCOME = click.Choice([outcome.value for outcome in ItemOutcome], case_sensitive=False)
_PEEK = 200
"""Bytes of an item's input that are read for a table."""

followed = click.option(
    "--follow/--detach",
    "follows",
    default=None,
    help="Show it until it ends, or return at once, as it does if nothing is said.",
)


def shows(form: Json, sentence: str = "Print JSON.") -> Callable[[F], F]:
    """Give a command --strict, --json for this form, and its Place as `answers` does."""
    strict = click.option(
        "--strict", is_flag=True, help="End with 1 rather than 0 if the run ends PARTIAL."
    )
    json = click.option("--json", "json", flag_value=form, default="", help=sentence)
    return lambda command: strict(json(placed(click.pass_obj(command))))


def answers(command: F) -> F:
    """Give a command --json and the options of its Place, which is its first argument."""
    return as_json(placed(click.pass_obj(command)))


async def run_meant(api: EngineApi, text: str) -> PipelineRecord:
    """The run with this id, or with an id that begins or ends so."""
    job = await meant(api, text)
    if pipeline_of(job.request.topic) is None:
        raise NotFound(
            f"job {job.job_id} is no run of a pipeline: its topic is {job.request.topic}",
            hint=f"'penstock show {short_id(job.job_id)}' tells of it",
        )
    return await api.pipelines.get(job.job_id)


@click.group(cls=Commands)
def pipeline() -> None:
    """Start, watch and look into staged pipelines."""


@pipeline.command("list")
@answers
def list_pipelines(place: Place, json: bool) -> None:
    """List the pipelines that can be started."""
    found = ask_engine(place, lambda api: api.pipelines.list())
    if json:
        print_json(found)
    elif not found:
        echo("no pipelines; 'penstock up --app MODULE:APP' serves those of an app", err=True)
    else:
        emit(display.pipelines_table(found))


@pipeline.command()
@click.argument("name")
@answers
def show(place: Place, name: str, json: bool) -> None:
    """Draw a pipeline: its stages, its config, its alerts.

    If no engine is running, NAME is MODULE:PIPELINE.
    """
    try:
        found = ask_engine(place, lambda api: api.pipelines.show(name))
    except NotRunning:
        if place.connect:
            raise
        echo("penstock: no engine is running; this is what is installed here", err=True)
        found = _installed(name).info()
    print_json(found) if json else emit(*display.pipeline_page(found))


# -- starting and following ------------------------------------------------------


@pipeline.command()
@click.argument("name")
@several("--set", "A field of its config, as JSON or text; OUTER.INNER=VALUE; may be repeated.")
@click.option("--config", metavar="FILE", help="Its config: a file .json or .toml.")
@click.option(
    *("--key", "idempotency_key"),
    metavar="KEY",
    help="An idempotency key: the same key again is the same run.",
)
@click.option("--tenant", default="default", help="Whom it belongs to.")
@followed
@shows("record")
def start(
    place: Place,
    /,
    name: str,
    config: str | None,
    follows: bool | None,
    strict: bool,
    json: Json,
    **said: Any,
) -> int:
    """Start a run of a pipeline; prints its id.

    With --follow it shows the run until it ends, and the exit code says how: COMPLETED and
    PARTIAL 0 (PARTIAL 1 with --strict), FAILED 1 (6 and 7 if its job was DENIED or ended
    TIMEOUT), CANCELLED 5. Ctrl-C leaves the run alone.
    If no engine is running, the run goes on in this process and is always followed: NAME is
    MODULE:PIPELINE then; Ctrl-C cancels it.
    """
    pairs = said.pop("set")
    given, opened = gather(config, pairs), api_at
    if here := not place.connect and follows is not False and not _is_running(place):
        echo("penstock: no engine is running; the run goes on in this process", err=True)
        definition = _installed(name)
        name, opened, follows = definition.name, partial(_own_engine, definition), True

    async def begin(api: EngineApi) -> PipelineRecord:
        return await api.pipelines.start(name, given, **said)

    try:
        return _attached(place, begin, follows, strict, json, opened, here)
    except InvalidRequest as error:
        raise explained(error, pairs) from error


@pipeline.command("retry-failed")
@click.argument("job")
@followed
@shows("record")
def retry_failed(place: Place, job: str, follows: bool | None, strict: bool, json: Json) -> int:
    """Start a run of what failed in an ended one; prints its id.

    It does again what failed and what depends on it, and takes over the rest. --follow shows
    it until it ends, as with 'start'.
    """

    async def begin(api: EngineApi) -> PipelineRecord:
        return await api.pipelines.retry_failed((await run_meant(api, job)).id)

    return _attached(place, begin, follows, strict, json)


@pipeline.command()
@click.argument("job")
@shows("events", "Print its events as JSON lines.")
def watch(place: Place, job: str, strict: bool, json: Json) -> int:
    """Show a run, live, until it ends.

    Without a terminal it is a line when a stage begins and one when it ends, from the first
    stage on. The exit code says how the run ended, as that of 'start --follow'. Ctrl-C leaves
    the run alone.
    """
    return _attached(place, partial(run_meant, text=job), True, strict, json, reading_at)


def _attached(
    place: Place,
    begin: Callable[[EngineApi], Awaitable[PipelineRecord]],
    follows: bool | None,
    strict: bool,
    json: Json,
    opened: Callable[[Place], AbstractAsyncContextManager[EngineApi]] = api_at,
    here: bool = False,
) -> int:
    """Begin a run, and show it to its end. Ctrl-C then leaves it alone, unless it runs `here`."""
    begun: list[str] = []

    async def work(api: EngineApi) -> int:
        record = await begin(api)
        begun.append(record.id)
        if not follows:
            print_json(record) if json else echo(record.id)
            return Exit.OK
        board = Board(record)
        async with ctrl_c_cancels(api.pipelines, board) if here else nullcontext():
            ended = await follow(api, board, json)
            return await ending(api, ended, place, strict=strict, here=here)

    again = f"penstock {place.spelled()}pipeline"
    try:
        return ask_engine(place, work, opened)
    except KeyboardInterrupt:
        if here or not begun:
            raise
        echo(f"\npenstock: job {begun[0]} goes on", err=True)
        echo(f"  follow it with '{again} watch {short_id(begun[0])}'", err=True)
        echo(f"  end it with '{again} cancel {short_id(begun[0])}'", err=True)
        return Exit.INTERRUPTED
    except Unavailable as error:
        if begun:
            watching = f"{again} watch {short_id(begun[0])}"
            error.hint = f"once an engine answers, follow the run with '{watching}'"
        raise


def _installed(name: str) -> Definition:
    from penstock.workloads.pipeline.definition import load_pipeline

    return load_pipeline(name)


def _is_running(place: Place) -> bool:
    """Whether an engine answers. To be asked before a start: an engine that is lost during it may
    have begun the run, which must not begin here as well."""
    try:
        return ask_engine(place, lambda api: asyncio.sleep(0, True))
    except NotRunning:
        return False


@asynccontextmanager
async def _own_engine(definition: Definition, place: Place) -> AsyncIterator[EngineApi]:
    """An engine in this process that serves one pipeline."""
    from penstock.app import App

    app = App()
    app.add(definition)
    async with app.run(settings=place.settings()) as client:
        await client.api.pipelines.show(definition.name)
        yield client.api


def gather(file: str | None, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The config of a file, JSON or TOML, with each pair set on top; a later one wins."""
    config = {} if file is None else _read(file)
    for key, text in pairs:
        *path, last = key.split(".")
        if not all((*path, last)):
            problem = f"{key!r} is not a field; write NAME=VALUE or OUTER.INNER=VALUE"
            raise click.BadParameter(problem, param_hint="--set")
        inner = config
        for depth, name in enumerate(path, 1):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                problem = f"{key}: {'.'.join(path[:depth])} is set already, and not an object"
                raise click.BadParameter(problem, param_hint="--set")
        try:
            inner[last] = msgspec.json.decode(text.encode("utf-8", "surrogateescape"))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            inner[last] = text
    return config


def _read(path: str) -> dict[str, Any]:
    data = read_source("--config", f"@{path}")
    if not path.endswith(".toml"):
        return read_object("--config", data, f"{path}: ")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{path}: not valid TOML: {error}"
        raise click.BadParameter(problem, param_hint="--config") from error


def explained(error: InvalidRequest, pairs: Iterable[tuple[str, str]]) -> InvalidRequest:
    """The same error; if a text was read as JSON, with how to write it as text."""
    name = error.field.removeprefix("config.")
    said = dict(pairs).get(name)
    wanted = error.problem.lower().partition(", got")[0]
    if error.hint or said is None or not ("`str`" in wanted or "string" in wanted):
        return error
    hint = f"""text that looks like JSON: --set '{name}="{said}"'"""
    return InvalidRequest(error.field, error.problem, hint=hint)


# -- runs and their items --------------------------------------------------------


@pipeline.command()
@click.option("--pipeline", metavar="NAME", help="Of this pipeline.")
@click.option("--status", type=STATUS, multiple=True, help="With this status; may be repeated.")
@click.option("--tenant", help="Of this tenant.")
@click.option("--retry-of", metavar="JOB", help="That retry this one.")
@click.option("--before", metavar="JOB", help="Older than this one: the next page.")
@limited(20, "-n")
@click.option("-q", "--quiet", is_flag=True, help="Print ids only.")
@answers
def runs(place: Place, /, limit: int, quiet: bool, json: bool, **said: Any) -> None:
    """List runs of pipelines, newest first."""

    async def find(api: EngineApi) -> list[PipelineRecord]:
        statuses = tuple(map(PipelineJobStatus, said.pop("status")))
        if said["retry_of"] is not None:
            said["retry_of"] = (await run_meant(api, said["retry_of"])).id
        if said["before"] is not None:
            last = await run_meant(api, said["before"])
            said["before"] = (last.created_at, last.id)
        return await api.pipelines.runs(RunQuery(statuses=statuses, limit=limit, **said))

    found = ask_engine(place, find, reading_at)
    if json:
        print_json(found)
    elif quiet:
        echo("".join(f"{record.id}\n" for record in found), nl=False)
    elif not found:
        echo("no such runs; start one with 'penstock pipeline start NAME'", err=True)
    else:
        emit(display.runs_table(found, time.time()))
        if len(found) == limit:
            echo(f"there may be more: --before {short_id(found[-1].id)}", err=True)


@pipeline.command()
@click.argument("job")
@click.argument("stage")
@click.option("--outcome", type=OUTCOME, multiple=True, help="That ended so; may be repeated.")
@click.option("--after", type=int, default=-1, metavar="SEQ", help="The next page: after this one.")
@limited(20, "-n", most=1000)
@answers
def items(
    place: Place, job: str, stage: str, outcome: tuple[str, ...], json: bool, **page: int
) -> None:
    """List the items of a stage, and how each ended.

    Tells after how many attempts, in what time, and why it failed. With --json it is an array
    that also has what each was given and what it gave.
    """

    async def find(api: EngineApi) -> tuple[list[ItemRecord], list[str]]:
        job_id, outcomes = (await run_meant(api, job)).id, tuple(map(ItemOutcome, outcome))
        found = await api.pipelines.items(job_id, stage, outcomes=outcomes, **page)
        peeked = [] if json else found
        return found, await asyncio.gather(*(_peek(api, one.input) for one in peeked))

    found, inputs = ask_engine(place, find, reading_at)
    if json:
        print_json([item_view(one) for one in found])
    elif not found:
        echo("no such items", err=True)
    else:
        emit(*display.items_page(found, inputs))
        if len(found) == page["limit"]:
            echo(f"there may be more: --after {found[-1].seq}", err=True)


async def _peek(api: EngineApi, pointer: str) -> str:
    """The beginning of what an item was given."""
    try:
        data = await api.read_blob(pointer, 0, _PEEK) if pointer else b""
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
@answers
def cancel(place: Place, job: str, reason: str, timeout: float, json: bool) -> int:
    """End a run.

    Says which won: the cancellation, or an end that came first (exit code 4); and what would
    not stop and was abandoned. A run that still stops when the time is over is exit code 9.
    """

    async def ask(api: EngineApi) -> tuple[CancelAnswer, PipelineRecord]:
        job_id = (await run_meant(api, job)).id
        answer = await api.pipelines.cancel(job_id, reason=reason, timeout=timeout)
        return answer, await api.pipelines.get(job_id)

    answer, record = ask_engine(place, ask)
    code, said = _won(answer, record)
    if json:
        view = msgspec.to_builtins(record)
        print_json({**view, "accepted": answer.accepted, "reason": answer.reason})
        return code
    echo(f"{record.id} {said}")
    for name in record.abandoned_items:
        echo(f"  abandoned, it would not stop: {name}")
    return code


def _won(answer: CancelAnswer, record: PipelineRecord) -> tuple[Exit, str]:
    """Whether the cancellation won. Another one that came before it is an end like others."""
    if not record.is_final:
        return Exit.NOT_YET, f"was asked to stop and is still {record.status}"
    if not answer.accepted:
        return Exit.CONFLICT, f"had already ended {record.status}"
    if record.status is PipelineJobStatus.CANCELLED:
        return Exit.OK, "cancelled"
    return Exit.CONFLICT, f"ended {record.status} before the cancellation took effect"


@pipeline.command()
@click.argument("job")
@answers
def status(place: Place, job: str, json: bool) -> None:
    """Tell how far a run is: stages, errors, alerts."""

    async def look(api: EngineApi) -> tuple[PipelineRecord, str, dict[str, str]]:
        record = await run_meant(api, job)
        try:
            schema = (await api.pipelines.show(record.pipeline)).config_schema
        except PenstockError:  # no worker serves it any more
            schema = {}
        why = "" if record.is_final else await api.why(record.id)
        return record, why, display.changed_fields(record.config, schema)

    record, why, config = ask_engine(place, look, reading_at)
    if json:
        print_json(record)
    else:
        emit(*display.status_page(record, why, config, place, time.time()))


# -- breakers --------------------------------------------------------------------


@pipeline.group(cls=Commands, acts=True)
@as_json
@placed
@click.pass_context
def breakers(ctx: click.Context, json: bool) -> None:
    """List the circuit breakers that runs share.

    An open one keeps items from being tried; `breakers reset` closes it by hand.
    """
    if ctx.invoked_subcommand is not None:
        return
    found = ask_engine(ctx.obj, lambda api: api.pipelines.breakers(), reading_at)
    if json:
        print_json(found)
    elif not found:
        echo("no breakers: none has counted a failure yet", err=True)
    else:
        emit(display.breakers_table(found, time.time()))


@breakers.command()
@click.argument("name")
@answers
def reset(place: Place, name: str, json: bool) -> None:
    """Close a breaker by hand: its items are tried again."""
    closed = ask_engine(place, lambda api: api.pipelines.reset_breaker(name))
    print_json(closed) if json else echo(f"{closed.name} is {closed.state}")
