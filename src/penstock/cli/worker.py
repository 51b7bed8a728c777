"""`penstock worker`: a worker process of an engine that runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import click

from penstock.cli.journal import keep_journal
from penstock.cli.parameters import DURATION, several
from penstock.cli.place import Place, client_at, placed
from penstock.core.errors import NotRunning

if TYPE_CHECKING:
    from penstock.app.worker_process import WorkerProcess

log = logging.getLogger("penstock.cli")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0


@click.command()
@click.option("--app", metavar="MODULE:APP", help="The application to serve.")
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
@click.option("--pool", default="default", show_default=True, help="The pool to join.")
@several("--label", "What this worker has, as gpu=a100; may be repeated.")
@click.option("--id", "worker_id", default="", help="Its id; else made of host and process.")
@click.option("--concurrency", type=int, metavar="N", help="How many jobs to run at once.")
@click.option(
    "--drain-timeout",
    type=DURATION,
    default="30s",
    show_default=True,
    help="How long running jobs may take to finish when it is stopped.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
@click.pass_obj
def worker(
    place: Place,
    app: str | None,
    pipeline: tuple[str, ...],
    containers: str | None,
    model: tuple[str, ...],
    pool: str,
    label: tuple[tuple[str, str], ...],
    worker_id: str,
    concurrency: int | None,
    drain_timeout: float,
    verbose: bool,
) -> None:
    """Join an engine with a worker process.

    It waits for the engine if there is none yet, and again if it goes away. SIGTERM or SIGINT
    let it finish what it runs; a second one stops it at once.
    """
    from penstock.app import App, load_app
    from penstock.app.application import engine_address
    from penstock.app.worker_process import WorkerProcess
    from penstock.cli.service import run_service
    from penstock.core.check import check_name, check_pairs

    check_name("--pool", pool)
    check_pairs("--label", dict(label))
    if worker_id:
        check_name("--id", worker_id)
    settings = place.settings(
        concurrency=concurrency,
        pipelines=pipeline or None,
        containers=containers,
        models=model or None,
    )
    services = (settings.pipelines, settings.containers, settings.models, settings.pipe_model)
    if not (app or any(services)):
        raise click.UsageError("say what to serve, with --app, --pipeline, --containers or --model")
    application = load_app(app) if app else App()
    address, token = engine_address(place.connect, place.data, place.secret)
    keep_journal(verbose=verbose)
    site = WorkerProcess(
        application,
        address,
        settings,
        token=token,
        worker_id=worker_id,
        pool=pool,
        labels=dict(label),
        drain_timeout=drain_timeout,
    )
    run_service(_serve(place, site, str(address)))


async def _serve(place: Place, site: WorkerProcess, address: str) -> None:
    from penstock.cli.service import Stop, leave_at_once

    stop = Stop()
    stop.listen()
    working = asyncio.create_task(_work(place, site, address))
    asked = asyncio.create_task(stop.asked.wait())
    await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if working.done():
        working.result()
        return
    if not await stop.unless_urgent(_drained(working)):
        leave_at_once("stopped at once; jobs that still ran are left to the engine")
    log.info("stopped")


async def _drained(working: asyncio.Task[None]) -> None:
    working.cancel()
    await asyncio.wait({working})


async def _work(place: Place, site: WorkerProcess, address: str) -> None:
    await engine_there(place, address)
    options = site.options
    log.info(
        "worker %s in pool %s, %d at once, serves %s",
        options.worker_id,
        options.pool,
        options.slots,
        address,
    )
    await site.run()


async def engine_there(place: Place, address: str) -> None:
    """Wait until an engine answers, saying so once."""
    pause = _FIRST_PAUSE
    while True:
        try:
            async with client_at(place):
                return
        except NotRunning:
            if pause == _FIRST_PAUSE:
                log.warning("waiting for an engine at %s", address)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
