"""Randomness that is looked up and not drawn in turn: the same place has the same noise."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.workloads.llm.values import GenerationRequest

_MASK = (1 << 64) - 1
_STEP, _ONE, _TWO = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Of splitmix64 (Steele, Lea and Flood 2014)."""
_SEEDS = (1 << 32) - 1
"""As in the spool, where the last one means a random one."""


def seed_of(ask: GenerationRequest, choice: int) -> int:
    """Each answer has a seed of its own, which follows from the first one's."""
    seed = ask.sampling.seed
    return secrets.randbits(64) if seed is None else (seed + choice % ask.n) % _SEEDS


def gumbel(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """For each token at this position a value of the standard Gumbel distribution."""
    start = _mixed(_mixed(seed & _MASK) + position * _STEP & _MASK)
    state = tokens.astype(np.uint64) * np.uint64(_STEP) + np.uint64(start)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(_ONE)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(_TWO)
    state ^= state >> np.uint64(31)
    uniform = ((state >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)))


def _mixed(state: int) -> int:
    state = (state + _STEP) & _MASK
    state = (state ^ (state >> 30)) * _ONE & _MASK
    state = (state ^ (state >> 27)) * _TWO & _MASK
    return state ^ (state >> 31)
