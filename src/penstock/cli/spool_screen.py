"""What a spool's server shows: a line when something happens, and on a terminal how it stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.cli.paper import console, print_line
from penstock.cli.terminal import echo, harmless
from penstock.cli.words import moment, plural, span
from penstock.workloads.spool.serving.events import Event, Happened

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from penstock.workloads.spool.serving.server import Server

_WORDS = {
    Happened.CLAIMED: ("running", "yellow"),
    Happened.DONE: ("done", "green"),
    Happened.FAILED: ("failed", "red"),
    Happened.REQUEUED: ("requeued", "cyan"),
    Happened.LET_GO: ("let go", "magenta"),
}
_WIDEST = max(len(word) for word, _ in _WORDS.values())
_PERIOD = 0.25
"""Seconds between two drawings."""


class Screen:
    """Open it around all that a server does; standard error is drawn above its last line."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._page = console()
        self._live: Any = None
        self._loading: tuple[str, float, float] | None = None
        self._server: Server | None = None
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

    def load(self, name: str) -> Callable[[float, str], None]:
        """Show how far a model is loaded; what is given is told."""
        began = time.monotonic()

        def tell(fraction: float, said: str) -> None:
            self._loading = (name, fraction, began)

        tell(0.0, "")
        return tell

    def stand(self, server: Server) -> None:
        """From now on show how it stands."""
        self._loading, self._server, self._began = None, server, time.monotonic()

    def say(self, text: str, **facts: Any) -> None:
        if self._json:
            print_line(facts)
        elif self._live is not None:
            self._page.print(text, soft_wrap=True)
        else:
            echo(text)
            sys.stdout.flush()

    def tell(self, event: Event) -> None:
        if self._json:
            print_line(msgspec.to_builtins(event))
        elif self._live is not None:
            self._page.print(_line(event), soft_wrap=True)
        else:
            echo(_line(event).plain.rstrip())
            sys.stdout.flush()

    def _drawn(self) -> RenderableType:
        from rich.text import Text

        if self._loading is not None:
            return _loaded(*self._loading)
        if self._server is None:
            return Text()
        return _standing(self._server, time.monotonic() - self._began)


def _line(event: Event) -> Text:
    from rich.text import Text

    word, style = _WORDS[event.what]
    head = f"{moment(event.at, time.time())}  {event.job_id}  "
    return Text.assemble(head, (f"{word:<{_WIDEST}}", style), *_details(event))


def _details(event: Event) -> list[str | tuple[str, str]]:
    if event.what is Happened.CLAIMED:
        return []
    parts: list[str | tuple[str, str]] = [f"  {span(event.seconds)}"]
    if event.tokens:
        speed = f", {event.tokens / event.seconds:.0f}/s" if event.seconds else ""
        parts.append(f"  {plural(event.tokens, 'token')}{speed}")
    why = ": ".join(filter(None, (event.code, event.reason)))
    if why:
        parts.append((f"  {harmless(why)}", "dim"))
    return parts


def _loaded(name: str, fraction: float, began: float) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=fraction, width=24)
    grid.add_row(f"loading {name}", bar, f"{fraction:4.0%}", span(time.monotonic() - began))
    return grid


def _standing(server: Server, seconds: float) -> Text:
    from rich.text import Text

    counts = server.counts
    return Text.assemble(
        *("queued ", (f"{server.queued:,}", "cyan"), "   "),
        *("running ", (f"{len(server.running):,}", "yellow"), "   "),
        *("done ", (f"{counts.done:,}", "green"), "   "),
        *("failed ", (f"{counts.failed:,}", "red" if counts.failed else "")),
        (f"   {counts.tokens:,} tokens   up {span(seconds)}", "dim"),
        ("".join(f"   {name}" for name in server.health.troubles), "bold red"),
        no_wrap=True,
        overflow="ellipsis",
    )
