"""The demo's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from penstock import Transition
from penstock.lifecycles.canonical import JobEvent
from scenarios.scenario import Row

COLOURS = {
    "SUCCEEDED": "green",
    "FAILED": "red",
    "CANCELLED": "yellow",
    "DENIED": "magenta",
    "TIMEOUT": "red",
}
WIDTH = 100


def draw(sections: Mapping[str, Sequence[Row]], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("kind of job, topic")
    table.add_column("states, and a note")
    table.add_column("time", justify="right", no_wrap=True)
    for title, rows in sections.items():
        table.add_row("", Text(title, "bold cyan"))
        for row in rows:
            table.add_row(*cells(row))
        table.add_section()
    console.print(table, width=min(WIDTH, console.width))


def cells(row: Row) -> tuple[Group, Group, Text]:
    note = Text(row.problem, "red") if row.problem else Text(row.note, "dim")
    seconds = row.seconds
    return (
        Group(Text(row.scenario.kind, "bold"), Text(row.scenario.topic, "dim")),
        Group(states_of(row), note),
        Text("" if seconds is None else f"{seconds:.2f} s"),
    )


def states_of(row: Row) -> Text:
    """The ways of a job and its retries, with the end in its colour."""
    if row.way:
        return Text(row.way)
    if not row.chain:
        return Text(row.end if row.skipped else f"{row.end}: nothing was stored")
    states = Text("\n↳ ".join(way(history) for history in row.chain))
    states.highlight_words([row.end], COLOURS.get(row.end, ""))
    return states


def way(history: list[Transition]) -> str:
    """The states of one job in order; a new attempt, or an approval, begins a new line."""
    steps = []
    for entry in history:
        match entry.event:
            case JobEvent.REDISPATCH:
                steps.append(f"\n↳ attempt {entry.attempt}: {entry.after}")
            case JobEvent.PARK:
                steps.append("parked")
            case JobEvent.APPROVE:
                steps.append(f"\n↳ approved by {entry.actor.partition(':')[2]}")
            case _ if entry.after is not entry.before:
                steps.append(str(entry.after))
    return " → ".join(steps).replace(" → \n", "\n")
