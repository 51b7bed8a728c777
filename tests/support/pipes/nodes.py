"""Nodes of a network, as records."""

from __future__ import annotations

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.records import NodeRecord, SegmentRecord, SegmentState

MODEL = "m"


def segment(
    start: int,
    end: int,
    num_layers: int,
    *,
    ms: float = 1.0,
    weights: str = "w",
    ready: bool = True,
) -> SegmentRecord:
    """Layers `start` to `end`, not included, with the weights of one model."""
    return SegmentRecord(
        model=MODEL,
        layers=LayerRange(start, end),
        num_layers=num_layers,
        fingerprints=tuple(f"{weights}{n}" for n in range(start, end)) if ready else (),
        state=SegmentState.READY if ready else SegmentState.LOADING,
        layer_ms=ms if ready else 0.0,
    )


def node(node_id: str, *segments: SegmentRecord, **facts: object) -> NodeRecord:
    known: dict[str, object] = {"boot": "0", "version": 1, "model": MODEL, **facts}
    return NodeRecord(node_id=node_id, segments=segments, **known)  # type: ignore[arg-type]
