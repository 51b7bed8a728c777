"""Split models drawn: who holds which layers, what misses, and how the nodes are doing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.paper import WIDE, Listing
from penstock.cli.pipe_bar import Glyphs, coverage, holding, ruler, width_of
from penstock.cli.words import layers
from penstock.workloads.pipes.status import NodeView, PipesView, PipeView

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

_STATES = {
    "ready": "green",
    "loading": "yellow",
    "draining": "magenta",
    "idle": "dim",
    "stalled": "red",
}
_UNBOUNDED = 120
"""Columns of a bar's page where nothing limits them."""
_NAME = 20
"""Columns that the name of a node may take beside a bar."""


class Board:
    """Everything that is split over nodes, drawn as wide as it is printed."""

    def __init__(self, view: PipesView) -> None:
        self._view = view

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        width = min(options.max_width, _UNBOUNDED)
        glyphs = Glyphs.for_encoding(options.encoding)
        for pipe in self._view.pipes:
            nodes = [node for node in self._view.nodes if _has_to_do(node, pipe.model)]
            yield from headline(pipe, len(nodes))
            if pipe.num_layers:
                yield _layers(pipe, nodes, width, glyphs)
            yield Text()
        yield _figures(self._view.nodes, wide=options.max_width >= WIDE)
        yield from _refusals(self._view.nodes)


def headline(pipe: PipeView, nodes: int) -> Iterator[Text]:
    """Whether a job could begin now, over which nodes, or what keeps it."""
    from rich.text import Text

    what = f"  {pipe.num_layers} layers, {nodes} node{'' if nodes == 1 else 's'}  "
    state = ("complete", "bold green") if pipe.complete else ("not complete", "bold red")
    yield Text.assemble((pipe.model, "bold"), what, state)
    if pipe.complete:
        speed = f", about {pipe.token_ms:.0f} ms a token" if pipe.token_ms else ""
        yield Text(f"  way: {way(pipe)}{speed}")
    else:
        yield Text(f"  {why_not(pipe)}", "red")
    for one in pipe.disagree:
        if one not in pipe.reason:
            yield Text(f"  passed over: {one}", "yellow")


def way(pipe: PipeView) -> str:
    """The way that a job would go now."""
    return " → ".join(f"{hop.node_id} {layers(hop.layers).split()[-1]}" for hop in pipe.hops)


def why_not(pipe: PipeView) -> str:
    """In words, what keeps a job of it from beginning."""
    if pipe.reason:
        return pipe.reason
    if pipe.missing:
        return f"no node has layers {pipe.missing}"
    return "no node has its end model: start one with --end-model" if not pipe.origins else ""


def _has_to_do(node: NodeView, model: str) -> bool:
    return (
        model == node.model
        or model in node.end_models
        or any(segment.model == model for segment in node.segments)
    )


def _layers(
    pipe: PipeView, nodes: Sequence[NodeView], width: int, glyphs: Glyphs
) -> RenderableType:
    from rich.text import Text

    words = {node.node_id: held(node, pipe.model) for node in nodes}
    name = max((len(node.node_id) for node in nodes), default=0)
    longest = max((len(text) for text in words.values()), default=0)
    room = width - min(_NAME, max(name, len("copies"))) - max(longest, len("LAYERS")) - 4 - 12
    cells = width_of(pipe.num_layers, max(10, room))
    scale = ruler(pipe.num_layers, cells)
    listing = Listing("NODE", scale, "LAYERS", "STATE", flexible=("NODE",))
    for node in nodes:
        bar = holding(node, pipe.model, pipe.num_layers, cells, glyphs)
        listing.add(node.node_id, bar, words[node.node_id], _state(node, pipe.model))
    together = coverage(nodes, pipe.model, pipe.num_layers, cells, glyphs)
    listing.add(Text("copies", "dim"), together, "", "")
    return listing


def held(node: NodeView, model: str) -> str:
    """In words: layers, and whether the text is handled there."""
    parts = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in _ranges(node, model)]
    if model in node.end_models:
        parts.append("text")
    return ", ".join(parts) or "none"


def _ranges(node: NodeView, model: str) -> list[tuple[int, int]]:
    """What it holds, in as few pieces as it can be said."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((s.start, s.end) for s in node.segments if s.model == model):
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _state(node: NodeView, model: str) -> Text:
    from rich.text import Text

    loading = [s for s in node.segments if s.model == model and s.state == "loading"]
    if loading and node.state != "draining":
        done, total = sum(s.loaded for s in loading), sum(s.end - s.start for s in loading)
        return Text(f"loading {done}/{total}", "yellow")
    return Text(node.state, _STATES.get(node.state, ""))


def _figures(nodes: Sequence[NodeView], *, wide: bool) -> RenderableType:
    more = ("MS/LAYER", "THREADS", "ADDRESS") if wide else ()
    listing = Listing(
        *("NODE", "DTYPE", "WEIGHTS", "USED", "KEPT", "CACHE", "JOBS", "TOK/S", "BUSY", *more),
        flexible=("NODE",),
        right=("WEIGHTS", "USED", "KEPT", "CACHE", "JOBS", "TOK/S", "BUSY", "MS/LAYER", "THREADS"),
    )
    for node in nodes:
        cells = (
            node.node_id,
            ", ".join(sorted({s.dtype for s in node.segments if s.dtype})),
            brief(node.weights),
            brief(node.cache_used),
            brief(node.cache_kept),
            brief(node.cache_total),
            f"{node.jobs}+{node.waiting}" if node.waiting else str(node.jobs),
            f"{node.tokens_per_s:.0f}",
            f"{node.busy:.0%}",
        )
        listing.add(*cells, *(_detail(node) if wide else ()))
    return listing


def _detail(node: NodeView) -> tuple[str, str, str]:
    slowest = max((segment.layer_ms for segment in node.segments), default=0.0)
    return f"{slowest:.2f}" if slowest else "", str(node.threads or ""), node.address


def _refusals(nodes: Sequence[NodeView]) -> Iterator[Text]:
    from rich.text import Text

    for node in nodes:
        said = [f"{count:,} {why}" for why, count in sorted(node.refused.items()) if count]
        if said:
            yield Text(f"{node.node_id} refused: {', '.join(said)}", "yellow")


def brief(count: int) -> str:
    """Bytes in few characters: 0, 900K, 270M, 1.2G."""
    if not count:
        return "0"
    number, units = count / 1024, ("K", "M", "G", "T")
    for unit in units:
        if number < 999.5 or unit == units[-1]:
            break
        number /= 1024
    return f"{number:.1f}{unit}" if number < 9.95 else f"{number:.0f}{unit}"
