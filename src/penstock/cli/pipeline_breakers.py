"""`penstock pipeline breakers`: the circuit breakers that runs share."""

from __future__ import annotations

import time

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, api_at, placed, reading_at, run
from penstock.cli.terminal import echo
from penstock.cli.words import span
from penstock.workloads.pipeline.records import Breaker, BreakerState

_STYLES = {
    BreakerState.CLOSED: "green",
    BreakerState.OPEN: "red",
    BreakerState.HALF_OPEN: "yellow",
}


@click.group(cls=Commands, acts=True)
@as_json
@placed
@click.pass_context
def breakers(ctx: click.Context, json: bool) -> None:
    """List the circuit breakers that runs share.

    An open one keeps items from being tried; `breakers reset` closes it by hand.
    """
    if ctx.invoked_subcommand is None:
        found = run(_list(ctx.obj))
        if json:
            print_json([shown(one) for one in found])
        elif not found:
            echo("no breakers: none has counted a failure yet", err=True)
        else:
            emit(_listing(found, time.time()))


async def _list(place: Place) -> list[Breaker]:
    async with reading_at(place) as api:
        return await api.pipelines.breakers()


def _listing(found: list[Breaker], now: float) -> Listing:
    from rich.text import Text

    listing = Listing(
        *("NAME", "STATE", "FAILURES", "OPENS AT", "SINCE", "TRIES AGAIN"),
        flexible=("NAME", "TRIES AGAIN"),
        right=("FAILURES", "OPENS AT", "SINCE"),
    )
    for one in found:
        listing.add(
            one.name,
            Text(one.state.value.replace("_", " "), _STYLES[one.state]),
            f"{one.failures:,}",
            f"{one.threshold:,}",
            "" if one.opened_at is None else span(max(0.0, now - one.opened_at)),
            _again(one, now),
        )
    return listing


def _again(one: Breaker, now: float) -> str:
    if one.state is BreakerState.CLOSED or one.opened_at is None:
        return ""
    left = one.opened_at + one.cooldown - now
    return f"in {span(left)}" if left > 0 else "with the next item"


@breakers.command()
@click.argument("name")
@as_json
@placed
@click.pass_obj
def reset(place: Place, name: str, json: bool) -> None:
    """Close a breaker by hand: its items are tried again."""

    async def close() -> Breaker:
        async with api_at(place) as api:
            return await api.pipelines.reset_breaker(name)

    closed = run(close())
    print_json(shown(closed)) if json else echo(f"{closed.name} is {closed.state}")


def shown(one: Breaker) -> dict[str, object]:
    """Every field, also those that have their defaults."""
    return {name: msgspec.to_builtins(getattr(one, name)) for name in one.__struct_fields__}
