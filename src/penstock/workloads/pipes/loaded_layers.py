"""The layers that a node holds, and how they come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import Hop, Job
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.model.architecture import Architecture
from penstock.workloads.pipes.model.cache import KvPool, Layout
from penstock.workloads.pipes.model.linear import COMPUTE
from penstock.workloads.pipes.net.records import SegmentRecord, SegmentState, ranges_of
from penstock.workloads.pipes.weights.memory import give_back

if TYPE_CHECKING:
    from penstock.workloads.pipes.model.segment import Segment
    from penstock.workloads.pipes.weights.source import Source

LayerProgress = Callable[[int, int], None]
"""Layers that are read, and of how many."""
_TIMED = 3


class LoadingStopped(Exception):
    """Nobody waits for these layers any more."""


class LoadedLayers:
    """Layers that stay are reused. New ones are loaded before others are dropped, so that a route
    over this node stays complete; but if both do not fit into `room` layers, the others are
    dropped first.

    Jobs that go over a segment keep it alive by themselves, so `release` is called with the layers
    that are dropped: it returns when no job uses them.
    """

    def __init__(
        self,
        model: str,
        source: Source,
        architecture: Architecture,
        dtype: str,
        device: torch.device,
        changed: Callable[[], None],
        room: int,
        release: Callable[[Collection[int]], Awaitable[None]],
    ) -> None:
        self._model, self._source, self._architecture = model, source, architecture
        self._dtype, self._device = dtype, device
        self._changed, self._room, self._release = changed, room, release
        self._turn = asyncio.Lock()
        self._loading: dict[LayerRange, int] = {}
        self._layer_ms: dict[int, float] = {}
        """By layer."""
        self.segments: tuple[LlmModel, ...] = ()
        self.layouts: dict[int, Layout] = {}
        """By layer: what it keeps of a token, of all that were ever held."""

    @property
    def layer_ms(self) -> float:
        """What a token takes in a layer, as measured; 0 before anything is held."""
        return max(self._layer_ms.values(), default=0.0)

    @property
    def weight_bytes(self) -> int:
        return sum(segment.weight_bytes for segment in self.segments)

    async def hold(
        self, ranges: Sequence[LayerRange], on_progress: LayerProgress | None = None
    ) -> None:
        """Exactly these. Raises LlmFailure, and then holds what it held before, without what it
        dropped to make room."""
        async with self._turn:
            held, wanted = layers_of(s.layers for s in self.segments), layers_of(ranges)
            if len(held | wanted) > max(self._room, len(wanted)):
                self._show(ranges_of(held & wanted), self.segments)
                await self._release(held - wanted)
                await asyncio.to_thread(give_back)
            parts = list(self.segments)
            try:
                for layers in ranges_of(wanted - held):
                    parts.append(await self._load(layers, on_progress))
            finally:
                self._loading.clear()
            self._show(ranges, parts)

    def _show(self, ranges: Sequence[LayerRange], parts: Sequence[LlmModel]) -> None:
        """Hold these layers, all of which are in the parts, and no others."""
        same = {part.layers: part for part in parts}
        self.segments = tuple(
            same.get(layers) or LlmModel.joined(parts, layers) for layers in sorted(set(ranges))
        )
        held = layers_of(ranges)
        self._layer_ms = {n: ms for n, ms in self._layer_ms.items() if n in held}
        self._changed()

    def records(self) -> tuple[SegmentRecord, ...]:
        ready = [
            SegmentRecord(
                model=self._model,
                layers=segment.layers,
                num_layers=self._architecture.num_layers,
                fingerprints=segment.fingerprints,
                state=SegmentState.READY,
                loaded=len(segment.layers),
                dtype=self._dtype,
                layer_ms=max(self._layer_ms[n] for n in layers_of([segment.layers])),
            )
            for segment in self.segments
        ]
        coming = [
            SegmentRecord(
                model=self._model,
                layers=layers,
                num_layers=self._architecture.num_layers,
                loaded=loaded,
                dtype=self._dtype,
            )
            for layers, loaded in self._loading.items()
        ]
        return (*ready, *coming)

    async def _load(self, layers: LayerRange, on_progress: LayerProgress | None) -> LlmModel:
        loop = asyncio.get_running_loop()
        self._loading[layers] = 0
        self._changed()
        stopped = threading.Event()

        def read(count: int, of: int) -> None:
            if stopped.is_set():
                raise LoadingStopped
            self._loading[layers] = count
            loop.call_soon_threadsafe(self._changed)
            if on_progress is not None:
                on_progress(count, of)

        def load() -> tuple[LlmModel, float]:
            model = LlmModel.load(
                self._architecture, self._source, layers, self._dtype, self._device, read
            )
            return model, timed(model)

        try:
            model, ms = await asyncio.to_thread(load)
        finally:
            stopped.set()  # a thread can't be cancelled: it ends after the layer that it reads
        self._layer_ms.update(dict.fromkeys(layers_of([layers]), ms))
        self.layouts.update(model.layouts)
        del self._loading[layers]
        return model


def layers_of(ranges: Iterable[LayerRange]) -> set[int]:
    return {layer for one in ranges for layer in range(one.start, one.end)}


def timed(model: LlmModel) -> float:
    """Milliseconds that one token takes in one layer: the best of a few, the first one warms up."""
    layers, segment = model.layers, model.segment
    dtype = COMPUTE[segment.dtype]
    pool = KvPool(model.layouts, _TIMED + 1, 1 << 50, dtype, segment.device)
    cache = pool.reserve(range(layers.start, layers.end), _TIMED + 1)
    best = float("inf")
    for position in range(_TIMED + 1):
        job = Job(
            b"", "", "", "", hops=(Hop("", layers.start, layers.end),), start=position, count=1
        )
        job.current_layer, job.cache = layers.start, cache
        job.data = torch.ones(1, segment.architecture.hidden, dtype=dtype)
        began = time.perf_counter()
        model.process_jobs([job], layers.end)
        if position:
            best = min(best, time.perf_counter() - began)
    cache.free()
    return best / len(layers) * 1000


def timed_ends(ends: Segment) -> float:
    """The same for embedding, norm and head."""
    best = float("inf")
    for turn in range(_TIMED + 1):
        began = time.perf_counter()
        with torch.inference_mode():
            ends.head(ends.norm(ends.embed([0], [0]), [0]))
        if turn:
            best = min(best, time.perf_counter() - began)
    return best * 1000
