"""How the next token is chosen: as llama.cpp does it for the spool, in the same order.

Penalties, then the `top_k` likeliest, of them those that make up `top_p`, of them those not below
`min_p` of the likeliest, then the temperature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict

from penstock.core.llm import LlmCode, LlmFailure, Sampling
from penstock.workloads.pipes.text.noise import gumbel

DEFAULTS = Sampling(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    repeat_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
)
"""Of llama.cpp, where neither the job nor the model says more."""
LAST = 64
"""Tokens of prompt and answer that penalties look at."""
_FIRST_LOOK = 512
"""Tokens that nearly always make up any `top_p`: sorting all of them takes long."""
_LEAST = -9999.0
"""For JSON, which has no infinity."""

Floats = npt.NDArray[Any]


class Logprobs(Struct, frozen=True):
    """Of a token that was chosen, in the model's own distribution: before penalties, filters and
    temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, as many as were asked for."""


class Chosen(Struct, frozen=True):
    token: int
    logprobs: Logprobs | None = None


class Holding(Protocol):
    """What an answer is held to."""

    def allowed(self, row: Floats) -> Floats:
        """A copy in which what may not come next is -inf."""

    def accept(self, token: int) -> None: ...


class Sampler:
    """Of one answer. What it draws depends on the seed, the position and the logits alone: not on
    what is computed beside it, nor on what it drew before."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        logprobs: int | None = None,
        constraint: Holding | None = None,
    ) -> None:
        told = {name: value for name, value in asdict(sampling).items() if value is not None}
        self._how = how = Sampling(**{**asdict(DEFAULTS), **told})
        self._is_greedy = how.temperature == 0 or how.top_k == 1
        self._penalises = (
            how.repeat_penalty != 1 or how.presence_penalty != 0 or how.frequency_penalty != 0
        )
        self._seed, self._alternatives, self._constraint = seed, logprobs, constraint

    def choose(self, logits: Any, ids: Sequence[int]) -> Chosen:
        """The token that follows `ids` (prompt and answer so far); `logits` is a tensor of the
        vocabulary's size, in float32. Raises WRONG_COMPUTATION if they are no numbers."""
        raw: Floats = logits.numpy()
        row = self._penalised(raw, ids) if self._penalises else raw
        if self._constraint is not None:
            row = self._constraint.allowed(row)
        token = int(row.argmax())
        likeliest = float(row[token])
        if not math.isfinite(likeliest):
            raise LlmFailure(LlmCode.WRONG_COMPUTATION, f"the logits have {likeliest} among them")
        if not self._is_greedy:
            token = self._drawn(row, likeliest, len(ids))
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._alternatives is None:
            return Chosen(token)
        return Chosen(token, _logprobs(raw, token, self._alternatives))

    def _penalised(self, raw: Floats, ids: Sequence[int]) -> Floats:
        how = self._how
        seen = Counter(ids[-LAST:])
        tokens = np.fromiter(seen.keys(), np.int64, len(seen))
        counts = np.fromiter(seen.values(), np.float32, len(seen))
        row = raw.copy()
        values = row[tokens]
        repeat = np.float32(how.repeat_penalty)
        values = np.where(values <= 0, values * repeat, values / repeat)
        values -= counts * np.float32(how.frequency_penalty) + np.float32(how.presence_penalty)
        row[tokens] = values
        return row

    def _drawn(self, row: Floats, likeliest: float, position: int) -> int:
        kept, values = self._kept(row, likeliest)
        assert self._how.temperature is not None
        # Noise of its own for each token, and the highest sum is taken (Gumbel's trick): a change
        # in the last bit of one token's logit leaves what the others were given as it was.
        drawn = values / self._how.temperature + gumbel(self._seed, position, kept)
        return int(kept[drawn.argmax()])

    def _kept(self, row: Floats, likeliest: float) -> tuple[npt.NDArray[np.int64], Floats]:
        """The tokens to draw from, and how far each is from the likeliest."""
        how = self._how
        assert how.top_k is not None
        assert how.top_p is not None
        assert how.min_p is not None
        if 0 < how.top_k < len(row):
            kept = np.argpartition(row, len(row) - how.top_k)[len(row) - how.top_k :]
        else:
            kept = np.arange(len(row))
        values = row[kept].astype(np.float64) - likeliest
        if how.top_p < 1:
            total = float(np.exp(values).sum())
        if how.min_p > 0:
            # Before `top_p`, to sort less: both keep a beginning of the same order, so it is the
            # shorter of the two in any case.
            least = values >= math.log(how.min_p)
            kept, values = kept[least], values[least]
        if how.top_p < 1:
            first = _making_up(values, how.top_p * total)
            kept, values = kept[first], values[first]
        return kept, values


def _making_up(values: Floats, mass: float) -> npt.NDArray[np.int64]:
    """The fewest of the highest whose weights add up to `mass`; all if they don't."""
    count = len(values)
    if count > _FIRST_LOOK:
        look = np.argpartition(values, count - _FIRST_LOOK)[count - _FIRST_LOOK :]
        first = _making_up(values[look], mass)
        if len(first) < _FIRST_LOOK:
            return np.asarray(look[first])
    order = np.argsort(-values)
    enough = int(np.searchsorted(np.cumsum(np.exp(values[order])), mass)) + 1
    return np.asarray(order[:enough])


def _logprobs(raw: Floats, token: int, count: int) -> Logprobs:
    highest = float(raw.max())
    total = highest + math.log(float(np.exp(raw - highest).sum(dtype=np.float64)))

    def told(which: int) -> float:
        return max(float(raw[which]) - total, _LEAST)

    if not count:
        return Logprobs(told(token))
    highest_ones = np.argpartition(raw, max(len(raw) - count, 0))[-count:].tolist()
    highest_ones.sort(key=lambda which: (-float(raw[which]), which))
    return Logprobs(told(token), tuple((which, told(which)) for which in highest_ones))
