"""What a node shows: how far its layers are loaded, a line for each change, and how it stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.cli.paper import console, print_line
from penstock.cli.pipe_news import STYLES, News
from penstock.cli.pipe_screen import brief, held
from penstock.cli.terminal import echo
from penstock.cli.words import moment, span
from penstock.workloads.pipes.status import NodeView

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_WIDEST = max(map(len, STYLES))
_PERIOD = 0.25
"""Seconds between two drawings."""


class Screen:
    """Open it around all that a node does; standard error is drawn above its last line."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._page = console()
        self._live: Any = None
        self._loading: tuple[float, str] | None = None
        self._standing: Callable[[], NodeView | None] | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Screen:
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
        """How far it has come before it is there at all."""
        self._loading = (fraction, doing)

    def stand(self, node: Callable[[], NodeView | None]) -> None:
        """From now on show how it stands."""
        self._loading, self._standing, self._began = None, node, time.monotonic()

    def say(self, text: str, **facts: Any) -> None:
        if self._json:
            print_line(facts)
        elif self._live is not None:
            self._page.print(text, soft_wrap=True)
        else:
            echo(text)
            sys.stdout.flush()

    def tell(self, news: News) -> None:
        if self._json:
            print_line(msgspec.to_builtins(news))
        elif self._live is not None:
            self._page.print(_line(news))
        else:
            echo(_line(news).plain.rstrip())
            sys.stdout.flush()

    def _drawn(self) -> RenderableType:
        from rich.text import Text

        if self._loading is not None:
            fraction, doing = self._loading
            return _bar(doing, fraction, time.monotonic() - self._began)
        node = self._standing() if self._standing is not None else None
        return Text() if node is None else standing(node, time.monotonic() - self._began)


def _line(news: News) -> Text:
    from rich.text import Text

    now = time.time()
    word = (f"{news.what.value:<{_WIDEST}}", STYLES[news.what])
    return Text.assemble(f"{moment(now, now)[:8]}  ", word, f"  {news.about}  ", (news.text, "dim"))


def _bar(doing: str, fraction: float, seconds: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=fraction, width=24)
    grid.add_row(doing, bar, f"{fraction:4.0%}", span(seconds))
    return grid


def standing(node: NodeView, seconds: float) -> RenderableType:
    """How a node is doing, in a line; what it is loading comes first."""
    from rich.text import Text

    loading = [one for one in node.segments if one.state == "loading"]
    if loading:
        done, total = sum(s.loaded for s in loading), sum(s.end - s.start for s in loading)
        layers = ", ".join(one.layers for one in loading)
        return _bar(f"loading layers {layers}", done / max(1, total), seconds)
    waiting = f" ({node.waiting} waiting)" if node.waiting else ""
    refused = sum(node.refused.values())
    return Text.assemble(
        f"{held(node, node.model)}   ",
        *("jobs ", (f"{node.jobs}{waiting}", "yellow" if node.jobs else ""), "   "),
        *((f"{node.tokens_per_s:.0f}", "green"), " tokens/s   "),
        f"busy {node.busy:.0%}   cache {brief(node.cache_used)}+{brief(node.cache_kept)}"
        f"/{brief(node.cache_total)}",
        (f"   up {span(seconds)}", "dim"),
        (f"   {refused:,} refused" if refused else "", "bold red"),
        no_wrap=True,
        overflow="ellipsis",
    )
