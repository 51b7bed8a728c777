"""Split models drawn: who holds which layers, what is missing, what changes. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, TypeVar

from penstock.cli.formats import Number, moment, span
from penstock.cli.live import loading_bar
from penstock.cli.output import WIDE, Listing, Row, rich_text, styled
from penstock.workloads.pipes.status import (
    Change,
    NodeChange,
    NodeView,
    PipesView,
    PipeView,
    held,
    route,
    why_not,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

T = TypeVar("T")

_UNBOUNDED = 120
"""Columns of a bar's page where nothing limits them."""
_NAME = 20
"""Columns that the name of a node may take beside a bar."""
_MARK = 10

# -- layers in a row of cells ------------------------------------------------------


class Held(IntEnum):
    """What a node has of a layer."""

    NOTHING = 0
    LOADING = 1
    READY = 2


_SIGNS = {Held.NOTHING: ("·", "dim"), Held.LOADING: ("▒", "yellow"), Held.READY: ("█", "green")}


def held_by(node: NodeView, model: str, num_layers: int) -> list[Held]:
    """Layer by layer. What is loading is loaded from its first layer on."""
    held = [Held.NOTHING] * num_layers
    for segment in node.segments:
        if segment.model != model:
            continue
        for layer in range(max(0, segment.start), min(num_layers, segment.end)):
            state = Held.READY if segment.state == "ready" else Held.LOADING
            held[layer] = max(held[layer], state)
    return held


def copies(nodes: Iterable[NodeView], model: str, num_layers: int) -> tuple[list[int], list[bool]]:
    """How often each layer is ready, and whether it is being loaded somewhere."""
    ready, loading = [0] * num_layers, [False] * num_layers
    for node in nodes:
        for layer, state in enumerate(held_by(node, model, num_layers)):
            ready[layer] += state is Held.READY
            loading[layer] |= state is Held.LOADING
    return ready, loading


def spread(values: Sequence[T], width: int, joined: Callable[[Sequence[T]], T]) -> list[T]:
    """One value for each cell; where several share one, what `joined` makes of them."""
    edges = [cell * len(values) // width for cell in range(width + 1)]
    return [joined(values[a:b]) for a, b in pairwise(edges)]


def ruler(num_layers: int, width: int) -> str:
    """Numbers of layers above their cells."""
    step, text = _MARK * -(-num_layers // width), ""
    for layer in range(0, num_layers, step):
        text = f"{text:<{layer * width // num_layers}}{layer}"
    return f"{text:<{width}}"[:width]


def holding(node: NodeView, model: str, num_layers: int, width: int) -> Text:
    """What one node holds."""
    cells = spread(held_by(node, model, num_layers), width, max)
    ready = ("█", "magenta" if node.state == "draining" else "green")
    return _joined({**_SIGNS, Held.READY: ready}[cell] for cell in cells)


def coverage(nodes: Sequence[NodeView], model: str, num_layers: int, width: int) -> Text:
    """How often each layer is ready: where it is not at all, no job can pass."""
    ready, loading = copies(nodes, model, num_layers)

    def sign(count: int, comes: bool) -> tuple[str, str]:
        if count:
            return str(count) if count < 10 else "+", "green"
        return ("0", "yellow") if comes else ("✗", "bold red")

    return _joined(map(sign, spread(ready, width, min), spread(loading, width, all)))


def _joined(signs: Iterable[tuple[str, str]]) -> Text:
    runs = groupby(signs, key=lambda one: one[1])
    return rich_text(*(("".join(sign for sign, _ in run), style) for style, run in runs))


# -- the page ----------------------------------------------------------------------


class NetworkView:
    """Everything that is split over nodes, drawn as wide as it is printed."""

    def __init__(self, view: PipesView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, _UNBOUNDED)
        for pipe in self._view.pipes:
            nodes = [node for node in self._view.nodes if _has_to_do(node, pipe.model)]
            yield from headline(pipe, len(nodes))
            if pipe.num_layers:
                yield _layers(pipe, nodes, width)
            yield ""
        wide = options.max_width >= WIDE
        yield Listing([figures(node) for node in self._view.nodes], wide=wide)
        yield from _refusals(self._view.nodes)


def headline(pipe: PipeView, nodes: int) -> Iterator[Text]:
    """Whether a job could begin now, over which nodes, or what keeps it."""
    what = f"  {pipe.num_layers} layers, {nodes} node{'' if nodes == 1 else 's'}  "
    state = ("complete", "bold green") if pipe.complete else ("not complete", "bold red")
    yield rich_text((pipe.model, "bold"), what, state)
    if pipe.complete:
        speed = f", about {pipe.token_ms:.0f} ms a token" if pipe.token_ms else ""
        yield rich_text(f"  route: {route(pipe)}{speed}")
    else:
        yield rich_text((f"  {why_not(pipe)}", "red"))
    for one in pipe.disagree:
        if one not in pipe.reason:
            yield rich_text((f"  ignored: {one}", "yellow"))


def _has_to_do(node: NodeView, model: str) -> bool:
    return (
        model == node.model
        or model in node.end_models
        or any(segment.model == model for segment in node.segments)
    )


def _layers(pipe: PipeView, nodes: Sequence[NodeView], width: int) -> RenderableType:
    words = {node.node_id: held(node, pipe.model) for node in nodes}
    name = max((len(node.node_id) for node in nodes), default=0)
    longest = max((len(text) for text in words.values()), default=0)
    room = width - min(_NAME, max(name, len("copies"))) - max(longest, len("LAYERS")) - 4 - 12
    cells = min(pipe.num_layers, max(10, room))
    scale = ruler(pipe.num_layers, cells)
    rows: list[Row] = [
        {
            "NODE": node.node_id,
            scale: holding(node, pipe.model, pipe.num_layers, cells),
            "LAYERS": words[node.node_id],
            "STATE": _state(node, pipe.model),
        }
        for node in nodes
    ]
    copies = coverage(nodes, pipe.model, pipe.num_layers, cells)
    rows.append({"NODE": "copies", scale: copies, "LAYERS": "", "STATE": ""})
    return Listing(rows)


def _state(node: NodeView, model: str) -> Text:
    loading = [s for s in node.segments if s.model == model and s.state == "loading"]
    if loading and node.state != "draining":
        done, total = sum(s.loaded for s in loading), sum(s.end - s.start for s in loading)
        return styled("loading", f"loading {done}/{total}")
    return styled(node.state)


def figures(node: NodeView) -> Row:
    """A node as a row of a table."""
    slowest = max((segment.layer_ms for segment in node.segments), default=0.0)
    return {
        "NODE": node.node_id,
        "DTYPE": ", ".join(sorted({s.dtype for s in node.segments if s.dtype})),
        "WEIGHTS": brief(node.weights),
        "USED": brief(node.cache_used),
        "KEPT": brief(node.cache_kept),
        "CACHE": brief(node.cache_total),
        "JOBS": Number(f"{node.jobs}+{node.waiting}" if node.waiting else str(node.jobs)),
        "TOK/S": Number(f"{node.tokens_per_s:.0f}"),
        "BUSY": Number(f"{node.busy:.0%}"),
        "+MS/LAYER": Number(f"{slowest:.2f}" if slowest else ""),
        "+THREADS": node.threads or None,
        "+ADDRESS": node.address,
    }


def _refusals(nodes: Sequence[NodeView]) -> Iterator[Text]:
    for node in nodes:
        said = [f"{count:,} {why}" for why, count in sorted(node.refused.items()) if count]
        if said:
            yield rich_text((f"{node.node_id} refused: {', '.join(said)}", "yellow"))


def brief(count: int) -> Number:
    """Bytes in few characters: 0, 900K, 270M, 1.2G."""
    if not count:
        return Number("0")
    number, units = count / 1024, ("K", "M", "G", "T")
    for unit in units:
        if number < 999.5 or unit == units[-1]:
            break
        number /= 1024
    return Number(f"{number:.1f}{unit}" if number < 9.95 else f"{number:.0f}{unit}")


_LONGEST = max(map(len, Change))


def change_line(change: NodeChange) -> Text:
    """A change as people read it."""
    now = time.time()
    word = styled(change.what, f"{change.what:<{_LONGEST}}")
    when = f"{moment(now, now)[:8]}  "
    return rich_text(when, word, f"  {change.about}  ", (change.text, "dim"))


def node_status(node: NodeView, seconds: float) -> RenderableType:
    """How a node is doing, in a line; what it is loading comes first."""
    loading = [one for one in node.segments if one.state == "loading"]
    if loading:
        done, total = sum(s.loaded for s in loading), sum(s.end - s.start for s in loading)
        ranges = ", ".join(one.layers for one in loading)
        return loading_bar(f"loading layers {ranges}", done / max(1, total), seconds)
    waiting = f" ({node.waiting} waiting)" if node.waiting else ""
    refused = sum(node.refused.values())
    return rich_text(
        f"{held(node, node.model)}   ",
        *("jobs ", (f"{node.jobs}{waiting}", "yellow" if node.jobs else ""), "   "),
        *((f"{node.tokens_per_s:.0f}", "green"), " tokens/s   "),
        f"busy {node.busy:.0%}   cache {brief(node.cache_used)}+{brief(node.cache_kept)}"
        f"/{brief(node.cache_total)}",
        (f"   up {span(seconds)}", "dim"),
        (f"   {refused:,} refused" if refused else "", "bold red"),
        cut=True,
    )
