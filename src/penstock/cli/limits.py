"""`penstock limit`: limits on concurrency, rate and queue length."""

from __future__ import annotations

import time
from typing import Any

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import RATE, as_json, several
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.cli.words import span
from penstock.ports.engine_api import Limit, LimitUse, LimitView


@click.group(cls=Commands)
def limit() -> None:
    """Create, list and delete limits."""


@limit.command()
@click.argument("name")
@click.option(
    "--key",
    multiple=True,
    metavar="tenant|topic|label:NAME",
    help="Apply the limit to each value of this separately; may be repeated.",
)
@click.option("--topic", "topics", multiple=True, metavar="GLOB", help="Only these topics.")
@click.option("--tenant", "tenants", multiple=True, metavar="GLOB", help="Only these tenants.")
@several("--label", "For jobs with this label only; the value is a glob.")
@click.option("--concurrency", type=click.IntRange(1), help="Maximum number of running jobs.")
@click.option("--rate", type=RATE, help="Maximum number of starts in a time, as 10/m or 5/30s.")
@click.option("--max-waiting", type=click.IntRange(0), help="Maximum number of waiting jobs.")
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
    """Create or change a limit; it applies from the next job on.

    Without --key all jobs that match share it.
    """
    if all(said[one] is None for one in ("concurrency", "rate", "max_waiting")):
        raise click.UsageError("say what is limited: --concurrency, --rate or --max-waiting")
    view = run(_put(place, Limit(name=name, labels=dict(label), **said)))
    print_json(msgspec.to_builtins(view)) if json else echo(f"{name}: {_terms(view.limit)}")


async def _put(place: Place, made: Limit) -> LimitView:
    async with api_at(place) as api:
        return await api.limits.put(made)


@limit.command("list")
@as_json
@placed
@click.pass_obj
def list_limits(place: Place, json: bool) -> None:
    """List the limits and their usage."""
    found = run(_list(place))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        echo("no limits; make one with 'penstock limit put NAME --concurrency N'", err=True)
    else:
        emit(_listing(found, time.time()))


async def _list(place: Place) -> list[LimitView]:
    async with api_at(place) as api:
        return await api.limits.list()


def _listing(found: list[LimitView], now: float) -> Listing:
    """A line for each key with jobs, or one for an unused limit."""
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
    """Delete a limit."""
    run(_delete(place, name))
    print_json({"name": name, "deleted": True}) if json else echo(f"{name} deleted")


async def _delete(place: Place, name: str) -> None:
    async with api_at(place) as api:
        await api.limits.delete(name)
