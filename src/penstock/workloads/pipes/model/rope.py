"""Positions as rotations, precomputed as complex numbers.

The two numbers that are turned together lie side by side here, not half a head apart as in
transformers: `interleave` reorders a layer's query and key weights once, when they are loaded.
Queries and keys are reordered alike, so that what attention makes of them is the same, and a
rotation is one multiplication of complex numbers.
"""

from __future__ import annotations

import math

import torch

from penstock.workloads.pipes.model.positions import Rope


def interleave(rows: torch.Tensor, head_dim: int, dims: int) -> torch.Tensor:
    """The rows (or elements) of heads with the first `dims` of each head reordered."""
    half = dims // 2
    order = torch.arange(head_dim)
    order[0:dims:2], order[1:dims:2] = torch.arange(half), torch.arange(half, dims)
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)


class RotaryTable:
    """The rotations of one Rope, for as many positions as were asked for so far."""

    def __init__(self, rope: Rope) -> None:
        self.dims = rope.dims
        self._frequencies, self._length = frequencies(rope)
        self._table = torch.empty(0, rope.dims // 2, dtype=torch.complex64)

    def upto(self, end: int) -> torch.Tensor:
        """For positions 0 to `end`, [at least end, dims / 2], of unit length but for scaling."""
        if end > len(self._table):
            size = max(256, 1 << (end - 1).bit_length())
            angles = torch.arange(size, dtype=torch.float32)[:, None] * self._frequencies
            self._table = torch.complex(angles.cos() * self._length, angles.sin() * self._length)
        return self._table


def frequencies(rope: Rope) -> tuple[torch.Tensor, float]:
    """Radians per position, [dims / 2], and what queries and keys are multiplied by besides."""
    told = dict(rope.scaling)
    plain = 1.0 / rope.theta ** (torch.arange(0, rope.dims, 2).float() / rope.dims)
    match rope.kind:
        case "linear":
            return plain / float(told["factor"]), 1.0
        case "llama3":
            return _llama3(plain, told), 1.0
        case "longrope":
            return plain / torch.tensor(told["short_factor"]), _longrope_length(told)
        case "yarn":
            return _yarn(plain, rope, told), _yarn_length(told)
        case _:
            return plain, 1.0


def _llama3(plain: torch.Tensor, told: dict[str, float]) -> torch.Tensor:
    factor, original = told["factor"], told["original_max_position_embeddings"]
    low, high = told["low_freq_factor"], told["high_freq_factor"]
    turns = original * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (share + (1 - share) / factor)


def _longrope_length(told: dict[str, float]) -> float:
    if "attention_factor" in told:
        return float(told["attention_factor"])
    factor = told.get("factor") or told["ratio"]
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(told["original_max_position_embeddings"]))


def _yarn(plain: torch.Tensor, rope: Rope, told: dict[str, float]) -> torch.Tensor:
    original = told["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        turns = math.log(original / (rotations * 2 * math.pi))
        return rope.dims * turns / (2 * math.log(rope.theta))

    low = dimension(told.get("beta_fast") or 32)
    high = dimension(told.get("beta_slow") or 1)
    if told.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    ramp = (torch.arange(rope.dims // 2).float() - low) / (max(high - low, 0.001))
    scaled = ramp.clamp(0, 1)
    return plain / told["factor"] * scaled + plain * (1 - scaled)


def _yarn_length(told: dict[str, float]) -> float:
    if "attention_factor" in told:
        return float(told["attention_factor"])

    def length(scale: float = 1.0) -> float:
        factor = told["factor"]
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = told.get("mscale"), told.get("mscale_all_dim")
    if both[0] and both[1]:
        return length(both[0]) / length(both[1])
    return length()
