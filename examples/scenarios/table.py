"""The demo's table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobEvent
from scenarios.scenario import Row

WAY = "its way through the states"
COLUMNS = ("kind of job", "topic", WAY, "end", "time", "note")
NARROW = ("kind of job", WAY, "end", "time")
COLOURS = {
    "SUCCEEDED": "green",
    "FAILED": "red",
    "CANCELLED": "yellow",
    "DENIED": "magenta",
    "TIMEOUT": "red",
    "skipped": "dim",
}

WIDE = 150
"""Characters from which each thing has a column of its own, and a way fits on one line."""


def draw(rows: Iterable[Row], console: Console) -> None:
    wide = console.width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS if wide else NARROW:
        table.add_column(
            name,
            justify="right" if name == "time" else "left",
            no_wrap=name in ("end", "time") or (wide and name == WAY),
        )
    for row in rows:
        kind, topic, states, end, took, note = cells(row)
        if wide:
            table.add_row(kind, topic, states, end, took, note)
        else:
            table.add_row(Group(kind, topic), Group(states, note), end, took)
    console.print(table)


def cells(row: Row) -> Sequence[Text]:
    seconds = row.seconds
    return (
        Text(row.scenario.kind, "bold"),
        Text(row.scenario.topic),
        Text("\n↳ ".join(way(history) for history in row.chain) or "(nothing was stored)"),
        Text(row.end, COLOURS.get(row.end, "")),
        Text("" if seconds is None else f"{seconds:.2f} s"),
        Text(row.problem, "red") if row.problem else Text(row.note, "dim"),
    )


def way(history: list[Transition]) -> str:
    """The states of one job in order; a new attempt begins a new line."""
    steps = []
    for entry in history:
        if entry.event is JobEvent.REDISPATCH:
            steps.append(f"\n↳ attempt {entry.attempt}: {entry.after}")
        elif entry.after is not entry.before:
            steps.append(str(entry.after))
    return " → ".join(steps).replace(" → \n", "\n")
