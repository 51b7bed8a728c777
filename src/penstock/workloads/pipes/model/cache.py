"""Keys and values of jobs: bounded by a budget, counted in blocks, kept for a next turn.

A job's room is promised when it comes in, in full if it said how long its answer may be: then it
does not stop half-way for want of it. Its memory is taken from the system page by page, as tokens
come. The event loop promises and the thread that computes gives back, so the books have a lock.

Beside them a job's cache remembers the hidden states that went to the next node, if there is room:
when that node is lost, they rebuild what it had, and nobody else computes again.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from msgspec import Struct

from penstock.workloads.llm.values import LlmCode, LlmFailure

if TYPE_CHECKING:
    from penstock.workloads.pipes.model.segment import SequenceCache


CPU = torch.device("cpu")


class CacheFull(Exception):
    """There is no room now; there will be when other jobs have ended."""


class Layout(Struct, frozen=True):
    """What a layer keeps of one token."""

    key_heads: int = 0
    key_size: int = 0
    value_heads: int = 0
    value_size: int = 0

    @property
    def values(self) -> int:
        return self.key_heads * self.key_size + self.value_heads * self.value_size


class JobCache:
    """One job's keys and values in the layers of one node."""

    def __init__(
        self, pool: KvPool, layers: Sequence[int], capacity: int, boundaries: Sequence[int] = ()
    ) -> None:
        self.layers = tuple(layers)
        self.boundaries = tuple(boundaries)
        """Layers before which hidden states leave for another node."""
        self.capacity = capacity
        """Tokens that there is room for."""
        self.filled = dict.fromkeys(self.layers, 0)
        """By layer: how many tokens' keys and values are there."""
        self.bytes = 0
        self.state_bytes = 0
        """Of these, for hidden states. With 0 none are remembered."""
        self.freed = False
        self._pool = pool
        self._data: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []
        """Layers of the same layout, with their keys and values, each
        [layers, heads, capacity, size]."""
        self._shape: tuple[tuple[int, ...], int] = ((), 0)
        """Layers and capacity of that memory."""
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}
        """By boundary: hidden states, [capacity, hidden], and how many from the first are there."""
        self._sequence: SequenceCache | None = None

    def views(self, first: int, end: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By layer: keys and values of these positions, each [heads, positions, size]."""
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layers, keys, values in self._memory():
            pairs = zip(
                keys[:, :, first:end].unbind(), values[:, :, first:end].unbind(), strict=True
            )
            found.update(zip(layers, pairs, strict=True))
        return found

    def sequence(self, make: Callable[[], SequenceCache]) -> SequenceCache:
        """For layers that compute one job at a time: the cache of transformers."""
        self._check()
        if self._sequence is None:
            self._sequence = make()
        return self._sequence

    @property
    def can_be_cut(self) -> bool:
        return self._sequence is None or self._sequence.can_be_cut

    def cut(self, start: int, end: int, position: int) -> None:
        """What layers have from this position on is not to be used any more."""
        for layer in range(start, end):
            if self.filled[layer] <= position:
                continue
            if self._sequence is not None:
                if not self._sequence.can_be_cut:
                    raise LlmFailure(
                        LlmCode.ENGINE_ERROR,
                        f"layer {layer} keeps a state, which can't be taken back to {position}",
                    )
                self._sequence.cut(layer, position)
            self.filled[layer] = position

    @property
    def tokens(self) -> int:
        """How many it has in all of its layers, and can hand over again if it remembers any."""
        counts = [self.filled[layer] for layer in self.layers]
        if self.state_bytes:
            counts += [self._sent[n][1] if n in self._sent else 0 for n in self.boundaries]
        return min(counts)

    def remember(self, layer: int, start: int, states: torch.Tensor) -> None:
        """These go to the node that has this layer."""
        sent, end = self._sent, start + len(states)
        if not self.state_bytes or layer not in self.boundaries:
            return
        room, count = sent.get(layer, (None, 0))
        if start > count:
            return
        if room is None or len(room) < end:
            grown = self._pool.room(self.capacity, states.shape[1], dtype=states.dtype)
            if room is not None:
                grown[:start] = room[:start]
            room = grown
        room[start:end] = states
        sent[layer] = room, end

    def remembered(self, layer: int, start: int, end: int) -> torch.Tensor | None:
        """What went to the node that has this layer, if all of it is known."""
        room, count = self._sent.get(layer, (None, 0))
        return room[start:end] if room is not None and end <= count else None

    @property
    def state_rows(self) -> int:
        return len({*self.boundaries, *self._sent}) * self.capacity

    def forget_states(self) -> int:
        """The bytes that this gives back."""
        size, self.state_bytes, self._sent = self.state_bytes, 0, {}
        self.bytes -= size
        return size

    def change_layers(self, layers: Sequence[int], boundaries: Sequence[int]) -> bool:
        """Go on with these layers, and with what it has of them; False if it can't."""
        if self.layers != tuple(layers):
            if self._sequence is not None:
                return False
            self.filled = {layer: self.filled.get(layer, 0) for layer in layers}
            self.layers = tuple(layers)
        self.boundaries = tuple(boundaries)
        return True

    def free(self) -> None:
        """Give everything back; a second time does nothing."""
        self._pool.free(self)

    def drop(self) -> None:
        """Its memory."""
        self.freed = True
        self._data, self._sent, self._sequence = [], {}, None

    def _check(self) -> None:
        if self.freed:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR, "the job has ended, and its cache was given back"
            )

    def _memory(self) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        self._check()
        if self._shape != (self.layers, self.capacity):
            old = {
                layer: kept
                for layers, *both in self._data
                for layer, *kept in zip(layers, *both, strict=True)
            }
            self._data = self._pool.memory(self.layers, self.capacity)
            for layers, *both in self._data:
                for layer, *new in zip(layers, *both, strict=True):
                    filled = self.filled[layer]
                    for one, other in zip(new, old.get(layer, ()), strict=False):
                        one[:, :filled] = other[:, :filled]
            self._shape = (self.layers, self.capacity)
        return self._data


class _CachedJob(Struct):
    cache: JobCache
    until: float


class KvPool:
    """`on_free` is told, in whatever thread, when there is more room than before."""

    def __init__(
        self,
        layouts: Mapping[int, Layout],
        positions: int,
        budget: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        block: int = 64,
        hidden: int = 0,
    ) -> None:
        """`layouts` are of layers that are here, and may change with them. Hidden states are
        remembered if their width is given."""
        self.total = budget
        self.used = 0
        """Bytes that are promised to jobs."""
        self.kept = 0
        """Bytes of caches that are kept for a next turn: they make way for a job."""
        self.on_free: Callable[[], None] = lambda: None
        self._layouts, self._positions = layouts, positions
        self._dtype, self._device, self._block = dtype, device, block
        self._hidden = hidden
        self._remembering: set[JobCache] = set()
        """Caches of jobs whose hidden states make way for another job."""
        self._kept: OrderedDict[bytes, _CachedJob] = OrderedDict()
        self._lock = threading.Lock()

    def reserve(
        self, layers: Sequence[int], tokens: int, boundaries: Sequence[int] = ()
    ) -> JobCache:
        """Raises CacheFull if it has to wait, and LlmFailure if waiting is of no use."""
        capacity = self._capacity(tokens)
        cache = JobCache(self, layers, capacity, boundaries)
        with self._lock:
            cache.bytes = self._take(self._bytes(cache.layers, capacity))
            self._remember(cache)
        return cache

    def keep(self, cache: JobCache, key: bytes, until: float) -> None:
        """A finished job's cache, for a later job with this key. What can't be cut back to where
        they part is of no use to it."""
        if not cache.can_be_cut:
            self.free(cache)
            return
        with self._lock:
            if cache.freed:
                return
            self._drop(key)
            self.used -= cache.bytes
            self.kept += cache.bytes
            self._kept[key] = _CachedJob(cache, until)
            self._remembering.discard(cache)
        self.on_free()

    def take(
        self, key: bytes, layers: Sequence[int], tokens: int, boundaries: Sequence[int] = ()
    ) -> JobCache | None:
        """The cache that was kept, with room for this many tokens in these layers; None if it is
        gone. Raises as `reserve` does, and the cache stays kept."""
        capacity = self._capacity(tokens)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            cache = kept.cache
            capacity = max(capacity, cache.capacity)
            del self._kept[key]
            self.kept -= cache.bytes
            try:
                size = self._take(self._bytes(layers, capacity))
            except BaseException:
                self.kept += cache.bytes
                self._kept[key] = kept
                raise
            if not cache.change_layers(layers, boundaries):
                self.used -= size
                cache.drop()
                return None
            remembers, cache.state_bytes = cache.state_bytes > 0, 0
            cache.bytes, cache.capacity = size, capacity
            if remembers:
                self._remember(cache)
            if not cache.state_bytes:
                cache.forget_states()
            return cache

    def forget(self, now: float) -> None:
        """Give up what was kept long enough."""
        with self._lock:
            gone = [key for key, kept in self._kept.items() if kept.until <= now]
            for key in gone:
                self._drop(key)
        if gone:
            self.on_free()

    def drop(self, key: bytes) -> None:
        with self._lock:
            dropped = self._drop(key)
        if dropped:
            self.on_free()

    def free(self, cache: JobCache) -> None:
        with self._lock:
            if cache.freed:
                return
            for key, kept in self._kept.items():
                if kept.cache is cache:
                    self._drop(key)
                    break
            else:
                cache.drop()
                self.used -= cache.bytes
                self._remembering.discard(cache)
        self.on_free()

    def memory(
        self, layers: Sequence[int], capacity: int
    ) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
        """Layers of the same layout, with room for their keys and values."""
        same: dict[Layout, list[int]] = {}
        for layer in layers:
            same.setdefault(self._layouts[layer], []).append(layer)
        return [
            (
                alike,
                self.room(len(alike), one.key_heads, capacity, one.key_size, device=self._device),
                self.room(
                    len(alike), one.value_heads, capacity, one.value_size, device=self._device
                ),
            )
            for one, alike in same.items()
        ]

    def room(
        self, *shape: int, dtype: torch.dtype | None = None, device: torch.device = CPU
    ) -> torch.Tensor:
        """On a CPU a page of it costs memory when it is first written to, and all of it goes back
        to the system with the last view."""
        dtype = dtype or self._dtype
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not size:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)

    def _remember(self, cache: JobCache) -> None:
        """Its hidden states too, if there is room that nobody uses."""
        size = cache.state_rows * self._hidden * self._dtype.itemsize
        if size and self.used + self.kept + size <= self.total:
            self.used += size
            cache.bytes += size
            cache.state_bytes = size
            self._remembering.add(cache)

    def _bytes(self, layers: Sequence[int], capacity: int) -> int:
        values = sum(self._layouts[layer].values for layer in layers)
        return int(values * capacity * self._dtype.itemsize)

    def _capacity(self, tokens: int) -> int:
        if tokens > self._positions:
            raise LlmFailure(
                LlmCode.CONTEXT_EXCEEDED,
                f"{tokens} tokens were asked for, and the model has {self._positions}",
                tokens=tokens,
                context=self._positions,
            )
        return max(1, -(-tokens // self._block)) * self._block

    def _take(self, size: int) -> int:
        """Count this many bytes as used, evicting hidden states and kept caches if necessary."""
        if size > self.total:
            raise LlmFailure(
                LlmCode.NO_ROOM,
                f"the job needs {size >> 20} MiB of cache, and there are {self.total >> 20}",
            )
        while self.used + size > self.total and self._remembering:
            self.used -= self._remembering.pop().forget_states()
        if self.used + size > self.total:
            raise CacheFull
        while self.used + self.kept + size > self.total:
            self._drop(next(iter(self._kept)))
        self.used += size
        return size

    def _drop(self, key: bytes) -> bool:
        kept = self._kept.pop(key, None)
        if kept is None:
            return False
        self.kept -= kept.cache.bytes
        kept.cache.drop()
        return True
