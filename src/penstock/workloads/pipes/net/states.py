"""Records on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from msgspec import Raw

from penstock.workloads.pipes.net.records import NodeRecord, SegmentRecord
from penstock.workloads.pipes.wire.counters import Counters
from penstock.workloads.pipes.wire.messages import State, decode, encode

BAD_RECORD = "bad_record"
MAX_LAYERS = 4096
"""Of a model; nobody plans for more because a record says so."""

MAX_RECORD = 256 << 10
"""Bytes of a record: fingerprints of the most layers, and what else there is. All records have to
fit into one frame for a joining node."""

_DECODER = msgspec.msgpack.Decoder(NodeRecord)
_ENCODER = msgspec.msgpack.Encoder()


def state_of(records: Iterable[NodeRecord]) -> bytes:
    return encode(State(tuple(Raw(_ENCODER.encode(record)) for record in records)))


def read_state(payload: memoryview, counters: Counters) -> list[NodeRecord]:
    """What can be believed of it; the rest is counted. Raises BadFrame if it is no STATE."""
    records = []
    for raw in decode(payload, State).records:
        try:
            if len(memoryview(raw)) > MAX_RECORD:
                raise msgspec.ValidationError("a record so large")
            record = _DECODER.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            counters.add(BAD_RECORD)
            continue
        if sound(record):
            records.append(record)
        else:
            counters.add(BAD_RECORD)
    return records


def sound(record: NodeRecord) -> bool:
    """Whether it makes sense in itself, so that the planner need not check."""
    figures = (record.layer_ms, record.end_ms, record.tokens_per_s, record.busy)
    counts = (
        *(record.version, record.local_layers, record.room),
        *(record.context, record.jobs, record.waiting),
    )
    held = record.assigned
    return (
        bool(record.node_id and record.boot)
        and 0 <= record.num_layers <= MAX_LAYERS
        and all(math.isfinite(f) and f >= 0 for f in (*figures, *record.links.values()))
        and all(c >= 0 for c in counts)
        and (held is None or 0 <= held.start < held.end <= MAX_LAYERS)
        and all(_sound_segment(segment) for segment in record.segments)
    )


def _sound_segment(segment: SegmentRecord) -> bool:
    layers = segment.layers
    return (
        0 <= layers.start < layers.end <= segment.num_layers <= MAX_LAYERS
        and (not segment.fingerprints or len(segment.fingerprints) == len(layers))
        and math.isfinite(segment.layer_ms)
        and segment.layer_ms >= 0
    )
