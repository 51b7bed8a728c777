"""Live terminal output: pages, progress bars, and the screen of a server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from penstock.cli.formats import span
from penstock.cli.output import console, echo, echo_content, print_line, warn
from penstock.lifecycles.canonical import WAITING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import ProgressColumn
    from rich.text import Text

    from penstock.ports.engine_api import EngineApi

_PERIOD = 0.25
"""Seconds between two drawings."""
_SOON = 3.0
"""Seconds after which a job that has not started is worth a word."""


async def redraw(look: Callable[[], Awaitable[RenderableType]], interval: float = _PERIOD) -> None:
    """Fill the terminal with a page, again and again, until Ctrl-C."""
    from rich.live import Live

    with Live(await look(), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            live.update(await look(), refresh=True)


@contextlib.asynccontextmanager
async def saying_why(api: EngineApi, job_id: str) -> AsyncIterator[None]:
    """While a job is waited for at a terminal: if it does not start soon, say once what it waits
    for."""

    async def say() -> None:
        await asyncio.sleep(_SOON)
        if (await api.get(job_id)).state in WAITING:
            warn(f"job {job_id} waits: {await api.why(job_id)}")

    saying = asyncio.create_task(say()) if sys.stderr.isatty() else None
    try:
        yield
    finally:
        if saying is not None:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)


class Bar:
    """A progress bar, on a terminal only."""

    def __init__(self, what: str, total: float | None, *columns: ProgressColumn, err: bool) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self.console = page = console(err=err)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            *columns,
            console=page,
            transient=True,
            disable=not page.is_terminal,
        )
        self._task = self._progress.add_task(what[:40], total=total, text="")

    def update(self, done: float | None, total: float | None = None, *, text: str = "") -> None:
        self._progress.update(self._task, completed=done or 0.0, total=total, text=text)

    def rename(self, what: str) -> None:
        self._progress.reset(self._task, description=what)

    def advance(self) -> None:
        self._progress.advance(self._task)


@contextlib.contextmanager
def progress(
    what: str, total: float | None = None, *, kind: str = "count", err: bool = True
) -> Iterator[Bar]:
    """A bar for a count, for bytes, or (`fraction`) for a job with what it says of itself."""
    from rich import progress as rich

    columns: dict[str, list[ProgressColumn]] = {
        "count": [rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn()],
        "bytes": [
            rich.DownloadColumn(binary_units=True),
            rich.TransferSpeedColumn(),
            rich.TimeRemainingColumn(compact=True),
        ],
        "fraction": [
            rich.TextColumn("{task.percentage:>3.0f}%"),
            rich.TimeElapsedColumn(),
            rich.TextColumn("{task.fields[text]}", markup=False),
        ],
    }
    bar = Bar(what, total, *columns[kind], err=err)
    with bar._progress:
        yield bar


class Spinner:
    """A sign of life on standard error until there is something to read; on a terminal only."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._status = console(err=True).status("") if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        self.say(self._text)
        return self

    def say(self, text: str) -> None:
        if self._status is not None:
            from rich.text import Text

            self._status.update(Text(text))  # a plain string would be markup
            self._status.start()

    def end(self) -> None:
        if self._status is not None:
            self._status.stop()

    def __exit__(self, *error: object) -> None:
        self.end()


class TextStream:
    """A growing text on standard output. Until there is some, a spinner says what is waited for."""

    ends_line = False
    """Whether its last line is ended in a pipe too, and not on a terminal only."""

    def __init__(self, waiting: str = "", *, silent: bool = False) -> None:
        self.spinner, self._silent = Spinner(waiting), silent
        self.text = ""
        """What was printed of the text."""

    def __enter__(self) -> Self:
        self.spinner.__enter__()
        return self

    def show(self, whole: str) -> None:
        """Print what is new of it. A text that was begun anew gets a line of its own."""
        if not whole.startswith(self.text):
            self._put("\n")
            self.text = ""
        if added := whole[len(self.text) :]:
            self.spinner.end()
            self.text = whole
            self._put(added)

    def __exit__(self, *error: object) -> None:
        self.spinner.end()
        ends = self.ends_line or sys.stdout.isatty()
        if ends and self.text and not self.text.endswith("\n"):
            self._put("\n")

    def _put(self, text: str) -> None:
        if not self._silent:
            echo_content(text, nl=False)
            sys.stdout.flush()


class LiveScreen:
    """The screen of a server: a line for each event, and a last one that is redrawn.

    Open it around all that the command does; standard error is drawn above its last line.
    """

    def __init__(self, line: Callable[[Any], Text], *, json: bool) -> None:
        """`line` is an event as people read it."""
        self._line, self._json = line, json
        self._page = console()
        self._live: Any = None
        self._loading: tuple[float, str] | None = None
        self._status: Callable[[float], RenderableType | None] | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        from rich.live import Live

        if sys.stdout.isatty() and not self._json:
            self._live = Live(
                get_renderable=self._drawn,
                console=self._page,
                refresh_per_second=1 / _PERIOD,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def load(self, fraction: float, doing: str) -> None:
        """Show how far it has come before it is ready."""
        self._loading = (fraction, doing)

    def show_status(self, status: Callable[[float], RenderableType | None]) -> None:
        """From now on the last line is this; `status` is given the seconds since now."""
        self._loading, self._status, self._began = None, status, time.monotonic()

    def say(self, text: str, **facts: Any) -> None:
        if self._json:
            print_line(facts)
        else:
            self._print(text, text)

    def tell(self, event: Any) -> None:
        if self._json:
            print_line(event)
        else:
            line = self._line(event)
            self._print(line, line.plain.rstrip())

    def _print(self, rich: str | Text, plain: str) -> None:
        if self._live is not None:
            self._page.print(rich, soft_wrap=True)
        else:
            echo(plain)
            sys.stdout.flush()

    def _drawn(self) -> RenderableType:
        seconds = time.monotonic() - self._began
        if self._loading is not None:
            fraction, doing = self._loading
            return loading_bar(doing, fraction, seconds)
        return (self._status(seconds) if self._status is not None else None) or ""


def loading_bar(doing: str, fraction: float, seconds: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    done = ProgressBar(total=1.0, completed=fraction, width=24)
    grid.add_row(doing, done, f"{fraction:4.0%}", span(seconds))
    return grid
