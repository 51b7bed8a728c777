"""`penstock up`: an engine, and workers for an application, in one process."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from penstock.cli.journal import keep_journal
from penstock.cli.place import Place, placed
from penstock.cli.terminal import echo
from penstock.cli.words import plural
from penstock.lifecycles.canonical import TERMINAL
from penstock.ports.store import Durability
from penstock.workloads.llm.values import model_of
from penstock.workloads.pipes.status import LABEL

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.app.engine import Engine
    from penstock.config import Settings

log = logging.getLogger("penstock.cli")

_USUAL = "127.0.0.1:7470"
_SURVIVES = {
    Durability.DISK: "an acknowledged job survives power loss",
    Durability.OS: "an acknowledged job survives the process, but not power loss",
    Durability.MEMORY: "NOTHING is kept: for tests",
}


@click.command()
@click.option("--app", metavar="MODULE:APP", help="The application whose jobs to run here.")
@click.option(
    "--pipeline",
    multiple=True,
    metavar="NAME",
    help="A pipeline to serve as well, as MODULE:NAME; may be repeated.",
)
@click.option(
    "--containers",
    metavar="ENGINE",
    help="Run container jobs as well: auto, docker, podman, oci or unix:///PATH.",
)
@click.option(
    "--model",
    multiple=True,
    metavar="NAME",
    help="A language model to serve as well: its name, a file, or 'auto' for all that 'penstock"
    " models' lists; may be repeated.",
)
@placed
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDR",
    help="Where to listen: unix:, unix:/PATH or tcp://127.0.0.1:PORT; may be repeated.",
)
@click.option(
    "--durability",
    type=click.Choice([durability.value for durability in Durability]),
    help="What an acknowledged job survives: power loss, the process's death, or nothing.",
)
@click.option(
    "--http", metavar="HOST:PORT", help="Where HTTP listens; 127.0.0.1:7470 if nothing is said."
)
@click.option("--no-http", is_flag=True, help="Open no HTTP port.")
@click.option("--rules", metavar="FILE", help="The file of safety rules.")
@click.option("--concurrency", type=int, metavar="N", help="How many jobs to run at once here.")
@click.option("--no-worker", is_flag=True, help="Run no jobs here; workers join from elsewhere.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.pass_obj
def up(
    place: Place,
    app: str | None,
    pipeline: tuple[str, ...],
    containers: str | None,
    model: tuple[str, ...],
    listen: tuple[str, ...],
    durability: str | None,
    http: str | None,
    no_http: bool,
    rules: str | None,
    concurrency: int | None,
    no_worker: bool,
    verbose: bool,
) -> None:
    """Start an engine, with workers for an application.

    It runs until SIGTERM or SIGINT, then lets running jobs finish; a second signal stops it
    at once. Whatever it has accepted is taken up again at the next start.
    """
    from penstock.app import load_app
    from penstock.cli.service import run_service

    if place.connect:
        raise click.UsageError("--connect makes no sense here: --listen says where to listen")
    settings = place.settings(
        listen=listen or None,
        pipelines=pipeline or None,
        containers=containers,
        models=model or None,
        durability=durability,
        http="" if no_http else http,
        rules=rules,
        concurrency=concurrency,
    )
    any_port = not (settings.http or no_http)
    if any_port:
        settings = replace(settings, http=_USUAL)
    application = load_app(app) if app else None
    keep_journal(verbose=verbose)
    serving = _serve(place, settings, None if no_worker else application, no_worker, any_port)
    run_service(serving)


async def _serve(
    place: Place, settings: Settings, app: App | None, no_worker: bool, any_port: bool
) -> None:
    from penstock.app.application import make_executors
    from penstock.app.client import Client
    from penstock.app.engine import Engine
    from penstock.app.portal import Portal
    from penstock.cli.exits import Exit
    from penstock.cli.service import Stop, leave_at_once

    stop = Stop()
    stop.listen()
    executors = [] if no_worker else make_executors(app, settings)
    engine = Engine(settings, executors, any_port=any_port)
    if app is not None:
        portal = Portal(asyncio.get_running_loop())
        engine.on_failure = portal.fail
        engine.on_open = lambda: app.bind(Client(engine.api, portal, app.functions))
    await engine.start()
    try:
        topics = sorted({topic for executor in executors for topic in executor.topics})
        echo(await _banner(place, engine, topics))
        await stop.first_of(engine.wait())
    finally:
        if not await stop.unless_urgent(engine.stop()):
            leave_at_once("stopped at once; jobs that still ran are left to the next start")
        if engine.left_running:
            leave_at_once(str(engine.failure), Exit.UNAVAILABLE)
    log.info("stopped")


async def _banner(place: Place, engine: Engine, topics: list[str]) -> str:
    from penstock import __version__

    settings, status = engine.settings, await engine.api.status()
    durability = settings.durability
    rules = f"{settings.rules} ({status.rules})" if settings.rules else "none: all jobs allowed"
    facts = [
        ("data", str(settings.data_dir)),
        ("durability", f"{durability.value}: {_SURVIVES[durability]}"),
        ("rules", rules),
        ("listening", ", ".join(map(str, engine.addresses))),
        ("http", f"{engine.url} (read {engine.url}/docs)" if engine.url else "off"),
        ("worker", _worker(engine, topics)),
    ]
    for worker in await engine.api.workers():
        if worker.local and LABEL in worker.labels:
            facts.append(("node", f"{worker.labels[LABEL]}, of {settings.pipe_model}"))
    if waiting := sum(n for state, n in status.tally.items() if state not in TERMINAL):
        facts.append(("taken up", f"{plural(waiting, 'unfinished job')} of an earlier run"))
    facts.append(_how_to_use(place, topics))
    lines = [f"penstock {__version__}, process {status.pid}"]
    lines += [f"  {name:<10}  {value}" for name, value in facts]
    return "\n".join([*lines, "ready; Ctrl-C stops it"])


def _how_to_use(place: Place, topics: list[str]) -> tuple[str, str]:
    if topics and all(map(model_of, topics)):
        return "ask", f'penstock {place.spelled()}ask "…"'
    topic = topics[0] if topics else "TOPIC"
    return "submit", f"penstock {place.spelled()}submit {topic} --input '{{…}}' --wait"


def _worker(engine: Engine, topics: list[str]) -> str:
    if not engine.worker_id:
        return "none here; start one with 'penstock worker --app MODULE:APP'"
    if not topics:
        return f"{engine.worker_id}, with no jobs of its own"
    some = ", ".join(topics[:5]) + (f" and {len(topics) - 5} more" if len(topics) > 5 else "")
    return f"{engine.worker_id}, {engine.settings.concurrency} at once: {some}"
