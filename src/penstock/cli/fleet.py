"""`penstock workers` and `penstock pools`."""

from __future__ import annotations

from collections.abc import Mapping

import click
import msgspec

from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.cli.words import span
from penstock.ports.engine_api import PoolView, WorkerView

STATUS = {"ready": "green", "draining": "yellow", "missing": "red"}


@click.command()
@as_json
@placed
@click.pass_obj
def workers(place: Place, json: bool) -> None:
    """List the workers."""
    found = run(_workers(place))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no workers; start one with 'penstock worker --app MODULE:APP'", err=True)
    else:
        _print_workers(found)


async def _workers(place: Place) -> list[WorkerView]:
    async with api_at(place) as api:
        return await api.workers()


def _print_workers(found: list[WorkerView]) -> None:
    from rich.text import Text

    listing = Listing(
        *("WORKER", "STATUS", "POOL", "HELD", "SLOTS", "HEARD", "WHERE", "LABELS", "TOPICS"),
        flexible=("WORKER", "WHERE", "LABELS", "TOPICS"),
        right=("HELD", "SLOTS", "HEARD"),
    )
    for worker in found:
        listing.add(
            worker.worker_id,
            Text(worker.status, STATUS.get(worker.status, "")),
            worker.pool,
            str(worker.held),
            str(worker.slots),
            "here" if worker.local else span(worker.silent_for),
            f"{worker.host}:{worker.pid}",
            _pairs(worker.labels),
            ", ".join(worker.topics),
        )
    emit(listing)


@click.command()
@as_json
@placed
@click.pass_obj
def pools(place: Place, json: bool) -> None:
    """List the pools."""
    print_pools(run(_pools(place)), json)


def print_pools(found: list[PoolView], json: bool) -> None:
    from rich.text import Text

    if json:
        print_json(msgspec.to_builtins(found))
        return
    listing = Listing(
        *("POOL", "STATUS", "WORKERS", "HELD", "CAPACITY", "LABELS", "TOPICS"),
        flexible=("POOL", "LABELS", "TOPICS"),
        right=("WORKERS", "HELD", "CAPACITY"),
    )
    for pool in found:
        listing.add(
            pool.name,
            Text("paused", "yellow") if pool.paused else Text("open", "green"),
            str(pool.workers),
            str(pool.held),
            "any" if pool.capacity is None else str(pool.capacity),
            _pairs(pool.labels),
            ", ".join(pool.topics),
        )
    emit(listing)


async def _pools(place: Place) -> list[PoolView]:
    async with api_at(place) as api:
        return await api.pools()


def _pairs(pairs: Mapping[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(pairs.items()))
