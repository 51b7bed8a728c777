"""`penstock spool serve`: a model at work on a folder."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec.structs import replace

from penstock.app.service import Stop, log_to_stderr, run_service
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import moment, plural, size, span
from penstock.cli.generation import PULL
from penstock.cli.groups import command
from penstock.cli.live import LiveScreen
from penstock.cli.options import as_lines, converted, options
from penstock.cli.output import banner, rich_text
from penstock.cli.spool_view import check_folder
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.pool import EventKind, JobEvent

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.config import Settings
    from penstock.workloads.llm.runner import Runner
    from penstock.workloads.llm.values import ModelFacts
    from penstock.workloads.spool.server.server import Server

_WORDS = {
    EventKind.CLAIMED: ("running", "yellow"),
    EventKind.DONE: ("done", "green"),
    EventKind.FAILED: ("failed", "red"),
    EventKind.REQUEUED: ("requeued", "cyan"),
    EventKind.LET_GO: ("let go", "magenta"),
}
_WIDEST = max(len(word) for word, _ in _WORDS.values())


def _line(event: JobEvent) -> Text:
    word, style = _WORDS[event.what]
    head = f"{moment(event.at, time.time())}  {event.job_id}  "
    return rich_text(head, (f"{word:<{_WIDEST}}", style), *_details(event))


def _details(event: JobEvent) -> list[str | tuple[str, str]]:
    if event.what is EventKind.CLAIMED:
        return []
    parts: list[str | tuple[str, str]] = [f"  {span(event.seconds)}"]
    if event.tokens:
        speed = f", {event.tokens / event.seconds:.0f}/s" if event.seconds else ""
        parts.append(f"  {plural(event.tokens, 'token')}{speed}")
    why = ": ".join(filter(None, (event.code, event.reason)))
    if why:
        parts.append((f"  {why}", "dim"))
    return parts


def _status(server: Server, seconds: float) -> Text:
    counts = server.counts
    return rich_text(
        *("queued ", (f"{server.queued:,}", "cyan"), "   "),
        *("running ", (f"{len(server.running):,}", "yellow"), "   "),
        *("done ", (f"{counts.done:,}", "green"), "   "),
        *("failed ", (f"{counts.failed:,}", "red" if counts.failed else "")),
        (f"   {counts.tokens:,} tokens   up {span(seconds)}", "dim"),
        ("".join(f"   {name}" for name in server.health.troubles), "bold red"),
        cut=True,
    )


log = logging.getLogger("penstock.cli")
C = TypeVar("C", ModelConfig, ServerConfig)
_OPTIONS = {
    "slots": "workers",
    "keep_jobs": "keep",
    "keep_seconds": "keep_for",
    "drain": "drain_timeout",
}
"""Options that are not named as their fields."""


@command()
@options(
    """
    --model FILE|NAME... as models  A GGUF file, or a model's name; may be repeated, the first is
            the default.
    --models-dir DIRECTORY      Where models are kept; else the setting models.dir.
    --split-model NAME|FILE     A model that is split over nodes, instead of whole ones: this server
            is its origin, with the settings of [node].
    --join ADDRESS...           A node of the split model.
    --workers N                 Jobs at once; by default 8.
    --context TOKENS            Context of one job.
    --threads N                 Threads that compute; else one per core.
    --memory SIZE               Memory that all models may take together.
    --max-tokens N              Default limit of a job: 2048.
    --attempts N                How often a job may crash it: 3.
    --drain-timeout DURATION as drain  How long running jobs may take to finish when it is stopped;
            by default 30s.
    --keep N as keep_jobs       Keep this many ended jobs.
    --keep-for DURATION as keep_seconds  Keep ended jobs this long.
    """,
    models_dir=click.Path(file_okay=False, path_type=Path),
)
@click.option(
    *("--no-sync", "sync"),
    flag_value=Sync.NONE.value,
    default=None,
    help="Faster, but what is done may not survive power loss.",
)
@as_lines
def serve(
    engine: EngineRef,
    /,
    workspace: Path,
    split_model: str | None,
    join: tuple[str, ...],
    json: bool,
    verbose: bool,
    **said: Any,
) -> int:
    """Serve the jobs of a folder with a local model.

    Several servers may share one. It runs until SIGINT or SIGTERM, then lets running jobs
    finish; a second signal queues them again and stops it at once. Without --model it has all
    models of 'penstock model list'.
    """
    check_folder(workspace)
    said["workspace"] = workspace
    settings = engine.settings()
    if split_model and (said["models"] or said["models_dir"]):
        raise InvalidRequest("--split-model", "can't be used with --model or --models-dir")
    if join and not split_model:
        raise InvalidRequest("--join", "is for a split model", hint="add --split-model NAME")
    if split_model:
        node = settings.node
        node = replace(node, model=split_model, join=join or node.join)
        settings = replace(settings, node=node)
    config = _checked(ServerConfig, said)
    models = settings.models
    served = _checked(
        ModelConfig,
        said,
        models_dir=said["models_dir"] or settings.model_folder,
        slots=said["workers"],
        gpu_layers=models.gpu_layers,
        tensor_split=models.tensor_split,
        projector_gpu=models.projector_gpu,
    )
    runner = partial(_split, settings) if split_model else partial(_whole, served)
    return run_service(_serve(config, runner, json=json, verbose=verbose))


def _checked(kind: type[C], said: Mapping[str, Any], **more: Any) -> C:
    """Made of its fields that were said. Raises InvalidRequest, which names the option."""
    given = {**{name: said[name] for name in kind.__struct_fields__ if name in said}, **more}
    try:
        return converted({name: of for name, of in given.items() if of is not None}, kind)
    except InvalidRequest as error:
        name = _OPTIONS.get(error.field, error.field)
        raise InvalidRequest("--" + name.replace("_", "-"), error.problem) from error


async def _serve(
    config: ServerConfig, make: Callable[[], tuple[str, Runner]], *, json: bool, verbose: bool
) -> int:
    from penstock.workloads.spool.server.server import Server

    stop = Stop()
    stop.listen()
    with LiveScreen(_line, json=json) as screen:
        log_to_stderr(verbose=verbose)
        name, runner = make()
        try:
            server = Server(config, runner)
            if not await stop.first_of(_start(server, runner, name, screen)):
                return Exit.OK
            await stop.first_of(server.wait())
            return await _stopped(server, stop)
        finally:
            await runner.close()


def _whole(engine: ModelConfig) -> tuple[str, Runner]:
    """The model that is loaded first, and what runs it. Raises if one that was named is no good, or
    none is there, or nothing can load it."""
    from penstock.app.llm import llama_runner, llama_version, served_models

    models = served_models(engine)
    if not models:
        raise NotFound("there is no model here", hint=PULL)
    llama_version()
    return models[0].name, llama_runner(engine)


def _split(settings: Settings) -> tuple[str, Runner]:
    from penstock.app.llm import pipe_runner

    return settings.node.model, pipe_runner(settings)


async def _start(server: Server, runner: Runner, name: str, screen: LiveScreen) -> None:
    early: list[JobEvent] = []
    server.on_event = early.append
    await server.start(lambda fraction, _: screen.load(fraction, f"loading {name}"))
    model, *others = await runner.models()
    banner = await asyncio.to_thread(_banner, server.config, runner.engine, model, others)
    screen.say(banner, **_ready(server.config, model))
    for event in early:
        screen.tell(event)
    server.on_event = screen.tell
    screen.show_status(partial(_status, server))


async def _stopped(server: Server, stop: Stop) -> int:
    if await stop.unless_urgent(server.stop()):
        log.info("stopped")
        return Exit.OK
    await server.stop(at_once=True)
    log.warning("stopped at once; jobs that still ran are queued again")
    return Exit.INTERRUPTED


def _ready(config: ServerConfig, model: ModelFacts) -> dict[str, Any]:
    """The first of the JSON lines."""
    return {
        "what": "ready",
        "workspace": str(config.workspace),
        "model": msgspec.to_builtins(model),
        "pid": os.getpid(),
    }


def _banner(
    config: ServerConfig, engine: str, model: ModelFacts, others: Sequence[ModelFacts]
) -> str:
    counts = Workspace(config.workspace).counts()
    survives = "power loss" if config.sync is Sync.FULL else "the process, but not power loss"
    facts = [
        ("workspace", str(config.workspace)),
        ("model", f"{model.name}, {size(model.size)}, {model.context:,} tokens for a job"),
        ("on demand", ", ".join(one.name for one in others)),
        ("engine", engine),
        ("at once", plural(config.workers, "job")),
        ("durability", f"what is DONE survives {survives}"),
        ("queued", plural(counts[Status.QUEUED], "job")),
        ("submit", f'penstock spool submit {shlex.quote(str(config.workspace))} "…"'),
    ]
    return banner(f"spool server, process {os.getpid()}", facts)
