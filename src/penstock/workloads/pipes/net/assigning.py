"""Which layers the auto nodes hold: decided by one of the origins, followed by the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.mesh import Mesh
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.placement import Member, Plan, plan
from penstock.workloads.pipes.wire.messages import Assign, Kind, decode, encode

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


log = logging.getLogger(__name__)

SETTLE = 0.3
"""Seconds without a change before anything is decided: nodes often come several at a time."""
AGAIN, RARELY = 5.0, 300.0
"""Seconds after which a word that was not followed is said again, the first time and at most: who
hears it may follow another node for good."""
UNFIT = 60.0
"""Seconds for which a node that could not hold its layers is not planned with."""
REFUSED = "foreign_assign"


class Assigning:
    """Both sides of it: every node may come to be the one that decides."""

    def __init__(self, mesh: Mesh, node_id: str, model: str) -> None:
        self.shortage = ""
        """What is missing for every layer to be somewhere; on the node that decides."""
        self._mesh, self._node_id, self._model = mesh, node_id, model
        self._assigned: LayerRange | None = None
        self._generation = 0
        self._unfit = ""
        self._on_assigned: list[Callable[[LayerRange | None], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due: dict[str, LayerRange] = {}
        """What was said last, and to whom."""
        self._again = AGAIN
        mesh.on(Kind.ASSIGN, self._assign)
        mesh.on_change.append(lambda: self._decide_in(SETTLE))

    def on_assigned(self, callback: Callable[[LayerRange | None], None]) -> None:
        """When other layers than before are to be held here."""
        self._on_assigned.append(callback)

    def record_fields(self) -> dict[str, Any]:
        """What belongs into this node's record."""
        return {
            "assigned": self._assigned,
            "generation": self._generation,
            "unfit": self._unfit,
        }

    def gave_up(self, reason: str) -> None:
        """The layers could not be held. The node is left out for a while."""
        self._assigned, self._unfit = None, reason
        self._publish()
        asyncio.get_running_loop().call_later(UNFIT, self._fit_again)

    def _fit_again(self) -> None:
        self._unfit = ""
        self._publish()

    # -- the node that follows ------------------------------------------------------------

    def _assign(self, sender: str, payload: memoryview) -> None:
        assign = decode(payload, Assign)
        own = self._own()
        if own is None:
            return
        reason = refusal(assign, sender, own, self._mesh.table)
        if reason:
            log.warning("not followed: %s", reason)
            self._mesh.counters.add(REFUSED)
            return
        before, self._assigned = self._assigned, LayerRange(assign.start, assign.end)
        self._generation = assign.generation
        self._publish()
        if self._assigned != before:
            log.info("%s is to hold layers %s of %s", self._node_id, self._assigned, self._model)
            for callback in self._on_assigned:
                callback(self._assigned)

    def _publish(self) -> None:
        own = self._own()
        if own is not None and not self._mesh.stopped:
            self._mesh.publish(replace(own, **self.record_fields()))

    def _own(self) -> NodeRecord | None:
        return self._mesh.table.get(self._node_id)

    # -- the node that decides --------------------------------------------------------------

    def _decide_in(self, seconds: float) -> None:
        """Not before what came last has settled; but what goes on and on is not waited for."""
        if self._mesh.stopped:
            return
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._decide)

    def _decide(self) -> None:
        self._timer = None
        records, own = self._mesh.table.live(), self._own()
        if self._mesh.stopped or own is None or not own.num_layers:
            return
        if coordinator(self._model, records) != self._node_id:
            self.shortage = ""
            return
        plan = planned(self._model, own.num_layers, records, self._node_id)
        # Where nobody leaves it to the network, whoever has the missing layers is still to come.
        if plan.missing and plan.reason != self.shortage and any(r.auto for r in records):
            log.warning("%s: %s", self._model, plan.reason)
        self.shortage = plan.reason if plan.missing else ""
        due = steps(self._model, own.num_layers, records, plan.ranges)
        self._again = min(2 * self._again, RARELY) if due == self._due else AGAIN
        self._due = due
        if not due:
            return
        known = {r.node_id: r.generation for r in records}
        for node_id, layers in due.items():
            # After what this one has heard: what others say that they have heard is no matter.
            generation = 1 + known[node_id]
            word = Assign(self._model, layers.start, layers.end, self._node_id, generation)
            self._mesh.send(node_id, Kind.ASSIGN, encode(word))
        # A word may be lost, or come to a node that does not know yet who decides.
        self._decide_in(self._again)
