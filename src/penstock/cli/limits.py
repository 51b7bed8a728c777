"""`penstock limit`: how many jobs, how fast, and how many may wait."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import RATE, as_json, several
from penstock.cli.place import Place, desk_at, placed, run
from penstock.cli.terminal import echo
from penstock.cli.words import span
from penstock.ports.limits import Limit, LimitUse, LimitView


@click.group(cls=Commands)
def limit() -> None:
    """Make, list and delete limits."""


@limit.command()
@click.argument("name")
@click.option(
    "--key",
    multiple=True,
    metavar="tenant|topic|label:NAME",
    help="Each value of this has the limit for itself; may be repeated.",
)
@click.option("--topic", "topics", multiple=True, metavar="GLOB", help="For such topics only.")
@click.option("--tenant", "tenants", multiple=True, metavar="GLOB", help="For such tenants only.")
@several("--label", "For jobs with this label only; the value is a glob.")
@click.option("--concurrency", type=click.IntRange(1), help="How many may run at once.")
@click.option("--rate", type=RATE, help="How many may start in a time, as 10/m or 5/30s.")
@click.option("--max-waiting", type=click.IntRange(0), help="How many may wait; then: refused.")
@as_json
@placed
@click.pass_obj
def put(
    place: Place,
    /,
    name: str,
    label: tuple[tuple[str, str], ...],
    json: bool,
    **said: Any,
) -> None:
    """Make or change a limit; it holds from the next job on.

    Without --key all jobs that match share it.
    """
    if all(said[one] is None for one in ("concurrency", "rate", "max_waiting")):
        raise click.UsageError("say what is limited: --concurrency, --rate or --max-waiting")
    view = run(_put(place, Limit(name=name, labels=dict(label), **said)))
    print_json(msgspec.to_builtins(view)) if json else echo(f"{name}: {_terms(view.limit)}")


async def _put(place: Place, made: Limit) -> LimitView:
    async with desk_at(place) as desk:
        return await desk.limits.put(made)


@limit.command("list")
@as_json
@placed
@click.pass_obj
def list_limits(place: Place, json: bool) -> None:
    """List the limits, and how far each is used."""
    found = run(_list(place))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no limits; make one with 'penstock limit put NAME --concurrency N'", err=True)
    else:
        emit(_listing(found, time.time()))


async def _list(place: Place) -> list[LimitView]:
    async with desk_at(place) as desk:
        return await desk.limits.list()


def _listing(found: list[LimitView], now: float) -> Listing:
    """A line for each key that has jobs; one for a limit that none has."""
    listing = Listing(
        *("LIMIT", "FOR", "ALLOWS", "KEY", "RUNNING", "WAITING", "NOTE"),
        flexible=("LIMIT", "FOR", "ALLOWS", "KEY", "NOTE"),
        right=("RUNNING", "WAITING"),
    )
    for view in found:
        uses: list[LimitUse | None] = [*view.uses] or [None]
        for number, use in enumerate(uses):
            first = number == 0
            listing.add(
                view.limit.name if first else "",
                _scope(view.limit) if first else "",
                _terms(view.limit) if first else "",
                "" if use is None else ", ".join(use.key),
                "0" if use is None else f"{use.running:,}",
                "0" if use is None else f"{use.waiting:,}",
                _note(use, now),
            )
    return listing


def _note(use: LimitUse | None, now: float) -> str:
    if use is None or use.blocked_until is None:
        return ""
    return f"next in {span(max(0.0, use.blocked_until - now))}"


def _scope(known: Limit) -> str:
    parts = [*known.topics, *(f"tenant {one}" for one in known.tenants)]
    parts += [f"{name}={value}" for name, value in sorted(known.labels.items())]
    said = ", ".join(parts) or "every job"
    return said + (f", by {' and '.join(known.key)}" if known.key else "")


def _terms(known: Limit) -> str:
    parts = []
    if known.concurrency is not None:
        parts.append(f"{known.concurrency:,} at once")
    if known.rate is not None:
        parts.append(str(known.rate))
    if known.max_waiting is not None:
        parts.append(f"{known.max_waiting:,} waiting")
    return ", ".join(parts)


@limit.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def delete(place: Place, name: str, json: bool) -> None:
    """Lift a limit."""
    run(_delete(place, name))
    print_json({"name": name, "deleted": True}) if json else echo(f"{name} deleted")


async def _delete(place: Place, name: str) -> None:
    async with desk_at(place) as desk:
        await desk.limits.delete(name)
