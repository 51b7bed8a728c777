"""`penstock spool serve`: a model at work on a folder."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.journal import keep_journal
from penstock.cli.live import LiveScreen
from penstock.cli.llm import PULL, told
from penstock.cli.parameters import DURATION, SIZE
from penstock.cli.place import Place
from penstock.cli.spool_options import check_folder, placed
from penstock.cli.terminal import harmless
from penstock.cli.words import moment, plural, size, span
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.running import EventKind, JobEvent

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.cli.service import Stop
    from penstock.workloads.llm.runner import Runner
    from penstock.workloads.llm.values import ModelFacts
    from penstock.workloads.spool.server.running import JobEvent
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
    from rich.text import Text

    word, style = _WORDS[event.what]
    head = f"{moment(event.at, time.time())}  {event.job_id}  "
    return Text.assemble(head, (f"{word:<{_WIDEST}}", style), *_details(event))


def _details(event: JobEvent) -> list[str | tuple[str, str]]:
    if event.what is EventKind.CLAIMED:
        return []
    parts: list[str | tuple[str, str]] = [f"  {span(event.seconds)}"]
    if event.tokens:
        speed = f", {event.tokens / event.seconds:.0f}/s" if event.seconds else ""
        parts.append(f"  {plural(event.tokens, 'token')}{speed}")
    why = ": ".join(filter(None, (event.code, event.reason)))
    if why:
        parts.append((f"  {harmless(why)}", "dim"))
    return parts


def _standing(server: Server, seconds: float) -> Text:
    from rich.text import Text

    counts = server.counts
    return Text.assemble(
        *("queued ", (f"{server.queued:,}", "cyan"), "   "),
        *("running ", (f"{len(server.running):,}", "yellow"), "   "),
        *("done ", (f"{counts.done:,}", "green"), "   "),
        *("failed ", (f"{counts.failed:,}", "red" if counts.failed else "")),
        (f"   {counts.tokens:,} tokens   up {span(seconds)}", "dim"),
        ("".join(f"   {name}" for name in server.health.troubles), "bold red"),
        no_wrap=True,
        overflow="ellipsis",
    )


log = logging.getLogger("penstock.cli")


@click.command()
@placed
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="FILE|NAME",
    help="A GGUF file, or a model of 'penstock models'; may be repeated, the first is the default.",
)
@click.option(
    "--models-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where models are kept, if not where 'penstock models' keeps them.",
)
@click.option("--workers", type=int, metavar="N", help="Jobs at once; 8 if nothing is said.")
@click.option("--context", type=int, metavar="TOKENS", help="What one job may have, with answer.")
@click.option("--threads", type=int, metavar="N", help="Threads that compute; else one per core.")
@click.option("--memory", type=SIZE, help="What all models may take together.")
@click.option("--max-tokens", type=int, metavar="N", help="Of jobs that name no limit; 2048.")
@click.option("--attempts", type=int, metavar="N", help="How often a job may crash it; 3.")
@click.option("--drain", type=DURATION, help="What running jobs get when it is stopped; 30s.")
@click.option(
    "--no-sync", is_flag=True, help="Faster, but what is done may not survive power loss."
)
@click.option("--keep", "keep_jobs", type=int, metavar="N", help="Keep so many ended jobs.")
@click.option("--keep-for", "keep_seconds", type=DURATION, help="Keep ended jobs so long.")
@click.option("--json", "json", is_flag=True, help="Print JSON lines.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.pass_obj
def serve(
    place: Place,
    workspace: Path,
    models: tuple[str, ...],
    models_dir: Path | None,
    workers: int | None,
    context: int | None,
    threads: int | None,
    memory: int | None,
    max_tokens: int | None,
    attempts: int | None,
    drain: float | None,
    no_sync: bool,
    keep_jobs: int | None,
    keep_seconds: float | None,
    json: bool,
    verbose: bool,
) -> int:
    """Let a model work on the jobs of a folder.

    Several servers may share one. It runs until SIGINT or SIGTERM, then lets running jobs
    finish; a second signal queues them again and stops it at once. Without --model it has all
    models of 'penstock models'.
    """
    from penstock.cli.service import run_service

    check_folder(workspace)
    settings = place.settings()
    engine = _checked(
        ModelConfig,
        models_dir=models_dir or settings.model_folder,
        models=models,
        slots=workers,
        context=context,
        threads=threads,
        memory=memory,
        gpu_layers=settings.model_gpu_layers,
        tensor_split=settings.model_tensor_split,
        projector_gpu=settings.model_projector_gpu,
    )
    config = _checked(
        ServerConfig,
        workspace=workspace,
        workers=workers,
        sync=Sync.NONE if no_sync else Sync.FULL,
        max_tokens=max_tokens,
        attempts=attempts,
        drain=drain,
        keep_jobs=keep_jobs,
        keep_seconds=keep_seconds,
    )
    return run_service(_serve(config, engine, json=json, verbose=verbose))


C = TypeVar("C", ModelConfig, ServerConfig)


def _checked(kind: type[C], **said: Any) -> C:
    """One with what was said; raises InvalidRequest, which names the field."""
    given = {name: value for name, value in said.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace("`", "").partition(" - at $.")
        name = {"slots": "workers", "keep_jobs": "keep", "keep_seconds": "keep_for"}.get(
            where, where
        )
        raise InvalidRequest(
            "--" + name.replace("_", "-"), message[0].lower() + message[1:]
        ) from error


async def _serve(config: ServerConfig, engine: ModelConfig, *, json: bool, verbose: bool) -> int:
    from penstock.app.llm import llama_runner
    from penstock.cli.service import Stop
    from penstock.workloads.spool.server.server import Server

    stop = Stop()
    stop.listen()
    with LiveScreen(_line, json=json) as screen, told():
        keep_journal(verbose=verbose)
        name, runner = _default(engine), llama_runner(engine)
        try:
            server = Server(config, runner)
            if not await stop.first_of(_start(server, runner, name, screen)):
                return Exit.OK
            await stop.first_of(server.wait())
            return await _stopped(server, stop)
        finally:
            await runner.close()


def _default(engine: ModelConfig) -> str:
    """The model that is loaded first. Raises if one that was named is no good, or none is there,
    or nothing can load it."""
    from penstock.app.llm import llama_version, served_models

    models = served_models(engine)
    if not models:
        raise NotFound("there is no model here", hint=PULL)
    llama_version()
    return models[0].name


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
    screen.stand(partial(_standing, server))


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
    from penstock import __version__

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
    lines = [f"penstock {__version__}, spool server, process {os.getpid()}"]
    lines += [f"  {name:<10}  {value}" for name, value in facts if value]
    return "\n".join([*lines, "ready; Ctrl-C stops it"])
