"""Status of models that are split over nodes: the values that users and programs are shown.

Each node knows all others of its network, so any of them can describe the whole network. An engine
merges what its workers report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.ports.engine_api import EngineApi, WorkerView

FACT = "pipes"
"""Under this name a worker tells a PipesView among its facts."""
LABEL = "pipe"
"""The label of a worker that is a node, with the address at which other nodes reach it."""


class SegmentView(Struct, frozen=True, kw_only=True):
    """Layers of a model that a node holds."""

    model: str
    layers: str
    """As people write them, the last one included: `0-14`, or `7` alone."""
    start: int
    end: int
    """The last one is not included."""
    state: str
    """`loading` or `ready`"""
    loaded: int = 0
    """Layers that are read so far."""
    dtype: str = ""
    layer_ms: float = 0.0
    """What one token of one job takes in one layer."""


class NodeView(Struct, frozen=True, kw_only=True):
    """A node of a network."""

    node_id: str
    address: str
    state: str
    """`ready`, `loading`, `idle` (it holds nothing), `draining`, or `stalled` (a computation takes
    far longer than it should)"""
    model: str = ""
    """The model that it was started for."""
    end_models: tuple[str, ...] = ()
    """Models whose text is handled here: their jobs begin and end on this node."""
    segments: tuple[SegmentView, ...] = ()
    threads: int = 0
    memory: int = 0
    """Bytes that weights and caches may take."""
    weights: int = 0
    """Bytes that weights take."""
    cache_total: int = 0
    cache_used: int = 0
    cache_kept: int = 0
    """Bytes of finished jobs' caches, kept for a next turn unless their room is needed."""
    jobs: int = 0
    waiting: int = 0
    """Jobs that wait for room."""
    tokens_per_s: float = 0.0
    busy: float = 0.0
    """Share of the time in which it computes, 0 to 1."""
    refused: dict[str, int] = {}
    """Things that it did not take, counted by reason."""
    links: dict[str, float] = {}
    """Milliseconds there and back, to each node it is connected to."""
    worker_id: str = ""
    """The worker of this engine that it is, if it is one."""
    boot: str = ""
    version: int = 0
    """With `boot`: which of two descriptions is newer."""


class HopView(Struct, frozen=True, kw_only=True):
    node_id: str
    layers: str


class PipeView(Struct, frozen=True, kw_only=True):
    """A model that is split over nodes."""

    model: str
    num_layers: int
    complete: bool
    """Whether a job could begin now."""
    missing: str = ""
    """Layers that no node can compute, as `15-29`."""
    reason: str = ""
    """Why it is not complete."""
    disagree: tuple[str, ...] = ()
    """Nodes that are passed over because their weights are others."""
    origins: tuple[str, ...] = ()
    """Nodes on which its jobs begin and end."""
    hops: tuple[HopView, ...] = ()
    """The way that a job would go now."""
    token_ms: float = 0.0
    """What a token is expected to take on it."""


class PipesView(Struct, frozen=True, kw_only=True):
    """Everything that is split over nodes, and those nodes."""

    pipes: tuple[PipeView, ...] = ()
    """By model."""
    nodes: tuple[NodeView, ...] = ()
    """By id."""


def told_in(facts: Mapping[str, Any]) -> PipesView | None:
    """What a worker tells of pipes; None if that is nothing, or nothing that is understood here."""
    try:
        return msgspec.convert(facts[FACT], PipesView) if FACT in facts else None
    except msgspec.ValidationError:
        return None


def status_of(workers: Iterable[WorkerView]) -> PipesView:
    """The status that the workers of an engine report."""
    return merged(
        (worker.worker_id, view)
        for worker in workers
        if worker.status != "missing" and (view := told_in(worker.facts)) is not None
    )


def merged(told: Iterable[tuple[str, PipesView]]) -> PipesView:
    """What workers tell, by their ids, put together: of a node its newest description, of a model
    that of who sees it complete."""
    nodes: dict[str, NodeView] = {}
    pipes: dict[str, PipeView] = {}
    for _, view in sorted(told, key=lambda one: one[0]):
        for node in view.nodes:
            known = nodes.get(node.node_id)
            nodes[node.node_id] = node if known is None else _newer(known, node)
        for pipe in view.pipes:
            known_pipe = pipes.get(pipe.model)
            if known_pipe is None or _rank(pipe) > _rank(known_pipe):
                pipes[pipe.model] = pipe
    return PipesView(
        pipes=tuple(pipe for _, pipe in sorted(pipes.items())),
        nodes=tuple(node for _, node in sorted(nodes.items())),
    )


def _newer(one: NodeView, other: NodeView) -> NodeView:
    newest = max(one, other, key=lambda node: (node.boot, node.version))
    return replace(newest, worker_id=one.worker_id or other.worker_id)


def _rank(pipe: PipeView) -> tuple[bool, int]:
    return pipe.complete, len(pipe.origins)


async def addresses(api: EngineApi, but: str = "") -> list[str]:
    """Where the nodes among an engine's workers are reached, except for `but` (a worker's id)."""
    found = {
        worker.labels[LABEL]: None
        for worker in await api.workers()
        if worker.status != "missing" and worker.labels.get(LABEL) and worker.worker_id != but
    }
    return list(found)


# -- split models in words, and what changes between two looks at them. Pure --------------


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
