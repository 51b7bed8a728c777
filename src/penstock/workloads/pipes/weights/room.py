"""How much of a model fits into a machine."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workloads.pipes.model.shape import Shape, cache_bytes
from penstock.workloads.pipes.weights.memory import machine_memory as machine_memory
from penstock.workloads.pipes.weights.source import Source

_WEIGHT = {"float32": 4, "bfloat16": 2, "int8": 1}
_COMPUTED = {"float32": 4, "bfloat16": 2, "int8": 4}
_MOST_CACHE = 4 << 30


@dataclass(frozen=True)
class Room:
    """Bytes, but for `layers`."""

    memory: int
    """For weights and caches together."""
    layer: int
    """One layer's weights."""
    ends: int
    """What the ends take here; nothing where they are not held."""
    layers: int
    """How many fit, with a cache in which each can have one job at least."""

    def cache(self, weights: int) -> int:
        """What is left for caches beside this many bytes of weights: a quarter of it, as the rest
        is for the work itself and for others; at most 4 GiB."""
        return min(max(0, self.memory - weights) // 4, _MOST_CACHE)


def room(
    source: Source,
    shape: Shape,
    dtype: str,
    *,
    memory: int = 0,
    cache: int = 0,
    context: int = 4096,
    ends: bool = False,
) -> Room:
    """`memory` and `cache` as LpConfig has them: 0 is left to this place to choose."""
    memory = memory or machine_memory() * 3 // 4
    values = source.layer_values(0)  # as every other
    weight = values * _WEIGHT[dtype]
    held = ends_bytes(shape, dtype) if ends else 0
    left = memory - held - cache
    # While a layer is loaded it is there as float32 too, as stored or as made of it.
    left -= 2 * 4 * values
    # The least that a job needs of a layer, four times over: only a quarter is for caches.
    least = (
        0 if cache else 4 * min(context, shape.max_positions) * cache_bytes(shape, _COMPUTED[dtype])
    )
    fits = max(0, left) // (weight + least)
    return Room(memory, weight, held, min(fits, shape.num_layers))


def ends_bytes(shape: Shape, dtype: str) -> int:
    tables = 1 if shape.tied else 2
    table = shape.vocabulary * shape.hidden
    return tables * table * _WEIGHT[dtype] + shape.hidden * _COMPUTED[dtype]
