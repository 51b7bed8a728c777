"""Layers as people write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.workloads.pipes.config import AUTO, LayerRange

NONE = "none"
_RANGE = re.compile(r"(-?\d+)(?:\s*-\s*(-?\d+))?", re.ASCII)
_MOST = 100_000
"""Layers that no model has."""


def parse_layers(text: str) -> tuple[LayerRange, ...] | None:
    """`auto` (None), `none` (()), or `0-14,20-29` with the last one included, in order and each as
    long as it can be. Raises ValueError, saying what is wrong with which part."""
    said = text.strip()
    if said.lower() == AUTO:
        return None
    if said.lower() == NONE:
        return ()
    ranges = sorted(_range(part.strip()) for part in said.split(","))
    joined: list[LayerRange] = []
    for layers in ranges:
        if joined and layers.start < joined[-1].end:
            raise ValueError(f"{joined[-1]} and {layers} overlap")
        if joined and layers.start == joined[-1].end:
            joined[-1] = LayerRange(joined[-1].start, layers.end)
        else:
            joined.append(layers)
    return tuple(joined)


def check_within(ranges: Sequence[LayerRange], num_layers: int) -> None:
    """Raises ValueError for layers that a model does not have."""
    for layers in ranges:
        if layers.end > num_layers:
            raise ValueError(
                f"{layers} goes beyond the model: it has {num_layers} layers, 0 to {num_layers - 1}"
            )


def _range(part: str) -> LayerRange:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise ValueError(f"{part!r} is not a range of layers: write auto, none, or 0-14,20-29")
    first = int(found[1])
    last = first if found[2] is None else int(found[2])
    if first < 0 or last < 0:
        raise ValueError(f"{part!r}: layers are counted from 0")
    if last < first:
        raise ValueError(f"{part!r} is the wrong way round: write {last}-{first}")
    if last >= _MOST:
        raise ValueError(f"{part!r}: no model has so many layers")
    return LayerRange(first, last + 1)
