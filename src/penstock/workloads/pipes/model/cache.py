"""Keys and values of jobs: bounded by a budget, counted in blocks, kept for a next turn.

A job's room is promised when it comes in, in full if it said how long its answer may be: then it
does not stop half-way for want of it. Its memory is taken from the system page by page, as tokens
come. The event loop promises and the thread that computes gives back, so the books have a lock.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from msgspec import Struct

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.model.shape import Shape, cache_bytes


class CacheFull(Exception):
    """There is no room now; there will be when other jobs have ended."""


class JobCache:
    """One job's keys and values in the layers of one node."""

    def __init__(self, pool: KvPool, layers: Sequence[int], capacity: int) -> None:
        self.layers = tuple(layers)
        self.capacity = capacity
        """Tokens that there is room for."""
        self.filled = dict.fromkeys(self.layers, 0)
        """By layer: how many tokens' keys and values are there."""
        self.bytes = 0
        self.freed = False
        self._pool = pool
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._data: torch.Tensor | None = None

    def views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [kv_heads, capacity, head_dim]."""
        keys, values = self.all(layer, layer + 1)[0]
        return keys, values

    def all(self, start: int, end: int) -> torch.Tensor:
        """Of layers that follow each other, [layers, 2, kv_heads, capacity, head_dim]."""
        if self.freed:
            raise LlmFailure(
                LlmCode.ENGINE_ERROR, "the job has ended, and its cache was given back"
            )
        first = self._index[start]
        if self.layers[first : first + end - start] != tuple(range(start, end)):
            raise KeyError(f"the job has no room for layers {start} to {end}")
        return self._memory()[first : first + end - start]

    def cut(self, start: int, end: int, position: int) -> None:
        """What layers have from this position on is not to be used any more."""
        for layer in range(start, end):
            if self.filled[layer] > position:
                self.filled[layer] = position

    def free(self) -> None:
        """Give everything back; a second time does nothing."""
        self._pool.free(self)

    def _memory(self) -> torch.Tensor:
        data = self._data
        if data is None or data.shape[3] < self.capacity:
            self._data = self._pool.memory(len(self.layers), self.capacity)
            if data is not None:
                filled = max(self.filled.values())
                self._data[:, :, :, :filled] = data[:, :, :, :filled]
        assert self._data is not None
        return self._data


class _CachedJob(Struct):
    cache: JobCache
    until: float


class KvPool:
    """`on_free` is told, in whatever thread, when there is more room than before."""

    def __init__(self, shape: Shape, budget: int, dtype: torch.dtype, block: int = 64) -> None:
        self.total = budget
        self.used = 0
        """Bytes that are promised to jobs."""
        self.kept = 0
        """Bytes of caches that are kept for a next turn: they make way for a job."""
        self.on_free: Callable[[], None] = lambda: None
        self._shape, self._dtype, self._block = shape, dtype, block
        self._token_bytes = cache_bytes(shape, dtype.itemsize)
        self._kept: OrderedDict[bytes, _CachedJob] = OrderedDict()
        self._lock = threading.Lock()

    def reserve(self, layers: Sequence[int], tokens: int) -> JobCache:
        """Raises CacheFull if it has to wait, and LlmFailure if waiting is of no use."""
        capacity = self._capacity(tokens)
        cache = JobCache(self, layers, capacity)
        with self._lock:
            cache.bytes = self._take(len(cache.layers) * capacity * self._token_bytes, 0)
        return cache

    def keep(self, cache: JobCache, key: bytes, until: float) -> None:
        """A finished job's cache, for a later job with this key."""
        with self._lock:
            if cache.freed:
                return
            self._drop(key)
            self.used -= cache.bytes
            self.kept += cache.bytes
            self._kept[key] = _CachedJob(cache, until)
        self.on_free()

    def take(self, key: bytes, layers: Sequence[int], tokens: int) -> JobCache | None:
        """The cache that was kept, with room for this many tokens; None if it is gone or has other
        layers. Raises as `reserve` does, and the cache stays kept."""
        capacity = self._capacity(tokens)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept.cache.layers != tuple(layers):
                return None
            cache = kept.cache
            capacity = max(capacity, cache.capacity)
            size = len(cache.layers) * capacity * self._token_bytes
            del self._kept[key]
            self.kept -= cache.bytes
            try:
                cache.bytes = self._take(size, cache.bytes)
            except BaseException:
                self.kept += cache.bytes
                self._kept[key] = kept
                raise
            cache.capacity = capacity
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
                self._give_back(cache)
                self.used -= cache.bytes
        self.on_free()

    def memory(self, layers: int, capacity: int) -> torch.Tensor:
        """[layers, 2, kv_heads, capacity, head_dim]; a page of it costs memory when it is first
        written to, and all of it goes back to the system with the last view."""
        shape = (layers, 2, self._shape.kv_heads, capacity, self._shape.head_dim)
        size = layers * capacity * self._token_bytes
        flat = torch.frombuffer(mmap.mmap(-1, size), dtype=self._dtype)
        return flat.view(shape)

    def _capacity(self, tokens: int) -> int:
        if tokens > self._shape.max_positions:
            raise LlmFailure(
                LlmCode.CONTEXT_EXCEEDED,
                f"{tokens} tokens were asked for, and the model has {self._shape.max_positions}",
                tokens=tokens,
                context=self._shape.max_positions,
            )
        return max(1, -(-tokens // self._block)) * self._block

    def _take(self, size: int, had: int) -> int:
        """Count this many bytes as used, evicting kept caches if necessary."""
        if size > self.total:
            raise LlmFailure(
                LlmCode.NO_ROOM,
                f"the job needs {size >> 20} MiB of cache, and there are {self.total >> 20}",
            )
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
        self._give_back(kept.cache)
        return True

    @staticmethod
    def _give_back(cache: JobCache) -> None:
        cache.freed = True
        cache._data = None
