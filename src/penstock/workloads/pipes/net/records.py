"""What a node tells the others about itself, how it travels, and what is known of all nodes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.wire.messages import Counters, State, decode, encode


class SegmentState(StrEnum):
    LOADING = "loading"
    """Its weights are being read; no job can use it."""
    READY = "ready"


class SegmentRecord(Struct, frozen=True, kw_only=True):
    """A contiguous part of a model that a node holds."""

    model: str
    layers: LayerRange
    num_layers: int
    """Of the whole model."""
    fingerprints: tuple[str, ...] = ()
    """One for each layer, from the weights themselves; none before they are read."""
    state: SegmentState = SegmentState.LOADING
    loaded: int = 0
    """Layers that are read so far."""
    dtype: str = ""
    layer_ms: float = 0.0
    """What one token of one job takes in one layer."""

    @property
    def ready(self) -> bool:
        return self.state is SegmentState.READY

    def fingerprint(self, layer: int) -> str:
        """Of a layer of the model; empty if it is not known."""
        at = layer - self.layers.start
        return self.fingerprints[at] if 0 <= at < len(self.fingerprints) else ""


class NodeRecord(Struct, frozen=True, kw_only=True):
    """A node as it describes itself. The mesh fills in `boot`, `version`, `address` and `links`."""

    node_id: str
    boot: str = ""
    """Of the process: a later one has a higher."""
    version: int = 0
    """Rises with each change."""
    address: str = ""

    model: str = ""
    """The model it was started for."""
    num_layers: int = 0
    layer_bytes: int = 0
    """Memory that one layer of it takes here."""
    layer_ms: float = 0.0
    """As measured at the start, before any segment is held."""
    end_models: tuple[str, ...] = ()
    """Models whose jobs can begin here."""
    local_layers: int = 0
    """Of them, how many of the first layers are held beside the end model."""
    end_ms: float = 0.0
    """What one token takes in embedding, norm and head."""
    auto: bool = False
    """Whether the network decides which layers it holds."""
    room: int = 0
    """Layers that fit into it beside the end model and its local layers, held ones included."""
    assigned: LayerRange | None = None
    """What it was told to hold, from the moment it was told."""
    generation: int = 0
    """Of that word."""
    unfit: str = ""
    """Why it could not hold what it was told to; it is not planned with then."""
    segments: tuple[SegmentRecord, ...] = ()

    threads: int = 0
    context: int = 0
    """Tokens that one job may have there, prompt and answer together; 0 if it does not say."""
    memory: int = 0
    """Bytes that weights and caches may take."""
    weights: int = 0
    """Bytes that weights take."""
    cache_total: int = 0
    cache_used: int = 0
    cache_kept: int = 0
    jobs: int = 0
    waiting: int = 0
    """Jobs that wait for room."""
    tokens_per_s: float = 0.0
    busy: float = 0.0
    """Share of the time in which it computes, 0 to 1."""
    draining: bool = False
    """It is about to leave: what it has goes on, nothing new begins."""
    stalled: bool = False
    """Its pass takes far longer than its measured speed says: it is stuck, or overloaded. Nothing
    new begins there."""
    refused: dict[str, int] = {}
    """Things that were not taken, counted by reason."""
    links: dict[str, float] = {}
    """Milliseconds there and back, to each node it is connected to."""

    @property
    def usable(self) -> bool:
        """Whether new jobs may go there, and layers be planned for it."""
        return not (self.draining or self.stalled)

    def material(self) -> NodeRecord:
        """Itself without what is only a figure: the others are told of a change of this at once."""
        still = tuple(replace(s, layer_ms=0.0, loaded=0) for s in self.segments)
        return replace(self, version=0, segments=still, **_FIGURES)

    def of(self, model: str) -> tuple[SegmentRecord, ...]:
        """Its segments of a model, in the order of layers."""
        return tuple(sorted((s for s in self.segments if s.model == model), key=lambda s: s.layers))


_FIGURES = {
    "layer_ms": 0.0,
    "end_ms": 0.0,
    "weights": 0,
    "cache_used": 0,
    "cache_kept": 0,
    "jobs": 0,
    "waiting": 0,
    "tokens_per_s": 0.0,
    "busy": 0.0,
    "refused": {},
    "links": {},
}


def new_boot() -> str:
    """A name for this process: sorts after all that began earlier on this machine's clock."""
    return f"{time.time_ns() // 1000:016x}{os.urandom(4).hex()}"


def ranges_of(layers: Iterable[int]) -> tuple[LayerRange, ...]:
    """Layers as the fewest ranges."""
    found: list[LayerRange] = []
    for layer in sorted(set(layers)):
        if found and found[-1].end == layer:
            found[-1] = LayerRange(found[-1].start, layer + 1)
        else:
            found.append(LayerRange(layer, layer + 1))
    return tuple(found)


def written(ranges: Iterable[LayerRange]) -> str:
    """As people write them: "0-3, 7, 9-12"."""
    return ", ".join(str(r) if len(r) > 1 else str(r.start) for r in ranges)


class Table:
    """One record for each node: the newest. Pure; its user decides which records to trust."""

    def __init__(self, records: Iterable[NodeRecord] = ()) -> None:
        self._records: dict[str, NodeRecord] = {}
        for record in records:
            self.apply(record)

    def apply(self, record: NodeRecord) -> bool:
        """Take a record unless an equally new one is there; whether it was taken."""
        known = self._records.get(record.node_id)
        if known is not None and _age(record) <= _age(known):
            return False
        self._records[record.node_id] = record
        return True

    def lose(self, node_id: str, boot: str = "") -> NodeRecord | None:
        """Forget a node; with `boot`, only if it is that process. Gives what was known."""
        known = self._records.get(node_id)
        if known is None or (boot and known.boot != boot):
            return None
        return self._records.pop(node_id)

    def get(self, node_id: str) -> NodeRecord | None:
        return self._records.get(node_id)

    def live(self) -> tuple[NodeRecord, ...]:
        """All of them, by id."""
        return tuple(self._records[n] for n in sorted(self._records))

    def of(self, model: str) -> tuple[NodeRecord, ...]:
        """Those that have to do with a model: hold layers of it, or its ends, or were started
        for it."""
        return tuple(
            r for r in self.live() if model == r.model or model in r.end_models or r.of(model)
        )

    def models(self) -> tuple[str, ...]:
        names = {r.model for r in self._records.values() if r.model}
        for record in self._records.values():
            names.update(record.end_models)
            names.update(s.model for s in record.segments)
        return tuple(sorted(names))

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._records

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self.live())

    def __len__(self) -> int:
        return len(self._records)


def _age(record: NodeRecord) -> tuple[str, int]:
    return record.boot, record.version


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
