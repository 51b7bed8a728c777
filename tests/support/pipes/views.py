"""Views of nodes as tests need them."""

from __future__ import annotations

from typing import Any

from penstock.workloads.pipes.status import NodeView, PipesView, PipeView, SegmentView

MODEL = "Smol"


def segment(start: int, end: int, **fields: Any) -> SegmentView:
    """Layers `start` to `end`, the last one not included."""
    given = {"model": MODEL, "state": "ready", "dtype": "float32", **fields}
    return SegmentView(layers=f"{start}-{end - 1}", start=start, end=end, **given)


def node(node_id: str, *segments: SegmentView, **fields: Any) -> NodeView:
    given = {"address": "127.0.0.1:7500", "state": "ready", "model": MODEL, **fields}
    return NodeView(node_id=node_id, segments=segments, **given)


def pipe(**fields: Any) -> PipeView:
    given = {"model": MODEL, "num_layers": 6, "complete": True, **fields}
    return PipeView(**given)


def view(*nodes: NodeView, pipes: tuple[PipeView, ...] = ()) -> PipesView:
    return PipesView(nodes=nodes, pipes=pipes)
