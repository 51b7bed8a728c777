"""How much of a model fits into a machine, or into a device of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.workloads.pipes.model.architecture import Architecture
from penstock.workloads.pipes.model.cache import CPU
from penstock.workloads.pipes.model.linear import COMPUTE
from penstock.workloads.pipes.weights.memory import machine_memory as machine_memory

_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
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
    architecture: Architecture,
    dtype: str,
    *,
    device: torch.device = CPU,
    memory: int = 0,
    cache: int = 0,
    context: int = 4096,
    ends: bool = False,
) -> Room:
    """`memory` and `cache` as LpConfig has them: 0 is left to this place to choose."""
    memory = memory or device_memory(device) * 3 // 4
    values = max(architecture.layer_values)
    weight = values * _WEIGHT[dtype]
    held = architecture.end_values * _WEIGHT[dtype] if ends else 0
    left = memory - held - cache
    # While a layer is loaded it is there as float32 too, as stored or as made of it.
    left -= 2 * 4 * values
    # The least that a job needs of a layer, four times over: only a quarter is for caches.
    tokens = 0 if cache else min(context, architecture.max_positions)
    least = 4 * tokens * architecture.cache_values * COMPUTE[dtype].itemsize
    fits = max(0, left) // (weight + least)
    return Room(memory, weight, held, min(fits, architecture.num_layers))


def device_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory()
