"""`penstock worker`, `pool` and `topic`: where jobs can run."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import click

from penstock.app import App, load_app
from penstock.app.service import Stop, leave_at_once, log_to_stderr, run_service
from penstock.cli.engine import EngineRef
from penstock.cli.exits import Exit
from penstock.cli.formats import Number, Whole, moment, pairs, plural, span
from penstock.cli.groups import Commands
from penstock.cli.live import Spinner
from penstock.cli.nouns import Noun
from penstock.cli.options import options, read_source, serving
from penstock.cli.output import Row, echo, print_done, print_json, styled, validity, warn
from penstock.core.check import check_name, check_pairs
from penstock.ports.credentials import CredentialView, JoinTokenView
from penstock.ports.engine_api import EngineApi, PoolView, WorkerView

if TYPE_CHECKING:
    from penstock.app.nats import CapWorkerProcess
    from penstock.app.worker_process import Probe, WorkerProcess

log = logging.getLogger("penstock.cli")


@click.group(cls=Commands, default="start")
def worker() -> None:
    """Start, list, show and drain workers.

    With options alone, as in 'penstock worker --app MODULE:APP', it is 'worker start'.
    """


@worker.command()
@serving
@options(
    """
    --pool POOL=default                 The pool to join.
    --label KEY=VALUE...                What this worker has, as gpu=a100; may be repeated.
    --id NAME= as worker_id             Its id; else made of host and process.
    --shard 0..63=0                     The shard to serve, of a database that has several.
    --join TOKEN|@FILE                  Join an engine on another machine with this token; later
            starts do not need it.
    --certificate FILE as link__certificate  A certificate of your own (PEM), instead.
    --private-key FILE as link__private_key  Its private key (PEM).
    --ca FILE as link__ca               The authority of the engine's certificate (PEM).
    --bus URL as bus__url               Reach the engine through this NATS server; needs its token
            (PENSTOCK_TOKEN).
    --cap URL                           Serve a CAP control plane of others on this NATS server,
            instead of an engine.
    --drain-timeout DURATION=30s        How long running jobs may take to finish when it is stopped.
    """
)
def start(
    engine: EngineRef,
    /,
    app: str | None,
    pool: str,
    label: tuple[tuple[str, str], ...],
    worker_id: str,
    shard: int,
    join: str | None,
    cap: str | None,
    drain_timeout: float,
    verbose: bool,
    **said: Any,
) -> None:
    """Start a worker process of an engine.

    It waits for the engine if there is none yet, and again if it goes away. SIGTERM or SIGINT
    let it finish what it runs; a second one stops it at once. On another machine than the engine's:
    --connect penstock://HOST:7480 --join TOKEN, with a token of 'penstock worker token create'.
    """
    from penstock.app.nats import CapWorkerProcess
    from penstock.app.worker_process import worker_process

    check_name("--pool", pool)
    check_pairs("--label", dict(label))
    if worker_id:
        check_name("--id", worker_id)
    settings = engine.settings(**said)
    models = settings.models.serve or settings.node.model
    if not (app or settings.pipelines or settings.containers.engine or models):
        raise click.UsageError("nothing to serve: give --app, --pipeline, --containers or --model")
    application = load_app(app) if app else App()
    log_to_stderr(verbose=verbose, log_format=settings.telemetry.log_format)
    if cap is not None:
        if engine.connect or join or said["bus__url"]:
            raise click.UsageError("--cap can't be used with --connect, --join or --bus")
        if app is None or label:
            raise click.UsageError("--cap needs --app, and can't be used with --label")
        process = CapWorkerProcess(
            application,
            settings.changed(bus__url=cap),
            worker_id=worker_id,
            pool=pool,
            drain_timeout=drain_timeout,
        )
        run_service(_serve(process.probe, process))
        return
    given = read_source("--join", join).decode() if join else None
    if said["bus__url"] and (engine.connect or join):
        raise click.UsageError("--bus can't be used with --connect or --join")
    site, probe = worker_process(
        application,
        settings,
        engine.connect,
        engine.data,
        engine.secret,
        by_bus=bool(said["bus__url"]),
        join=given,
        pool=pool,
        worker_id=worker_id,
        shard=shard,
        labels=dict(label),
        drain_timeout=drain_timeout,
    )
    run_service(_serve(probe, site))


async def _serve(probe: Probe, site: WorkerProcess | CapWorkerProcess) -> None:
    stop = Stop()
    stop.listen()
    working = asyncio.create_task(_work(probe, site))
    if await stop.first_of(_ended(working)):
        if site.left_running:
            leave_at_once(str(working.exception()), Exit.UNAVAILABLE)
        return working.result()
    working.cancel()
    if not await stop.unless_urgent(_ended(working)):
        leave_at_once("stopped at once; jobs that still ran are left to the engine")
    log.info("stopped")
    return None


async def _ended(working: asyncio.Task[None]) -> None:
    await asyncio.wait({working})


async def _work(probe: Probe, site: WorkerProcess | CapWorkerProcess) -> None:
    from penstock.app.worker_process import wait_for_engine

    address = str(site.address)
    await wait_for_engine(probe, address)
    options = site.options
    log.info(
        "worker %s in pool %s, %d at once, serves %s",
        *(options.worker_id, options.pool, options.slots, address),
    )
    await site.run()


def worker_row(one: WorkerView, now: float) -> Row:
    return {
        "WORKER": one.worker_id,
        "STATUS": styled(one.status),
        "POOL": one.pool,
        "HELD": one.held,
        "SLOTS": one.slots,
        "HEARD": Number("here") if one.local else span(one.silent_for),
        "WHERE": f"{one.host}:{one.pid}",
        "LABELS": pairs(one.labels),
        "TOPICS": ", ".join(one.topics),
    }


WORKERS = Noun(
    worker,
    worker_row,
    lambda api: api.workers(),
    "no workers; start one with 'penstock worker start --app MODULE:APP'",
)
WORKERS.list("List the workers.")
WORKERS.show("Show a worker.", lambda api, name: api.worker(name))
WORKERS.act(
    "drain",
    """Let a worker process finish what it runs, and end.

    It gets no new jobs. A worker inside the engine's process can't be drained: pause its pool.
    """,
    lambda api, name: api.drain_worker(name),
    lambda one: f"{one.worker_id} is draining; it holds {one.held}",
)


# -- workers on other machines -----------------------------------------------------------------


@worker.group(cls=Commands)
def token() -> None:
    """Create, list, show and delete join tokens for other machines."""


@token.command("create")
@options(
    """
    --id ID as worker_id   Only the worker with this id can use it.
    --uses 1..10000=1      How many workers can join with it.
    --expires DURATION=1h  How long it is valid.
    """
)
async def create_token(
    api: EngineApi, worker_id: str | None, uses: int, expires: float, json: bool
) -> None:
    """Create a join token; prints it once.

    A worker joins with it, gets a certificate of its own, and no longer needs the token. With --id
    it replaces an earlier certificate of that worker.
    """
    new = await api.credentials.create_token(worker_id=worker_id, uses=uses, expires_in=expires)
    if json:
        print_json(new)
        return
    echo(new.token)
    who = f"the worker {worker_id}" if worker_id else plural(uses, "worker")
    where = new.address or "penstock://HOST:PORT"
    warn(
        f"token {new.info.token_id} for {who}, until {moment(new.info.expires_at, time.time())}",
        "Keep the token above now: only its hash is stored, it is not shown again. On the other "
        f"machine: penstock worker --connect {where} --join TOKEN --app MODULE:APP",
    )


def token_row(one: JoinTokenView, now: float) -> Row:
    status, expires = validity(one.revoked_at, one.expires_at, now)
    if status != "revoked" and one.used >= one.uses:
        status, expires = "used", Whole("")
    return {
        "TOKEN": Whole(one.token_id),
        "STATUS": styled(status),
        "WORKER": one.worker_id or "any",
        "USED": f"{one.used} of {one.uses}",
        "AGE": span(now - one.created_at),
        "EXPIRES": expires,
    }


TOKENS = Noun(
    token,
    token_row,
    lambda api: api.credentials.tokens(),
    "no join tokens; create one with 'penstock worker token create'",
)
TOKENS.list("List the join tokens.")
TOKENS.show("Show a join token, by its id; never the token itself.")
TOKENS.act(
    "delete",
    """Revoke a join token, by its id.

    Workers that have joined with it stay: see 'penstock worker credential delete'.
    """,
    lambda api, name: api.credentials.revoke_token(name),
    lambda view: f"token {view.token_id} revoked",
)


@worker.group(cls=Commands)
def credential() -> None:
    """List, show and delete certificates of remote workers."""


def credential_row(one: CredentialView, now: float) -> Row:
    status, expires = validity(one.revoked_at, one.expires_at, now)
    return {
        "WORKER": one.worker_id,
        "STATUS": styled(status),
        "TOKEN": one.token_id or "own certificate",
        "AGE": span(now - one.created_at),
        "EXPIRES": expires,
        "SERIAL": one.serial,
    }


CREDENTIALS = Noun(
    credential,
    credential_row,
    lambda api: api.credentials.list(),
    "no worker on another machine has joined; 'penstock worker token create' lets one",
)
CREDENTIALS.list("List the certificates of workers on other machines.")
CREDENTIALS.show("Show the certificate of a worker on another machine.")
CREDENTIALS.act(
    "delete",
    """Revoke the certificate of a worker immediately.

    Its connection ends at once; its jobs are handled as if the worker had died. It can join again
    with a new token.
    """,
    lambda api, name: api.credentials.revoke(name),
    lambda view: f"{view.worker_id} revoked",
)


# -- pools -------------------------------------------------------------------------


_LOOK = 0.25
"""Seconds between checks of a pool that is being drained."""


@click.group(cls=Commands)
def pool() -> None:
    """List, show, pause, resume and drain pools."""


def pool_row(one: PoolView, now: float) -> Row:
    return {
        "POOL": one.name,
        "STATUS": styled("paused" if one.paused else "active"),
        "WORKERS": one.workers,
        "HELD": one.held,
        "CAPACITY": "any" if one.capacity is None else one.capacity,
        "LABELS": pairs(one.labels),
        "TOPICS": ", ".join(one.topics),
    }


POOLS = Noun(pool, pool_row, lambda api: api.pools(), "no pools")
POOLS.list("List the pools.")
POOLS.show("Show a pool.", lambda api, name: api.pool(name))
POOLS.act(
    "pause",
    """Stop giving jobs to a pool's workers.

    Running jobs finish. The pool stays paused over a restart, until it is resumed.
    """,
    lambda api, name: api.pause_pool(name),
    lambda view: f"{view.name} paused; it holds {plural(view.held, 'job')}",
)
POOLS.act(
    "resume",
    "Resume giving jobs to a pool's workers.",
    lambda api, name: api.resume_pool(name),
    lambda view: f"{view.name} resumed",
)


@pool.command()
def drain(engine: EngineRef, name: str, wait_timeout: float | None, json: bool) -> int:
    """Pause a pool and wait until its jobs have ended.

    Ctrl-C ends the waiting and leaves it paused.
    """

    async def drained(api: EngineApi) -> PoolView:
        end = None if wait_timeout is None else time.monotonic() + wait_timeout
        view = await api.pause_pool(name)
        with Spinner(f"{name} is paused") as spinner:
            while view.held and (end is None or time.monotonic() < end):
                spinner.say(f"{name} is paused and holds {plural(view.held, 'job')} …")
                await asyncio.sleep(_LOOK)
                view = await api.pool(name)
        return view

    try:
        view = engine.ask(drained)
    except KeyboardInterrupt:
        resuming = engine.command(f"pool resume {name}")
        warn(f"{name} stays paused", f"'{resuming}' resumes it")
        return Exit.INTERRUPTED
    held = f"still holds {plural(view.held, 'job')}" if view.held else "holds nothing"
    print_done(json, view, f"{name} is paused and {held}")
    return Exit.NOT_YET if view.held else Exit.OK


@click.group(cls=Commands)
def topic() -> None:
    """List the topics that workers serve."""


async def _topics(api: EngineApi) -> list[dict[str, str]]:
    pools = await api.pools()
    return [
        {"topic": one, "pools": ", ".join(pool.name for pool in pools if one in pool.topics)}
        for one in await api.topics()
    ]


TOPICS = Noun(
    topic,
    lambda one, now: {"TOPIC": one["topic"], "POOLS": one["pools"]},
    _topics,
    "no topics: no worker runs; start one with 'penstock worker start --app MODULE:APP'",
)
TOPICS.list("List the topics that workers serve now.")
