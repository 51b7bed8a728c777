"""`penstock up` and `down`: an engine, with workers for an application, in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from penstock.app import load_app
from penstock.app.service import log_to_stderr, poll, run_service
from penstock.cli.engine import EngineRef
from penstock.cli.formats import plural, span
from penstock.cli.groups import command
from penstock.cli.options import options, serving
from penstock.cli.output import banner, echo, print_done
from penstock.core.errors import (
    NotPermitted,
    NotRunning,
    WaitTimedOut,
)
from penstock.lifecycles.canonical import TERMINAL
from penstock.ports.store import Durability
from penstock.workloads.llm.values import model_of
from penstock.workloads.pipes.status import LABEL

if TYPE_CHECKING:
    from penstock.app.engine import Engine
    from penstock.app.standby import StandBy
    from penstock.config import Settings

log = logging.getLogger("penstock.cli")

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
    --cluster                         Start a NATS server on this machine for --bus, at
            nats://127.0.0.1:4222 if that is not given.
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
    cluster: bool,
    no_http: bool,
    no_worker: bool,
    verbose: bool,
    **said: Any,
) -> None:
    """Start an engine, with workers for an application.

    It runs until SIGTERM, SIGINT or 'penstock down', then lets running jobs finish; a second signal
    stops it at once. Unfinished jobs go on after the next start.
    """
    from penstock.app.up import serve_engine

    if engine.connect:
        raise click.UsageError("--connect can't be used here: --listen says where to listen")
    said["bus__start_server"] = cluster or None
    settings = engine.settings(http__listen="" if no_http else http, **said)
    any_port = not (settings.http.listen or no_http)
    if any_port:
        settings = settings.changed(http__listen=_USUAL)
    application = load_app(app) if app else None
    log_to_stderr(verbose=verbose, log_format=settings.telemetry.log_format)

    async def on_start(started: Engine, topics: list[str]) -> None:
        echo(await _banner(engine, started, topics))

    run_service(
        serve_engine(
            settings,
            None if no_worker else application,
            no_worker=no_worker,
            any_port=any_port,
            on_start=on_start,
            on_standby=lambda standby: echo(_standby_banner(settings, standby)),
        )
    )


def _standby_banner(settings: Settings, standby: StandBy) -> str:
    owner = standby.engines.owner
    facts = [
        ("data", str(settings.data_dir)),
        ("owner", owner.name if owner else "being replaced"),
        ("listening", ", ".join(settings.addresses)),
        ("http", standby.http or "off"),
        ("worker", "none here while it stands by"),
    ]
    text = "stands by: answers reads, forwards the rest to the owner, until that is gone"
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
        ("bus", _bus(engine)),
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


def _bus(engine: Engine) -> str:
    """Without the server's address, which may have a password, unless it is our own."""
    server = engine.nats_server
    if server is None:
        return ""
    return f"{engine.settings.bus.address} (a NATS server of its own, process {server.pid})"


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
@options(
    """
    --now                        Do not let running jobs finish.
    --wait-timeout DURATION=60s  How long to wait for it to end.
    """
)
async def down(engine: EngineRef, now: bool, wait_timeout: float, json: bool) -> None:
    """Stop the engine of this data directory.

    It lets running jobs finish, and this command waits until it has ended. Unfinished jobs go on
    after the next start.
    """
    if engine.connect:
        raise click.UsageError("--connect can't be used here: run it where the engine runs")
    async with engine.api() as api:
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

    async def is_gone() -> bool | None:
        try:
            async with engine.client():
                return None
        except NotRunning:
            return True

    if not await poll(is_gone, wait_timeout, _LOOK):
        raise WaitTimedOut(
            f"the engine, process {pid}, has not ended yet",
            hint="it finishes its running jobs; 'penstock down --now' does not wait for them",
        )
    print_done(json, {"pid": pid, "stopped": True}, f"stopped (process {pid})")
