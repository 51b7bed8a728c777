"""What is printed: JSON for programs, tables and colours for people.

Colour is for a terminal only, and NO_COLOR turns it off. A table fits the terminal; into a
pipe it is written in full.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

STYLES = {
    JobState.PENDING: "dim",
    JobState.SCHEDULED: "cyan",
    JobState.DISPATCHED: "blue",
    JobState.RUNNING: "yellow",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "magenta",
    JobState.DENIED: "bold red",
    JobState.TIMEOUT: "bright_red",
}
WIDE = 110
"""Columns from which a table shows more."""
_UNBOUNDED = 10_000


def console(*, err: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return Console(file=stream, width=width, highlight=False, emoji=False, markup=False)


def emit(*parts: RenderableType) -> None:
    """Print things one below the other, without blanks at the ends of lines."""
    page = console()
    with page.capture() as captured:
        for part in parts:
            page.print(part, soft_wrap=isinstance(part, str))
    lines = captured.get().splitlines()
    click.echo("\n".join(line.rstrip() for line in lines), color=True)


def table(*columns: str, flexible: Sequence[str] = (), right: Sequence[str] = ()) -> Table:
    """A table without lines; the flexible columns give way when there is too little room."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(
            name,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if name in right else "left",
            min_width=None if name in flexible else len(name),
            ratio=None,
        )
    return made


def styled(state: JobState) -> Text:
    from rich.text import Text

    return Text(state.value, STYLES[state])


def record(job: Job) -> dict[str, Any]:
    """A job as its JSON: the record, with the id in front."""
    fields: dict[str, Any] = msgspec.to_builtins(job)
    return {"job_id": job.job_id, **fields}


def print_json(value: Any) -> None:
    """One document; indented for a terminal."""
    text = msgspec.json.encode(value)
    if sys.stdout.isatty():
        text = msgspec.json.format(text, indent=2)
    print_bytes(text)


def print_line(value: Any) -> None:
    """One line of JSON lines, at once."""
    print_bytes(msgspec.json.encode(value))


def print_bytes(text: bytes) -> None:
    click.echo(text if text.endswith(b"\n") else text + b"\n", nl=False)
    sys.stdout.flush()
