"""`penstock limit`: limits on concurrency, rate and queue length."""

from __future__ import annotations

import time
from typing import Any

import click

from penstock.cli.engine import EngineRef
from penstock.cli.formats import Whole, span
from penstock.cli.groups import Commands
from penstock.cli.options import options, several
from penstock.cli.output import Form, Listing, Row, emit, print_done, print_list
from penstock.core.errors import NotFound
from penstock.ports.engine_api import Limit, LimitUse, LimitView


@click.group(cls=Commands)
def limit() -> None:
    """Create, list, show and delete limits."""


@limit.command()
@options(
    """
    --per tenant|topic|label:NAME... as key  Apply the limit to each value of this separately; may
            be repeated.
    --topic GLOB... as topics           Only these topics.
    --tenant GLOB... as tenants         Only these tenants.
    --concurrency 1..                   Maximum number of running jobs.
    --rate RATE                         Maximum number of starts in a time, as 10/m or 5/30s.
    --max-waiting 0..                   Maximum number of waiting jobs.
    """
)
@several("--label", "For jobs with this label only; the value is a glob.")
def create(
    engine: EngineRef,
    /,
    name: str,
    label: tuple[tuple[str, str], ...],
    json: bool,
    **said: Any,
) -> None:
    """Create or replace a limit; it applies from the next job on.

    Without --per all jobs that match share it.
    """
    if all(said[one] is None for one in ("concurrency", "rate", "max_waiting")):
        raise click.UsageError("nothing is limited: give --concurrency, --rate or --max-waiting")
    made = Limit(name=name, labels=dict(label), **said)
    view = engine.ask(lambda api: api.limits.put(made))
    print_done(json, view, f"{name}: {_terms(view.limit)}")


@limit.command("list")
def list_limits(engine: EngineRef, form: Form) -> None:
    """List the limits and their usage."""
    _print(
        form,
        engine.ask(lambda api: api.limits.list()),
        "no limits; create one with 'penstock limit create NAME --concurrency N'",
    )


@limit.command()
def show(engine: EngineRef, name: str, form: Form) -> None:
    """Show a limit and its usage."""
    found = [one for one in engine.ask(lambda api: api.limits.list()) if one.limit.name == name]
    if not found:
        raise NotFound(f"no limit {name!r}", hint="'penstock limit list' lists them")
    _print(form, found, "")


def _print(form: Form, found: list[LimitView], empty: str) -> None:
    if found and form not in (Form.JSON, Form.NAME):
        emit(limits_table(found, time.time()))
    else:
        print_list(form, found, lambda one: {}, name=lambda one: one.limit.name, empty=empty)


def limits_table(found: list[LimitView], now: float) -> Listing:
    """A line for each key with jobs, or one for an unused limit."""
    rows: list[Row] = []
    for view in found:
        uses: list[LimitUse | None] = [*view.uses] or [None]
        for number, use in enumerate(uses):
            first = number == 0
            rows.append(
                {
                    "LIMIT": view.limit.name if first else "",
                    "FOR": _scope(view.limit) if first else "",
                    "ALLOWS": _terms(view.limit) if first else "",
                    "KEY": "" if use is None else ", ".join(use.key),
                    "RUNNING": 0 if use is None else use.running,
                    "WAITING": 0 if use is None else use.waiting,
                    "NOTE": _note(use, now),
                }
            )
    return Listing(rows)


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
    parts = []
    if known.concurrency is not None:
        parts.append(f"{known.concurrency:,} at once")
    if known.rate is not None:
        parts.append(str(known.rate))
    if known.max_waiting is not None:
        parts.append(f"{known.max_waiting:,} waiting")
    return ", ".join(parts)


@limit.command()
def delete(engine: EngineRef, name: str, json: bool) -> None:
    """Delete a limit."""
    engine.ask(lambda api: api.limits.delete(name))
    print_done(json, {"name": name, "deleted": True}, f"{name} deleted")
