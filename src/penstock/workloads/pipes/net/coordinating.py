"""Who decides where a model's layers go, and what is to be told to whom. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.placement import Member, Plan, plan
from penstock.workloads.pipes.wire.messages import Assign

UNKNOWN_LAYER_MS = 1.0


def coordinator(model: str, records: Iterable[NodeRecord]) -> str | None:
    """Of the live nodes with the end model, the one with the smallest id. Nobody is elected: who
    knows the same nodes comes to the same answer, and for a moment there may be two."""
    able = [r.node_id for r in records if model in r.end_models and not r.draining]
    return min(able, default=None)


def planned(model: str, num_layers: int, records: Sequence[NodeRecord], by: str) -> Plan:
    """Where the layers should be."""
    origins = [r for r in records if model in r.end_models]
    links = {(r.node_id, other): ms / 2 for r in records for other, ms in r.links.items()}
    return plan(
        num_layers,
        [_member(model, r) for r in records if _counts(model, r)],
        origin=by,
        local_layers=min((r.local_layers for r in origins), default=0),
        links=links,
        layer_bytes=max((r.layer_bytes for r in records if r.model == model), default=0),
    )


def steps(
    model: str, num_layers: int, records: Sequence[NodeRecord], wanted: Mapping[str, LayerRange]
) -> dict[str, LayerRange]:
    """What of a plan is to be told now.

    While a way over the whole model stands it is not broken: who is to drop layers is told when
    others have them ready. If everyone waits for everyone, all are told.
    """
    nodes = {r.node_id: r for r in records}
    due = {n: r for n, r in wanted.items() if n in nodes and nodes[n].assigned != r}
    ready = {r.node_id: _ready(model, r) for r in records if r.usable}
    if set(range(num_layers)) - set().union(*ready.values()):
        return due
    safe = {
        n: layers
        for n, layers in due.items()
        if all(
            any(layer in held for other, held in ready.items() if other != n)
            for layer in ready.get(n, set())
            if layer not in layers and layer >= nodes[n].local_layers
        )
    }
    return safe if safe or any(_is_loading(model, r) for r in records) else due


def refusal(assign: Assign, sender: str, own: NodeRecord, records: Iterable[NodeRecord]) -> str:
    """Why a node refuses an assignment of layers; "" if it accepts it."""
    if sender != assign.by or sender != coordinator(assign.model, records):
        return f"{sender} does not decide where {assign.model} goes"
    if assign.model != own.model or not own.auto:
        return f"{own.node_id} does not leave its layers of {assign.model} to the network"
    if not 0 <= assign.start < assign.end <= own.num_layers:
        return f"{assign.model} has no layers {assign.start} to {assign.end}"
    if assign.end - assign.start > own.room:
        return f"{own.node_id} has room for {own.room} layers, not {assign.end - assign.start}"
    if assign.generation <= own.generation:
        return f"stale assignment: generation {assign.generation}, have {own.generation}"
    return ""


def _counts(model: str, record: NodeRecord) -> bool:
    """Whether to plan with it."""
    if not record.usable:
        return False
    return (record.model == model and not record.unfit) if record.auto else bool(record.of(model))


def _member(model: str, record: NodeRecord) -> Member:
    ms = record.layer_ms or UNKNOWN_LAYER_MS
    origin = model in record.end_models
    held = [s.layers for s in record.of(model)]
    if record.auto:
        held = [record.assigned] if record.assigned is not None else []
    return Member(
        record.node_id,
        ms,
        record.room,
        record.auto,
        tuple(held),
        record.end_ms + record.local_layers * ms if origin else 0.0,
    )


def _ready(model: str, record: NodeRecord) -> set[int]:
    segments = [s for s in record.of(model) if s.ready]
    return {n for s in segments for n in range(s.layers.start, s.layers.end)}


def _is_loading(model: str, record: NodeRecord) -> bool:
    told = record.assigned
    if told is None or not record.usable:
        return False
    return not set(range(told.start, told.end)) <= _ready(model, record)
