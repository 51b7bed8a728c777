"""Split models in words, and what changes between two looks at them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from msgspec import Struct

from penstock.workloads.pipes.status import NodeView, PipesView, PipeView


def route(pipe: PipeView) -> str:
    """The nodes that a job would pass now."""
    return " → ".join(f"{hop.node_id} {_plain(hop.layers)}" for hop in pipe.hops)


def why_not(pipe: PipeView) -> str:
    """Why no job of it can start."""
    if pipe.reason:
        return pipe.reason
    if pipe.missing:
        return f"no node has layers {pipe.missing}"
    return "no node has its end model: start one with --end-model" if not pipe.origins else ""


def _plain(layers: str) -> str:
    """`0` for 0-0."""
    first, _, last = layers.partition("-")
    return first if first == last else layers


def held(node: NodeView, model: str) -> str:
    """In words: layers, and whether the text is handled there."""
    parts = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in _ranges(node, model)]
    if model in node.end_models:
        parts.append("text")
    return ", ".join(parts) or "none"


def _ranges(node: NodeView, model: str) -> list[tuple[int, int]]:
    """What it holds, in as few ranges as possible."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((s.start, s.end) for s in node.segments if s.model == model):
        if found and found[-1][1] >= start:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


class Change(StrEnum):
    JOINED = "joined"
    LOST = "lost"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    COMPLETE = "complete"
    INCOMPLETE = "incomplete"


class NodeChange(Struct, frozen=True, kw_only=True):
    """Something that happened to a node, or to a model's pipe."""

    what: Change
    about: str
    """The node, or the model."""
    text: str = ""


def changes(
    before: PipesView, after: PipesView, reasons: Mapping[str, str] | None = None
) -> list[NodeChange]:
    """First of nodes, then what that means for the models. `reasons` are those of losses."""
    return [*_of_nodes(before, after, reasons or {}), *_of_pipes(before, after)]


def _of_nodes(
    before: PipesView, after: PipesView, reasons: Mapping[str, str]
) -> Iterator[NodeChange]:
    known = {node.node_id: node for node in before.nodes}
    there = {node.node_id: node for node in after.nodes}
    for node_id in known.keys() - there.keys():
        parts = (reasons.get(node_id, ""), f"it had {_held_by(known[node_id]) or 'no layers'}")
        yield NodeChange(what=Change.LOST, about=node_id, text="; ".join(filter(None, parts)))
    for node_id, node in there.items():
        then = known.get(node_id)
        if then is None or then.boot != node.boot:
            yield NodeChange(what=Change.JOINED, about=node_id, text=_joined_as(node))
        elif (then.state, _held_layers(then)) != (node.state, _held_layers(node)):
            yield from _moved(node)


def _moved(node: NodeView) -> Iterator[NodeChange]:
    if node.state in (Change.LOADING, Change.READY, Change.DRAINING):
        yield NodeChange(what=Change(node.state), about=node.node_id, text=_held_by(node))


def _of_pipes(before: PipesView, after: PipesView) -> Iterator[NodeChange]:
    known = {pipe.model: pipe for pipe in before.pipes}
    for pipe in after.pipes:
        then = known.get(pipe.model)
        if then is not None and (then.complete, _why(then)) == (pipe.complete, _why(pipe)):
            continue
        what = Change.COMPLETE if pipe.complete else Change.INCOMPLETE
        yield NodeChange(
            what=what, about=pipe.model, text=route(pipe) if pipe.complete else _why(pipe)
        )


def _why(pipe: PipeView) -> str:
    """A pipe that is complete stays what it is, whichever way is the quickest now."""
    return "" if pipe.complete else why_not(pipe)


def _held_layers(node: NodeView) -> tuple[tuple[str, str], ...]:
    return tuple((segment.model, segment.layers) for segment in node.segments)


def _held_by(node: NodeView) -> str:
    models = dict.fromkeys([*(one.model for one in node.segments), *node.end_models])
    return "; ".join(f"{model} {held(node, model)}" for model in models)


def _joined_as(node: NodeView) -> str:
    held = _held_by(node)
    return f"{node.address}, {held}" if held else node.address
