"""`penstock pipeline`: staged pipelines, their runs and what those share."""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import click
import msgspec

from penstock.app import App, Client
from penstock.app.finding import find_job
from penstock.app.service import cancelling
from penstock.cli import pipeline_display as display
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import short_id
from penstock.cli.groups import Commands
from penstock.cli.nouns import Noun
from penstock.cli.options import options, read_object, read_source, started
from penstock.cli.output import (
    Form,
    echo,
    emit,
    print_done,
    print_json,
    print_list,
    print_one,
    warn,
)
from penstock.cli.pipeline_display import RunView, ending, follow
from penstock.core.errors import (
    InvalidRequest,
    NotFound,
    NotRunning,
    PenstockError,
    Unavailable,
    WaitTimedOut,
)
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.definition import load_pipeline
from penstock.workloads.pipeline.interface import CancelAnswer, RunQuery, item_view
from penstock.workloads.pipeline.records import ItemOutcome, PipelineRecord, pipeline_of
from penstock.workloads.pipeline.run_config import changed_fields

STATUS = click.Choice([status.value for status in PipelineJobStatus], case_sensitive=False)
OUTCOME = click.Choice([outcome.value for outcome in ItemOutcome], case_sensitive=False)
_PEEK = 200
"""Bytes of an item's input that are read for a table."""
_PATIENCE = 3600.0
"""Seconds to wait for a run after Ctrl-C cancelled it."""
_strict = options("--strict  End with 1 rather than 0 if the run ends PARTIAL.")


async def find_run(api: EngineApi, text: str) -> PipelineRecord:
    """The run with this id, or with an id that begins or ends so."""
    job = await find_job(api, text)
    if pipeline_of(job.request.topic) is None:
        raise NotFound(
            f"job {job.job_id} is not a run of a pipeline: its topic is {job.request.topic}",
            hint=f"'penstock show {short_id(job.job_id)}' shows it",
        )
    return await api.pipelines.get(job.job_id)


@click.group(cls=Commands)
def pipeline() -> None:
    """Start, watch and inspect staged pipelines."""


PIPELINES = Noun(
    pipeline,
    display.pipeline_row,
    lambda api: api.pipelines.list(),
    "no pipelines; 'penstock up --app MODULE:APP' serves those of an app",
)
PIPELINES.list("List the pipelines that can be started.")


@pipeline.command()
async def show(engine: EngineRef, name: str, form: Form) -> None:
    """Show a pipeline: its stages, its config, its alerts.

    If no engine is running, NAME is MODULE:PIPELINE.
    """
    try:
        async with engine.api() as api:
            found = await api.pipelines.show(name)
    except NotRunning:
        if engine.connect:
            raise
        warn("no engine is running; this is what is installed here")
        found = load_pipeline(name).info()
    print_one(form, found, found.name, lambda: display.pipeline_page(found))


# -- starting and following ------------------------------------------------------


@pipeline.command()
@options(
    """
    --set KEY=VALUE...             A field of its config, as JSON or text; OUTER.INNER=VALUE; may be
            repeated.
    --input JSON|FILE|- as config  Its config: a JSON object, or a file .json or .toml.
    --key KEY as idempotency_key   Idempotency key. Starting with the same key again returns the
            existing run.
    --tenant TENANT=default        Its tenant.
    """
)
@started(None)
@_strict
async def start(
    engine: EngineRef,
    /,
    name: str,
    config: str | None,
    wait: bool | None,
    wait_timeout: float | None,
    strict: bool,
    json: bool,
    **said: Any,
) -> int:
    """Start a run of a pipeline; prints its id.

    With --wait it shows the run until it ends, and the exit code says how: COMPLETED and PARTIAL 0
    (PARTIAL 1 with --strict), FAILED 1 (6 and 7 if its job was DENIED or ended TIMEOUT), CANCELLED
    5. Ctrl-C then cancels the run.
    If no engine is running, the run executes in this process until it ends; NAME is then
    MODULE:PIPELINE.
    """
    pairs = said.pop("set")
    given = gather(config, pairs)
    async with AsyncExitStack() as stack:
        if wait is False:  # an engine in this process would end with it
            api, here = await stack.enter_async_context(engine.api()), False
        else:
            own = engine.client_or(partial(_own_engine, engine, name))
            client, here = await stack.enter_async_context(own)
            api = client.api
        try:
            wanted = load_pipeline(name).name if here else name
            record = await api.pipelines.start(wanted, given, **said)
        except InvalidRequest as error:
            raise explained(error, pairs) from error
        waits = bool(wait) or here or wait_timeout is not None
        return await _attached(engine, api, record, waits, wait_timeout, strict, json, here)


@pipeline.command()
@started(False)
@_strict
async def retry(
    engine: EngineRef,
    api: EngineApi,
    run_id: str,
    wait: bool,
    wait_timeout: float | None,
    strict: bool,
    json: bool,
) -> int:
    """Start a run of what failed in an ended one; prints its id.

    Runs again what failed and what depends on it, and reuses the rest. --wait shows it until
    it ends, as with 'start'.
    """
    record = await api.pipelines.retry_failed((await find_run(api, run_id)).id)
    waits = wait or wait_timeout is not None
    return await _attached(engine, api, record, waits, wait_timeout, strict, json)


@pipeline.command()
@_strict
@options("--json  Print its events as JSON lines.")
async def watch(
    engine: EngineRef, reading: EngineApi, run_id: str, strict: bool, json: bool
) -> int:
    """Show a run, live, until it ends.

    Without a terminal it prints a line when a stage begins and one when it ends, from the first
    stage on. The exit code says how the run ended, as that of 'start --wait'. Ctrl-C leaves the run
    alone.
    """
    board = RunView(await find_run(reading, run_id))
    ended = await follow(reading, board, "events" if json else "")
    return await ending(reading, ended, engine, strict=strict)


async def _attached(
    engine: EngineRef,
    api: EngineApi,
    record: PipelineRecord,
    wait: bool,
    wait_timeout: float | None,
    strict: bool,
    json: bool,
    here: bool = False,
) -> int:
    """Print the id of a run, or show it to its end. Ctrl-C then cancels it."""
    if not wait:
        print_done(json, record, record.id)
        return Exit.OK
    watching = engine.command(f"pipeline watch {short_id(record.id)}")

    async def cancel(reason: str) -> None:
        await api.pipelines.cancel(record.id, reason=reason, timeout=_PATIENCE)

    try:
        async with asyncio.timeout(wait_timeout), cancelling(cancel) as interrupted:
            ended = await follow(api, RunView(record), "record" if json else "")
        code = await ending(api, ended, engine, strict=strict, here=here)
        return Exit.INTERRUPTED if interrupted else code
    except TimeoutError:
        raise WaitTimedOut(f"run {record.id} has not ended yet", hint=watching) from None
    except Unavailable as error:
        error.hint = f"once an engine answers, follow the run with '{watching}'"
        raise


@asynccontextmanager
async def _own_engine(
    engine: EngineRef, name: str, running: Client | None
) -> AsyncIterator[Client]:
    """An engine in this process that serves one pipeline."""
    warn("no engine is running; the run executes in this process")
    definition, app = load_pipeline(name), App()
    app.add(definition)
    async with app.run(settings=engine.settings()) as client:
        await client.api.pipelines.show(definition.name)
        yield client


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


def _read(source: str) -> dict[str, Any]:
    if source == "-" or source.lstrip().startswith("{"):
        return read_object("--input", read_source("--input", source))
    path = source.removeprefix("@")
    data = read_source("--input", f"@{path}")
    if not path.endswith(".toml"):
        return read_object("--input", data, f"{path}: ")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{path}: not valid TOML: {error}"
        raise click.BadParameter(problem, param_hint="--input") from error


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
@options(
    """
    --pipeline NAME              Of this pipeline.
    --state STATES... as states  In this state; may be repeated.
    --tenant TENANT              Of this tenant.
    --retry-of RUN               Only retries of this run.
    --before RUN                 Next page: older than this one.
    -n, --limit 1..=20           Maximum number of results.
    """,
    states=STATUS,
)
async def runs(
    reading: EngineApi, limit: int, states: tuple[str, ...], form: Form, **said: Any
) -> None:
    """List runs of pipelines, newest first."""
    if said["retry_of"] is not None:
        said["retry_of"] = (await find_run(reading, said["retry_of"])).id
    if said["before"] is not None:
        last = await find_run(reading, said["before"])
        said["before"] = (last.created_at, last.id)
    statuses = tuple(map(PipelineJobStatus, states))
    found = await reading.pipelines.runs(RunQuery(statuses=statuses, limit=limit, **said))
    print_list(
        form,
        found,
        partial(display.run_row, now=time.time()),
        empty="no such runs; start one with 'penstock pipeline start NAME'",
        more=f"--before {short_id(found[-1].id)}" if len(found) == limit else "",
    )


@pipeline.command()
@options(
    """
    --outcome OUTCOME...  Only items with this outcome; may be repeated.
    --after SEQ=-1        The next page: after this one.
    -n, --limit 1..1000=20  Maximum number of results.
    """,
    outcome=OUTCOME,
    after=int,
)
async def items(
    reading: EngineApi, run_id: str, stage: str, outcome: tuple[str, ...], form: Form, **page: int
) -> None:
    """List the items of a stage, and how each ended.

    Shows after how many attempts, in what time, and why it failed. With --json it is an array
    that also has the input and the output of each.
    """
    job_id, outcomes = (await find_run(reading, run_id)).id, tuple(map(ItemOutcome, outcome))
    found = await reading.pipelines.items(job_id, stage, outcomes=outcomes, **page)
    if form.is_table and found:
        inputs = await asyncio.gather(*(_peek(reading, one.input) for one in found))
        emit(*display.items_page(found, inputs, wide=form.wide))
        if len(found) == page["limit"]:
            echo(f"there may be more: --after {found[-1].seq}", err=True)
    else:
        name = "no such items"
        print_list(
            form, found, lambda one: {}, name=lambda one: one.key, empty=name, json=item_view
        )


async def _peek(api: EngineApi, pointer: str) -> str:
    """The beginning of what an item was given."""
    try:
        data = await api.read_blob(pointer, 0, _PEEK) if pointer else b""
    except PenstockError as error:
        return error.message
    return " ".join(data.decode("utf-8", "replace").split())


@pipeline.command()
@options("--wait-timeout DURATION=10s  How long to wait for running items to stop.")
async def cancel(api: EngineApi, run_id: str, reason: str, wait_timeout: float, json: bool) -> int:
    """Cancel a run.

    Prints whether it was cancelled or had already ended (exit code 4), and which items did not
    stop and were abandoned. Exit code 9: it is still stopping when the time to wait is over.
    """
    job_id = (await find_run(api, run_id)).id
    answer = await api.pipelines.cancel(job_id, reason=reason, timeout=wait_timeout)
    record = await api.pipelines.get(job_id)
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
async def status(engine: EngineRef, reading: EngineApi, run_id: str, form: Form) -> None:
    """Show how far a run is: stages, errors, alerts."""
    record = await find_run(reading, run_id)
    try:
        schema = (await reading.pipelines.show(record.pipeline)).config_schema
    except PenstockError:  # no worker serves it any more
        schema = {}
    why = "" if record.is_final else await reading.why(record.id)
    config = changed_fields(record.config, schema)
    page = partial(display.status_page, record, why, config, engine, time.time())
    print_one(form, record, record.id, page)


# -- breakers --------------------------------------------------------------------


@pipeline.group(cls=Commands)
def breaker() -> None:
    """List, show and reset the circuit breakers that runs share.

    An open one keeps items from being tried; `breaker reset` closes it by hand.
    """


BREAKERS = Noun(
    breaker,
    display.breaker_row,
    lambda api: api.pipelines.breakers(),
    "no breakers: none has counted a failure yet",
    reading=True,
)
BREAKERS.list("List the circuit breakers.")
BREAKERS.show("Show a circuit breaker.")
BREAKERS.act(
    "reset",
    "Close a breaker by hand: its items are tried again.",
    lambda api, name: api.pipelines.reset_breaker(name),
    lambda closed: f"{closed.name} is {closed.state}",
)
