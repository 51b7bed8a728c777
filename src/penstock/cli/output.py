"""Everything that is printed: text, JSON for programs, tables and colours for people.

Text may have been written by others: a job, a model, another user. Nothing in it may move the
cursor, set the title, answer in our name or turn the order of characters around: then a failed job
could look as if it had succeeded. So all printing goes through this module (`core.text`).

Colour is for a terminal only, and NO_COLOR turns it off. A table fits the terminal; into a pipe it
is written in full.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, Union

import click

from penstock.cli.formats import Number, Whole, short_id, span
from penstock.core.text import escaped, harmless
from penstock.dashboard.colours import COLOURS, LIKE

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.segment import Segment
    from rich.text import Text

    from penstock.core.job import Job

T = TypeVar("T")
Cell = Union[str, int, None, "Text"]
Row = dict[str, Cell]
"""A line of a table: cells by column. Numbers are aligned to the right. A column that begins with
`+` is in wide tables only."""

# -- text --------------------------------------------------------------------------


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a message; control characters are removed. Live output goes on below it."""
    stream = sys.stderr if err else None
    click.echo(harmless(text), nl=nl, file=stream)  # noqa: TID251 (this is what all else uses)


def echo_lines(lines: Iterable[str]) -> None:
    echo("".join(f"{line}\n" for line in lines), nl=False)


def echo_content(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print what a job wrote: into a pipe as it is."""
    stream = sys.stderr if err else sys.stdout
    click.echo(harmless(text) if stream.isatty() else text, nl=nl, err=err)  # noqa: TID251


def warn(message: str, *hints: str) -> None:
    """One line on standard error, and below it what to do."""
    echo("\n".join((f"penstock: {message}", *(f"  {hint}" for hint in hints if hint))), err=True)


# -- JSON --------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """One document; indented for a terminal."""
    import msgspec

    text = msgspec.json.encode(value, enc_hook=_plain)
    if sys.stdout.isatty():
        text = msgspec.json.format(text, indent=2)
    print_bytes(escaped(text))


def print_line(value: Any) -> None:
    """One line of JSON lines, at once."""
    import msgspec

    print_bytes(escaped(msgspec.json.encode(value, enc_hook=_plain)))


def _plain(value: Any) -> str:
    """Cells of tables are strings of their own kinds."""
    if isinstance(value, str):
        return str(value)
    raise NotImplementedError(type(value))


def print_bytes(text: bytes) -> None:
    whole = text if text.endswith(b"\n") else text + b"\n"
    click.echo(whole, nl=False)  # noqa: TID251 (bytes)
    sys.stdout.flush()


def record(job: Job) -> dict[str, Any]:
    """A job as its JSON: the record, with the id in front."""
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(job)
    del fields["pages"]  # the engine's own business
    return {"job_id": job.job_id, **fields}


# -- tables ------------------------------------------------------------------------

STYLES = {
    **{
        name.lower(): colour.terminal
        for state, colour in COLOURS.items()
        for name in (state.value, *LIKE[state])
    },
    "note": "yellow",
    "failed to start": "red",
}
"""The colour of each state of anything."""
WIDE = 110
"""Columns from which a table shows more."""
_USUAL: Row = {"TENANT": "default", "TRIES": 1, "TRY": 1}
"""Columns that are left out if every cell of them is this."""
_UNBOUNDED = 10_000
_GAP = 2
_NARROWEST = 6


class Wrapped(str):
    """A cell that is wrapped where there is no room, rather than cut short."""

    __slots__ = ()


class JobId(str):
    """A cell with the id of a job: whole in wide tables, else as short as it may be given."""

    __slots__ = ()


class Form(Enum):
    """How a list or a thing is shown."""

    TABLE = "table"
    WIDE = "wide"
    NAME = "name"
    JSON = "json"

    @property
    def is_table(self) -> bool:
        return self in (Form.TABLE, Form.WIDE)

    @property
    def wide(self) -> bool:
        return self is Form.WIDE or console().width >= WIDE


def console(*, err: bool = False) -> Console:
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return _safe_console()(file=stream, width=width, highlight=False, emoji=False, markup=False)


@cache
def _safe_console() -> type[Console]:
    """A Console that removes control characters from text.

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

    Its columns are those of the first row, without empty ones. When there is too little room, the
    longest cells are cut short, or wrapped if they are Wrapped, and the first column last; numbers,
    states and other Whole cells never are.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Cell]], *, header: bool = True, wide: bool = False
    ) -> None:
        names = [name for name in rows[0] if wide or not name.startswith("+")]
        for name in names[1:] if header else []:
            if all(row[name] in ("", None, _USUAL.get(name)) for row in rows):
                names.remove(name)
        self._columns, self._header = [name.removeprefix("+") for name in names], header
        self._rows = [[_cell(row[name], wide) for name in names] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.show_header = self._header
        cells = list(zip(*self._rows, strict=True))
        for index, width in enumerate(self._widths(options.max_width)):
            wraps = any(isinstance(cell, Wrapped) for cell in cells[index])
            table.add_column(
                self._columns[index],
                width=width,
                no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
                justify="right" if _any(cells[index], Number) else "left",
            )
        for row in self._rows:
            table.add_row(*row)
        yield table

    def _widths(self, room: int) -> list[int]:
        from rich.cells import cell_len
        from rich.text import Text

        columns = list(zip(*self._rows, strict=True))
        named = self._columns if self._header else [""] * len(columns)
        widths = [
            max(cell_len(name), *(cell_len(str(cell)) for cell in cells))
            for name, cells in zip(named, columns, strict=True)
        ]
        flexible = [i for i, cells in enumerate(columns) if not _any(cells, (Whole, Text))]
        room -= sum(widths) - sum(widths[i] for i in flexible) + _GAP * (len(widths) - 1)
        flexible.sort(key=lambda i: widths[i] if i else 0)
        for left, i in zip(range(len(flexible), 0, -1), flexible, strict=True):
            share = room // left if i else room // 2
            widths[i] = min(widths[i], max(_NARROWEST, share))
            room -= widths[i]
        return widths


def _cell(value: Cell, wide: bool = True) -> str | Text:
    if value is None:
        return ""
    if isinstance(value, JobId):
        return Whole(value) if wide else short_id(value)
    return Number(f"{value:,}") if isinstance(value, int) else value


def _any(cells: Iterable[Any], kind: type | tuple[type, ...]) -> bool:
    return any(isinstance(cell, kind) for cell in cells)


def print_list(
    form: Form,
    found: Sequence[T],
    row: Callable[[T], Row | list[Row]],
    *,
    empty: str,
    name: Callable[[T], str] | None = None,
    json: Callable[[T], Any] | None = None,
    more: str = "",
) -> None:
    """Print a list in the form that was asked for; `empty` is said of one without entries, and
    `more` is how to get the next page. The name of a thing is its first cell unless `name` says."""
    if form is Form.JSON:
        print_json([json(one) for one in found] if json else found)
    elif form is Form.NAME:
        echo_lines(map(name or (lambda one: name_of(row(one))), found))
    elif not found:
        echo(empty, err=True)
    else:
        emit(Listing([each for one in found for each in as_rows(row(one))], wide=form.wide))
        if more:
            echo(f"there may be more: {more}", err=True)


def name_of(row: Row | list[Row]) -> str:
    return str(next(iter(as_rows(row)[0].values())))


def as_rows(given: Row | list[Row]) -> list[Row]:
    return given if isinstance(given, list) else [given]


def print_one(
    form: Form, value: Any, name: str, page: Callable[[], Iterable[RenderableType]]
) -> None:
    """Print a thing in the form that was asked for."""
    if form is Form.JSON:
        print_json(value)
    elif form is Form.NAME:
        echo(name)
    else:
        emit(*page())


def print_done(json: bool, value: Any, text: str) -> None:
    """Print what came of an act: as JSON, or in words."""
    print_json(value) if json else echo(text)


def rich_text(*parts: str | Text | tuple[str, str], cut: bool = False) -> Text:
    """Parts, each with its style if it has one; `cut`: in one line, whatever the room."""
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=cut or None, overflow="ellipsis" if cut else None)


def styled(state: str, text: str = "") -> Text:
    """A state in its colour."""
    from rich.text import Text

    word = str(state)
    return Text(text or word, STYLES.get(word.lower(), ""))


def facts(pairs: Iterable[tuple[str, str | Text]]) -> Listing:
    """Names and values one below the other, without those that have no value."""
    rows: list[Row] = [
        {
            "": rich_text((f"  {name}", "dim")),
            "value": Wrapped(value) if isinstance(value, str) else value,
        }
        for name, value in pairs
        if value
    ]
    return Listing(rows or [{"": ""}], header=False)


def row_facts(row: Row) -> Listing:
    """A row of a table, its cells one below the other, without the first."""
    cells = list(row.items())[1:]
    return facts([(name.removeprefix("+").lower(), _cell(cell)) for name, cell in cells])


def validity(revoked_at: float | None, expires_at: float | None, now: float) -> tuple[str, Whole]:
    """Whether a key, token or certificate is valid, and how long it will be."""
    if revoked_at is not None:
        return "revoked", Whole("")
    if expires_at is None:
        return "valid", Whole("")
    left = expires_at - now
    return ("valid", Whole(f"in {span(left)}")) if left > 0 else ("expired", Whole(""))


def banner(title: str, facts: Iterable[tuple[str, str]], *more: str) -> str:
    """What a server says of itself when it is ready."""
    from penstock import __version__

    lines = [f"penstock {__version__}, {title}"]
    lines += [f"  {name:<10}  {value}" for name, value in facts if value]
    return "\n".join([*lines, *more, "ready; Ctrl-C stops it"])
