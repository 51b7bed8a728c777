"""What a node shows: a line for each change, and how it stands."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.cli.live import bar
from penstock.cli.pipe_news import STYLES, News
from penstock.cli.pipe_screen import brief, held
from penstock.cli.words import moment, span
from penstock.workloads.pipes.status import NodeView

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_WIDEST = max(map(len, STYLES))


def line(news: News) -> Text:
    from rich.text import Text

    now = time.time()
    word = (f"{news.what.value:<{_WIDEST}}", STYLES[news.what])
    return Text.assemble(f"{moment(now, now)[:8]}  ", word, f"  {news.about}  ", (news.text, "dim"))


def standing(node: NodeView, seconds: float) -> RenderableType:
    """How a node is doing, in a line; what it is loading comes first."""
    from rich.text import Text

    loading = [one for one in node.segments if one.state == "loading"]
    if loading:
        done, total = sum(s.loaded for s in loading), sum(s.end - s.start for s in loading)
        layers = ", ".join(one.layers for one in loading)
        return bar(f"loading layers {layers}", done / max(1, total), seconds)
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
