"""How a config says that positions become angles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

KINDS = ("default", "linear", "yarn", "longrope", "llama3")
_SAID = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


class Rope(Struct, frozen=True):
    """How positions are turned into angles."""

    theta: float
    dims: int
    """Of each head, how many of the first are turned; even."""
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()
    """What the kind needs, by name."""
    max_positions: int = 0


def rope_of(config: Mapping[str, Any], layers: str, head_dim: int) -> Rope:
    """Of layers of a kind (`full_attention`, `sliding_attention`); the config has its family's
    defaults filled in. transformers has written this in three ways over time: all are read."""
    told = _told(config, layers)
    kind = str(told.get("rope_type") or told.get("type") or "default")
    part = told.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    positions = int(config["max_position_embeddings"])
    original = int(
        told.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or positions
    )
    scaling = {**told, "original_max_position_embeddings": original}
    if kind in ("su", "longrope"):
        # What it has for longer texts would change what was computed before: not with a cache.
        kind, scaling["ratio"], positions = "longrope", positions / original, original
    if kind == "dynamic":
        kind = "default"  # it scales only what is longer than the model was made for
    return Rope(
        theta=float(told["rope_theta"]),
        dims=int(head_dim * float(part)),
        kind=kind,
        scaling=() if kind == "default" else _needed(scaling),
        max_positions=positions,
    )


def _told(config: Mapping[str, Any], layers: str) -> Mapping[str, Any]:
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in told or layers in told:
        told = told.get(layers) or {}
    if told.get("rope_theta") is not None:
        return dict(told)
    if layers == "sliding_attention" and "rope_local_base_freq" in config:
        # Where there are two, what is scaled are the layers that look far.
        return {"rope_theta": config["rope_local_base_freq"]}
    return {**told, "rope_theta": config["rope_theta"]}


def _needed(scaling: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in sorted(scaling.items())
        if value is not None and key not in _SAID
    )
