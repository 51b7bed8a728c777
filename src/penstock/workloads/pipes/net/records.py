"""What a node tells the others about itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from penstock.workloads.pipes.config import LayerRange


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
