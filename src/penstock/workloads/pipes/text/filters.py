"""Which tokens may be drawn at all. Plain arrays in, plain arrays out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.workloads.llm.values import Sampling

LAST = 64
"""Tokens of prompt and answer that penalties look at."""
_FIRST_LOOK = 512
"""Tokens that nearly always make up any `top_p`: sorting all of them takes long."""

Floats = npt.NDArray[Any]
Tokens = npt.NDArray[np.intp]


def penalised(raw: Floats, ids: Sequence[int], how: Sampling) -> Floats:
    """A copy in which the tokens among the last of `ids` are less likely."""
    seen = Counter(ids[-LAST:])
    tokens = np.fromiter(seen.keys(), np.intp, len(seen))
    counts = np.fromiter(seen.values(), np.float32, len(seen))
    row = raw.copy()
    values, repeat = row[tokens], np.float32(how.repeat_penalty)
    values = np.where(values <= 0, values * repeat, values / repeat)
    values -= counts * np.float32(how.frequency_penalty) + np.float32(how.presence_penalty)
    row[tokens] = values
    return row


def candidates(
    row: Floats, likeliest: float, top_k: int, top_p: float, min_p: float
) -> tuple[Tokens, Floats]:
    """The tokens to draw from, in no order, and how far the logit of each is below `likeliest`,
    which is the highest."""
    tokens = _highest(row, top_k) if top_k else np.arange(len(row))
    values = row[tokens].astype(np.float64) - likeliest
    mass = top_p * float(np.exp(values).sum()) if top_p < 1 else math.inf
    if min_p > 0:
        # Before `top_p`, to sort less: both keep a beginning of the same order, so that it is the
        # shorter of the two in any case.
        enough = values >= math.log(min_p)
        tokens, values = tokens[enough], values[enough]
    if top_p < 1:
        first = _making_up(values, mass)
        tokens, values = tokens[first], values[first]
    return tokens, values


def _highest(row: Floats, count: int) -> Tokens:
    others = max(len(row) - count, 0)
    return np.argpartition(row, others)[others:] if others else np.arange(len(row))


def _making_up(values: Floats, mass: float) -> Tokens:
    """The fewest of the highest whose weights add up to `mass`; all if they don't."""
    if len(values) > _FIRST_LOOK:
        look = _highest(values, _FIRST_LOOK)
        first = _making_up(values[look], mass)
        if len(first) < _FIRST_LOOK:
            return np.asarray(look[first])
    order = np.argsort(-values)
    enough = int(np.searchsorted(np.cumsum(np.exp(values[order])), mass)) + 1
    return np.asarray(order[:enough])
