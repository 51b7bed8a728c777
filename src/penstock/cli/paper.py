"""What is printed: JSON for programs, tables and colours for people.

Colour is for a terminal only, and NO_COLOR turns it off. A table fits the terminal; into a
pipe it is written in full.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import click
import msgspec

from penstock.cli.terminal import escaped, harmless
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.segment import Segment
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
_GAP = 2
_NARROWEST = 6


def console(*, err: bool = False) -> Console:
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return _safe_console()(file=stream, width=width, highlight=False, emoji=False, markup=False)


@cache
def _safe_console() -> type[Console]:
    """A Console that draws what it is given, and is driven by nothing in it.

    Its own codes are made of styles and controls, later than this.
    """
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control is None:
                    segment = Segment(harmless(segment.text), segment.style)
                yield segment

    return SafeConsole


def emit(*parts: RenderableType) -> None:
    """Print things one below the other, without blanks at the ends of lines."""
    page = console()
    with page.capture() as captured:
        for part in parts:
            page.print(part, soft_wrap=isinstance(part, str))
    lines = captured.get().splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    click.echo(text, color=True)  # noqa: TID251 (with the console's own codes)


class Listing:
    """A table without lines, drawn as wide as it is printed.

    When there is too little room the flexible columns are cut short, or wrapped if they are
    also `folded`; the others never are.
    """

    def __init__(
        self,
        *columns: str,
        flexible: Sequence[str] = (),
        folded: Sequence[str] = (),
        right: Sequence[str] = (),
        header: bool = True,
    ) -> None:
        self._columns, self._flexible, self._folded = columns, flexible, folded
        self._right, self._header = right, header
        self._rows: list[tuple[str | Text, ...]] = []

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str | Text]], **options: Any) -> Listing:
        """A table of one or more rows, each with the same columns; the options are those above."""
        listing = cls(*rows[0], **options)
        for row in rows:
            listing.add(*row.values())
        return listing

    def add(self, *cells: str | Text) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.show_header = self._header
        for name, width in zip(self._columns, self._widths(options.max_width), strict=True):
            folds = name in self._folded
            table.add_column(
                name,
                width=width,
                no_wrap=not folds,
                overflow="fold" if folds else "ellipsis",
                justify="right" if name in self._right else "left",
            )
        for row in self._rows:
            table.add_row(*row)
        yield table

    def _widths(self, room: int) -> list[int]:
        from rich.cells import cell_len

        widths = [
            max(map(cell_len, map(str, cells)))
            for cells in zip(self._columns, *self._rows, strict=True)
        ]
        flexible = [i for i, name in enumerate(self._columns) if name in self._flexible]
        room -= sum(widths) - sum(widths[i] for i in flexible) + _GAP * (len(widths) - 1)
        for left, i in zip(
            range(len(flexible), 0, -1), sorted(flexible, key=lambda i: widths[i]), strict=True
        ):
            widths[i] = max(_NARROWEST, min(widths[i], room // left))
            room -= widths[i]
        return widths


def rich_text(*parts: str | Text | tuple[str, str], cut: bool = False) -> Text:
    """Parts, each with its style if it has one; `cut`: in one line, whatever the room."""
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=cut or None, overflow="ellipsis" if cut else None)


def facts(pairs: Iterable[tuple[str, str]]) -> Listing:
    """Names and values one below the other, without those that have no value."""
    listing = Listing("", "fact", flexible=("fact",), folded=("fact",), header=False)
    for name, value in pairs:
        if value:
            listing.add(rich_text((f"  {name}", "dim")), value)
    return listing


def styled(state: JobState) -> Text:
    from rich.text import Text

    return Text(state.value, STYLES[state])


def record(job: Job) -> dict[str, Any]:
    """A job as its JSON: the record, with the id in front."""
    fields: dict[str, Any] = msgspec.to_builtins(job)
    del fields["pages"]  # the engine's own business
    return {"job_id": job.job_id, **fields}


def print_json(value: Any) -> None:
    """One document; indented for a terminal."""
    text = msgspec.json.encode(value)
    if sys.stdout.isatty():
        text = msgspec.json.format(text, indent=2)
    print_bytes(escaped(text))


def print_line(value: Any) -> None:
    """One line of JSON lines, at once."""
    print_bytes(escaped(msgspec.json.encode(value)))


def print_bytes(text: bytes) -> None:
    whole = text if text.endswith(b"\n") else text + b"\n"
    click.echo(whole, nl=False)  # noqa: TID251 (bytes)
    sys.stdout.flush()
