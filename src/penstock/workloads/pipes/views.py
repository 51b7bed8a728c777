"""A network of nodes as it is shown: in `penstock node status`, and by the engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.records import NodeRecord, SegmentRecord, Table, written
from penstock.workloads.pipes.routes import NoRoute, Route, find_route, loads
from penstock.workloads.pipes.status import HopView, NodeView, PipesView, PipeView, SegmentView


def view_of(records: Iterable[NodeRecord], workers: dict[str, str] | None = None) -> PipesView:
    """`workers` are the engine's workers that are nodes, by the node's id."""
    table = Table(records)
    return PipesView(
        pipes=tuple(_pipe(model, table.of(model)) for model in table.models()),
        nodes=tuple(_node(record, (workers or {}).get(record.node_id, "")) for record in table),
    )


def _pipe(model: str, records: Sequence[NodeRecord]) -> PipeView:
    """As the origin sees it that sees it best."""
    num_layers = max(_num_layers(record, model) for record in records)
    if not num_layers:
        reason = f"nothing is known of {model} yet"
        return PipeView(model=model, num_layers=0, complete=False, reason=reason)
    origins = [record for record in records if model in record.end_models]
    routes = [_route(model, num_layers, records, origin) for origin in origins]
    whole = [route for route in routes if isinstance(route, Route)]
    base = PipeView(
        model=model,
        num_layers=num_layers,
        complete=bool(whole),
        origins=tuple(origin.node_id for origin in origins),
    )
    if whole:
        return _completed(base, min(whole, key=lambda route: route.cost))
    # Without an origin it is seen as by one that holds nothing itself.
    gaps = [route for route in routes if isinstance(route, NoRoute)] or [
        _coverage(model, num_layers, records)
    ]
    return _lacking(base, min(gaps, key=lambda gap: sum(map(len, gap.missing))))


def _completed(pipe: PipeView, route: Route) -> PipeView:
    hops = tuple(
        HopView(node_id=hop.node_id, layers=written([LayerRange(hop.start, hop.end)]))
        for hop in route.hops
    )
    token_ms = round(route.cost, 3)
    return replace(pipe, complete=True, disagree=route.disagree, hops=hops, token_ms=token_ms)


def _lacking(pipe: PipeView, gap: NoRoute) -> PipeView:
    reason = gap.reason
    if not pipe.origins:
        nobody = f"no node handles the text of {pipe.model} (--end-model)"
        reason = f"{nobody}; {reason}" if gap.missing else nobody
    missing = written(gap.missing)
    return replace(pipe, missing=missing, reason=reason, disagree=gap.disagree)


def _route(
    model: str, num_layers: int, records: Sequence[NodeRecord], origin: NodeRecord
) -> Route | NoRoute:
    return find_route(
        model, num_layers, records, origin.node_id, origin.local_layers, loads(records)
    )


def _coverage(model: str, num_layers: int, records: Sequence[NodeRecord]) -> NoRoute:
    route = find_route(model, num_layers, records, "", 0, loads(records))
    return route if isinstance(route, NoRoute) else NoRoute((), route.disagree, "")


def _num_layers(record: NodeRecord, model: str) -> int:
    told = [segment.num_layers for segment in record.of(model)]
    return max([*told, record.num_layers if record.model == model else 0])


def _node(record: NodeRecord, worker_id: str) -> NodeView:
    changed = {
        "state": _state(record),
        "segments": tuple(map(_segment, record.segments)),
        "tokens_per_s": round(record.tokens_per_s, 2),
        "busy": round(record.busy, 3),
        "refused": dict(record.refused),
        "links": {node: round(ms, 3) for node, ms in record.links.items()},
        "worker_id": worker_id,
    }
    return NodeView(**_same(record, NodeView) | changed)


def _same(record: Struct, view: type[Struct]) -> dict[str, Any]:
    """The fields that a record and its view have both."""
    both = set(record.__struct_fields__) & set(view.__struct_fields__)
    return {name: getattr(record, name) for name in both}


def _state(record: NodeRecord) -> str:
    if record.draining:
        return "draining"
    if record.stalled:
        return "stalled"
    if any(not segment.ready for segment in record.segments):
        return "loading"
    return "ready" if record.segments or record.end_models else "idle"


def _segment(segment: SegmentRecord) -> SegmentView:
    changed = {
        "layers": written([segment.layers]),
        "start": segment.layers.start,
        "end": segment.layers.end,
        "state": segment.state.value,
        "layer_ms": round(segment.layer_ms, 4),
    }
    return SegmentView(**_same(segment, SegmentView) | changed)
