"""`penstock up` and `down`: an engine, with workers for an application, in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.engine import EngineRef, run
from penstock.cli.exits import Exit
from penstock.cli.formats import plural, span
from penstock.cli.groups import command
from penstock.cli.options import options, serving, waits
from penstock.cli.output import banner, echo, print_done
from penstock.cli.service import Stop, leave_at_once, log_to_stderr, run_service
from penstock.core.errors import (
    NotPermitted,
    NotRunning,
    OwnedByAnother,
    StoreFailed,
    Unavailable,
    WaitTimedOut,
)
from penstock.lifecycles.canonical import TERMINAL
from penstock.ports.store import Durability
from penstock.workloads.llm.values import model_of
from penstock.workloads.pipes.status import LABEL

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.app.engine import Engine
    from penstock.app.portal import Portal
    from penstock.app.standby import StandBy
    from penstock.config import Settings
    from penstock.ports.executor import Executor

log = logging.getLogger("penstock.cli")

_AGAIN = 1.0
"""Seconds between two tries to reach a database that was lost."""
_USUAL = "127.0.0.1:7470"
_SURVIVES = {
    Durability.DISK: "an acknowledged job survives power loss",
    Durability.OS: "an acknowledged job survives the process, but not power loss",
    Durability.MEMORY: "NOTHING is kept: for tests",
}


@command()
@serving
@options(
    """
    --listen ADDR...                  Where to listen: unix:, unix:/PATH or tcp://127.0.0.1:PORT;
            may be repeated.
    --store URL                       Keep jobs in PostgreSQL: postgresql://user@host/database.
    --durability DURABILITY           What an acknowledged job survives: power loss, the process's
            death, or nothing.
    --http HOST:PORT                  Where HTTP listens; by default 127.0.0.1:7470.
    --link HOST:PORT as link__listen  Where workers on other machines connect, over TLS.
    --bus URL as bus__url             A NATS server through which workers can join:
            nats://127.0.0.1:4222, tls://HOST:4222.
    --no-http                         Open no HTTP port.
    --rules FILE                      The file of safety rules.
    --no-worker                       Run no jobs here; workers join from elsewhere.
    """,
    durability=click.Choice([durability.value for durability in Durability]),
)
def up(
    engine: EngineRef,
    /,
    app: str | None,
    http: str | None,
    no_http: bool,
    no_worker: bool,
    verbose: bool,
    **said: Any,
) -> None:
    """Start an engine, with workers for an application.

    It runs until SIGTERM, SIGINT or 'penstock down', then lets running jobs finish; a second signal
    stops it at once. Unfinished jobs go on after the next start.
    """
    from penstock.app import load_app

    if engine.connect:
        raise click.UsageError("--connect can't be used here: --listen says where to listen")
    settings = engine.settings(http__listen="" if no_http else http, **said)
    any_port = not (settings.http.listen or no_http)
    if any_port:
        settings = settings.changed(http__listen=_USUAL)
    application = load_app(app) if app else None
    log_to_stderr(verbose=verbose, log_format=settings.telemetry.log_format)
    run_service(_serve(engine, settings, None if no_worker else application, no_worker, any_port))


async def _serve(
    ref: EngineRef, settings: Settings, app: App | None, no_worker: bool, any_port: bool
) -> None:
    from penstock.app.application import make_executors
    from penstock.app.engine import Engine
    from penstock.app.portal import Portal

    stop = Stop()
    stop.listen()
    standby: StandBy | None = None
    was_up = False
    try:
        while not stop.asked.is_set():
            executors = [] if no_worker else make_executors(app, settings)
            engine = Engine(
                settings,
                executors,
                any_port=any_port,
                patience=0.0 if settings.store else None,
                sockets=standby.sockets() if standby is not None else None,
            )
            if app is not None:
                portal = Portal(asyncio.get_running_loop())
                engine.on_failure = portal.fail
                engine.on_open = partial(_bind, app, engine, portal)
            try:
                await engine.start()
            except OwnedByAnother:
                standby = standby or await _standing_by(settings, any_port)
                await stop.first_of(standby.run())
            except StoreFailed as error:
                if not was_up:
                    raise
                log.warning("%s; trying again", error.message)
                await stop.first_of(asyncio.sleep(_AGAIN))
            else:
                was_up = True
                await _run(ref, engine, executors, stop)
    finally:
        if standby is not None:
            await standby.close()
    log.info("stopped")


def _bind(app: App, engine: Engine, portal: Portal) -> None:
    from penstock.app.client import Client

    app.bind(Client(engine.api, portal, app.functions))


async def _run(ref: EngineRef, engine: Engine, executors: list[Executor], stop: Stop) -> None:
    """Until it is asked to stop, or another engine owns the database."""
    try:
        topics = sorted({topic for executor in executors for topic in executor.topics})
        echo(await _banner(ref, engine, topics))
        await stop.first_of(engine.wait())
    except Unavailable:
        if not engine.was_replaced:
            raise
    finally:
        if not await stop.unless_urgent(engine.stop()):
            leave_at_once("stopped at once; jobs that still ran are left to the next start")
        if engine.left_running:
            leave_at_once(str(engine.failure), Exit.UNAVAILABLE)


async def _standing_by(settings: Settings, any_port: bool) -> StandBy:
    from penstock.app.standby import StandBy

    standby = StandBy(settings, any_port=any_port)
    await standby.start()
    echo(_standby_banner(settings, standby))
    return standby


def _standby_banner(settings: Settings, standby: StandBy) -> str:
    owner = standby.engines.owner
    facts = [
        ("data", str(settings.data_dir)),
        ("owner", owner.name if owner else "being replaced"),
        ("listening", ", ".join(settings.addresses)),
        ("http", standby.http or "off"),
        ("worker", "none here while it stands by"),
    ]
    text = "stands by: connections are passed on to the owner, until that is gone"
    return banner(f"process {os.getpid()}", [*facts, ("state", text)])


async def _banner(ref: EngineRef, engine: Engine, topics: list[str]) -> str:
    settings, status = engine.settings, await engine.api.status()
    durability = settings.durability
    rules = f"{settings.rules} ({status.rules})" if settings.rules else "none: all jobs allowed"
    facts = [
        ("data", str(settings.data_dir)),
        ("durability", f"{durability.value}: {_SURVIVES[durability]}"),
        ("rules", rules),
        ("listening", ", ".join(map(str, engine.addresses))),
        ("http", f"{engine.url} (read {engine.url}/docs)" if engine.url else "off"),
        ("dashboard", await _dashboard(ref, engine)),
        ("worker", _worker(engine, topics)),
    ]
    for worker in await engine.api.workers():
        if worker.local and LABEL in worker.labels:
            facts.append(("node", f"{worker.labels[LABEL]}, of {settings.node.model}"))
    if waiting := sum(n for state, n in status.tally.items() if state not in TERMINAL):
        facts.append(("resumed", f"{plural(waiting, 'unfinished job')} of an earlier run"))
    if topics and all(map(model_of, topics)):
        facts.append(("ask", ref.command('ask "…"')))
    else:
        topic = topics[0] if topics else "TOPIC"
        facts.append(("submit", ref.command(f"submit {topic} --input '{{…}}' --wait")))
    return banner(f"process {status.pid}", facts)


async def _dashboard(ref: EngineRef, engine: Engine) -> str:
    """On a terminal a link that signs a browser in; what goes to a log must not have one."""
    if not engine.url:
        return ""
    if sys.stdout.isatty():
        link = await engine.api.keys.create_link()
        return f"{link.url} (works once, for {span(link.expires_at - time.time())})"
    return f"{engine.url}/dashboard/ (sign in with the link of '{ref.command('dashboard')}')"


def _worker(engine: Engine, topics: list[str]) -> str:
    if not engine.worker_id:
        return "none here; start one with 'penstock worker start --app MODULE:APP'"
    if not topics:
        return f"{engine.worker_id}, with no jobs of its own"
    some = ", ".join(topics[:5]) + (f" and {len(topics) - 5} more" if len(topics) > 5 else "")
    return f"{engine.worker_id}, {engine.settings.concurrency} at once: {some}"


_LOOK = 0.1
"""Seconds between checks of an engine that is stopping."""


@command()
@options("--now  Do not let running jobs finish.")
@waits("60s", "How long to wait for it to end.")
def down(engine: EngineRef, now: bool, wait_timeout: float, json: bool) -> None:
    """Stop the engine of this data directory.

    It lets running jobs finish, and this command waits until it has ended. Unfinished jobs go on
    after the next start.
    """
    if engine.connect:
        raise click.UsageError("--connect can't be used here: run it where the engine runs")
    run(_down(engine, now, wait_timeout, json))


async def _down(ref: EngineRef, now: bool, wait_timeout: float, json: bool) -> None:
    async with ref.api() as api:
        pid = (await api.status()).pid
    try:
        os.kill(pid, signal.SIGTERM)
        if now:
            await asyncio.sleep(_LOOK)
            os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise NotPermitted(f"process {pid} belongs to another user") from error
    end = time.monotonic() + wait_timeout
    while await _answers(ref):
        if time.monotonic() > end:
            raise WaitTimedOut(
                f"the engine, process {pid}, has not ended yet",
                hint="it finishes its running jobs; 'penstock down --now' does not wait for them",
            )
        await asyncio.sleep(_LOOK)
    print_done(json, {"pid": pid, "stopped": True}, f"stopped (process {pid})")


async def _answers(ref: EngineRef) -> bool:
    try:
        async with ref.client():
            return True
    except NotRunning:
        return False
