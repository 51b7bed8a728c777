"""`penstock limit`: limits on concurrency, rate and queue length."""

from __future__ import annotations

from typing import Any

import click

from penstock.cli.engine import EngineRef
from penstock.cli.formats import Whole, span
from penstock.cli.groups import Commands
from penstock.cli.nouns import Noun
from penstock.cli.options import options
from penstock.cli.output import Row, print_done
from penstock.ports.engine_api import Limit, LimitUse, LimitView


@click.group(cls=Commands)
def limit() -> None:
    """Create, list, show and delete limits."""


@limit.command()
@options(
    """
    --per FIELD... as key      Apply the limit to each value of this separately: tenant, topic or
            label:NAME; may be repeated.
    --topic GLOB... as topics  Only these topics.
    --tenant GLOB... as tenants  Only these tenants.
    --label KEY=VALUE...       For jobs with this label only; the value is a glob.
    --concurrency 1..          Maximum number of running jobs.
    --rate RATE                Maximum number of starts in a time, as 10/m or 5/30s.
    --max-waiting 0..          Maximum number of waiting jobs.
    """
)
def create(
    engine: EngineRef, /, name: str, label: tuple[tuple[str, str], ...], json: bool, **said: Any
) -> None:
    """Create or replace a limit; it applies from the next job on.

    Without --per all jobs that match share it.
    """
    if all(said[one] is None for one in ("concurrency", "rate", "max_waiting")):
        raise click.UsageError("nothing is limited: give --concurrency, --rate or --max-waiting")
    made = Limit(name=name, labels=dict(label), **said)
    view = engine.ask(lambda api: api.limits.put(made))
    print_done(json, view, f"{name}: {_terms(view.limit)}")


def limit_rows(view: LimitView, now: float) -> list[Row]:
    """A line for each key with jobs, or one if the limit is not in use."""
    uses: list[LimitUse | None] = [*view.uses] or [None]
    return [
        {
            "LIMIT": view.limit.name if use is uses[0] else "",
            "FOR": _scope(view.limit) if use is uses[0] else "",
            "ALLOWS": _terms(view.limit) if use is uses[0] else "",
            "KEY": "" if use is None else ", ".join(use.key),
            "RUNNING": 0 if use is None else use.running,
            "WAITING": 0 if use is None else use.waiting,
            "NOTE": _note(use, now),
        }
        for use in uses
    ]


def _note(use: LimitUse | None, now: float) -> str:
    if use is None or use.blocked_until is None:
        return ""
    return Whole(f"next in {span(max(0.0, use.blocked_until - now))}")


def _scope(known: Limit) -> str:
    parts = [*known.topics, *(f"tenant {one}" for one in known.tenants)]
    parts += [f"{name}={value}" for name, value in sorted(known.labels.items())]
    said = ", ".join(parts) or "every job"
    return said + (f", by {' and '.join(known.key)}" if known.key else "")


def _terms(known: Limit) -> str:
    said = (
        f"{known.concurrency:,} at once" if known.concurrency is not None else "",
        str(known.rate) if known.rate is not None else "",
        f"{known.max_waiting:,} waiting" if known.max_waiting is not None else "",
    )
    return ", ".join(filter(None, said))


LIMITS = Noun(
    limit,
    limit_rows,
    lambda api: api.limits.list(),
    "no limits; create one with 'penstock limit create NAME --concurrency N'",
)
LIMITS.list("List the limits and their usage.")
LIMITS.show("Show a limit and its usage.", lambda api, name: api.limits.get(name))
LIMITS.act("delete", "Delete a limit.", lambda api, name: api.limits.delete(name))
