"""The demo's table."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobEvent
from scenarios.scenario import Row

COLOURS = {
    "SUCCEEDED": "green",
    "FAILED": "red",
    "CANCELLED": "yellow",
    "DENIED": "magenta",
    "TIMEOUT": "red",
    "skipped": "dim",
}

WIDE = 150
"""Characters from which a way fits on one line."""


def draw(rows: Iterable[Row], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kind of job", style="bold")
    table.add_column("topic")
    table.add_column("its way through the states", no_wrap=console.width >= WIDE)
    table.add_column("end", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("note")
    for row in rows:
        seconds = row.seconds
        table.add_row(
            row.scenario.kind,
            row.scenario.topic,
            "\n↳ ".join(way(history) for history in row.chain) or "(nothing was stored)",
            f"[{COLOURS.get(row.end, 'default')}]{row.end}[/]",
            "" if seconds is None else f"{seconds:.2f} s",
            Text(row.problem, "red") if row.problem else Text(row.note),
        )
    console.print(table)


def way(history: list[Transition]) -> str:
    """The states of one job in order; a new attempt begins a new line."""
    steps = []
    for entry in history:
        if entry.event is JobEvent.REDISPATCH:
            steps.append(f"\n↳ attempt {entry.attempt}: {entry.after}")
        elif entry.after is not entry.before:
            steps.append(str(entry.after))
    return " → ".join(steps).replace(" → \n", "\n")
