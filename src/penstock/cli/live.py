"""The screen of a command that goes on: a line for each event, and one below that is redrawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import msgspec

from penstock.cli.paper import console, print_line
from penstock.cli.terminal import echo
from penstock.cli.words import span

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_PERIOD = 0.25
"""Seconds between two drawings."""


class LiveScreen:
    """Open it around all that the command does; standard error is drawn above its last line."""

    def __init__(self, line: Callable[[Any], Text], *, json: bool) -> None:
        """`line` is an event as people read it."""
        self._line, self._json = line, json
        self._page = console()
        self._live: Any = None
        self._loading: tuple[float, str] | None = None
        self._standing: Callable[[float], RenderableType | None] | None = None
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
        """Show how far it has come before it is there at all."""
        self._loading = (fraction, doing)

    def stand(self, standing: Callable[[float], RenderableType | None]) -> None:
        """From now on show how it stands; `standing` is given the seconds since now."""
        self._loading, self._standing, self._began = None, standing, time.monotonic()

    def say(self, text: str, **facts: Any) -> None:
        if self._json:
            print_line(facts)
        else:
            self._print(text, text)

    def tell(self, event: msgspec.Struct) -> None:
        if self._json:
            print_line(msgspec.to_builtins(event))
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
        from rich.text import Text

        seconds = time.monotonic() - self._began
        if self._loading is not None:
            fraction, doing = self._loading
            return bar(doing, fraction, seconds)
        return (self._standing(seconds) if self._standing is not None else None) or Text()


def bar(doing: str, fraction: float, seconds: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    done = ProgressBar(total=1.0, completed=fraction, width=24)
    grid.add_row(doing, done, f"{fraction:4.0%}", span(seconds))
    return grid
