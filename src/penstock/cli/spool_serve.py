"""`penstock spool serve`: a model at work on a folder."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from penstock.cli.exits import Exit
from penstock.cli.journal import keep_journal
from penstock.cli.llm import PULL, told
from penstock.cli.parameters import DURATION, SIZE
from penstock.cli.place import Place
from penstock.cli.spool_jobs import check_folder, placed
from penstock.cli.words import plural, size
from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.workspace import Workspace

if TYPE_CHECKING:
    from penstock.cli.service import Stop
    from penstock.cli.spool_screen import Screen
    from penstock.workloads.llm.runner import Runner
    from penstock.workloads.llm.values import ModelFacts
    from penstock.workloads.spool.serving.events import Event
    from penstock.workloads.spool.serving.server import Server
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
    from penstock.cli.service import Stop
    from penstock.cli.spool_screen import Screen
    from penstock.workloads.spool.llama.runner import LlamaRunner
    from penstock.workloads.spool.serving.server import Server

    stop = Stop()
    stop.listen()
    with Screen(json=json) as screen, told():
        keep_journal(verbose=verbose)
        name, runner = _default(engine), LlamaRunner(engine)
        try:
            server = Server(config, runner)
            if not await _started(server, runner, name, screen, stop):
                return Exit.OK
            await stop.first_of(server.wait())
            return await _stopped(server, stop)
        finally:
            await runner.close()


def _default(engine: ModelConfig) -> str:
    """The model that is loaded first. Raises if one that was named is no good, or none is there,
    or nothing can load it."""
    from penstock.workloads.llm.models.served import served
    from penstock.workloads.spool.llama.trial import engine_version

    models = served(engine)
    if not models:
        raise NotFound("there is no model here", hint=PULL)
    engine_version()
    return models[0].name


async def _started(server: Server, runner: Runner, name: str, screen: Screen, stop: Stop) -> bool:
    """Whether it has; not if it was asked to stop meanwhile."""
    starting = asyncio.create_task(_start(server, runner, name, screen))
    asked = asyncio.create_task(stop.asked.wait())
    await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        asked.cancel()
        starting.result()
        return True
    starting.cancel()
    await asyncio.wait({starting})
    return False


async def _start(server: Server, runner: Runner, name: str, screen: Screen) -> None:
    early: list[Event] = []
    server.on_event = early.append
    await server.start(screen.load(name))
    model, *others = await runner.models()
    banner = await asyncio.to_thread(_banner, server.config, runner.engine, model, others)
    screen.say(banner, **_ready(server.config, model))
    for event in early:
        screen.tell(event)
    server.on_event = screen.tell
    screen.stand(server)


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
