"""How much of a model fits into a machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.workloads.pipes.model.shape import Shape, cache_bytes
from penstock.workloads.pipes.weights.source import Source

_WEIGHT = {"float32": 4, "bfloat16": 2, "int8": 1}
_COMPUTED = {"float32": 4, "bfloat16": 2, "int8": 4}
_MOST_CACHE = 4 << 30
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Room:
    """Bytes, but for `layers`."""

    memory: int
    """For weights and caches together."""
    layer: int
    """The largest layer's weights."""
    ends: int
    """What the ends take here; nothing where they are not held."""
    layers: int
    """How many fit, with a cache in which each can have one job at least."""

    def cache(self, weights: int) -> int:
        """What is left for caches beside so many bytes of weights: a quarter of it, as the rest
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
    values = max(source.layer_values(n) for n in range(shape.num_layers))
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
    """The embedding is looked up in what is computed with, the head multiplied by as weights
    are; they are one where both are the same."""
    table = shape.vocabulary * shape.hidden
    embed = _COMPUTED[dtype] * (table + shape.hidden)
    shared = shape.tied and _COMPUTED[dtype] == _WEIGHT[dtype]
    return embed if shared else embed + _WEIGHT[dtype] * table


def machine_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """What this process can have at most: the machine's, or less if a container has less."""
    found = [_total(proc / "meminfo"), *_limits(proc / "self" / "cgroup", cgroups)]
    return min(size for size in found if size > 0)


def _total(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # no Linux
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib = next(line.split()[1] for line in lines if line.startswith("MemTotal:"))
    return int(kib) * 1024


def _limits(membership: Path, cgroups: Path) -> list[int]:
    """Of this process's group and of all above it; both versions of cgroups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += _upward(cgroups, group, "memory.max")
            found += _upward(cgroups / "unified", group, "memory.max")
        elif "memory" in controllers.split(","):
            found += _upward(cgroups / "memory", group, "memory.limit_in_bytes")
    return found


def _upward(root: Path, group: str, name: str) -> list[int]:
    parts = [part for part in group.split("/") if part not in ("", "..")]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [size for folder in folders if (size := _size(folder / name)) is not None]


def _size(file: Path) -> int | None:
    """None for no limit, which version 1 writes as a number no machine has."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < 1 << 60 else None
