"""How the next token is chosen: as llama.cpp does it for the spool, in the same order.

Penalties, then the `top_k` likeliest, of them those that make up `top_p`, of them those not below
`min_p` of the likeliest, then the temperature.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import asdict

from penstock.workloads.llm.values import GenerationRequest, LlmCode, LlmFailure, Sampling

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
_LEAST = -9999.0
"""For JSON, which has no infinity."""


class Logprobs(Struct, frozen=True):
    """Of a token that was chosen, in the model's own distribution: before penalties, filters and
    temperature."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, as many as were asked for."""


class Chosen(Struct, frozen=True):
    token: int
    logprobs: Logprobs | None = None


class AnswerConstraint(Protocol):
    """What an answer is held to."""

    def allowed(self, row: Floats) -> Floats:
        """A copy in which what may not come next is -inf."""

    def accept(self, token: int) -> None: ...

    def forget(self, count: int) -> None:
        """The last tokens were not said after all."""


class Sampler:
    """Of one answer. What it draws depends on the seed, the position and the logits alone: not on
    what is computed beside it, nor on what it drew before."""

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        logprobs: int | None = None,
        constraint: AnswerConstraint | None = None,
    ) -> None:
        self._how = how = completed(sampling)
        self._is_greedy = how.temperature == 0 or how.top_k == 1
        self._penalises = (
            how.repeat_penalty != 1 or how.presence_penalty != 0 or how.frequency_penalty != 0
        )
        self._seed, self._alternatives, self._constraint = seed, logprobs, constraint

    def choose(self, logits: Any, ids: Sequence[int]) -> Chosen:
        """The token that follows `ids` (prompt and answer so far); `logits` is a tensor of the
        vocabulary's size, in float32. Raises WRONG_COMPUTATION if they are no numbers."""
        raw: Floats = logits.numpy()
        row = penalised(raw, ids, self._how) if self._penalises else raw
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

    def forget(self, count: int) -> None:
        """The last tokens that were chosen were not said: they will be chosen again."""
        if self._constraint is not None:
            self._constraint.forget(count)

    def _drawn(self, row: Floats, likeliest: float, position: int) -> int:
        how: Any = self._how
        tokens, values = candidates(row, likeliest, how.top_k, how.top_p, how.min_p)
        # Noise of its own for each token, and the highest sum is taken (Gumbel's trick): a change
        # in the last bit of one token's logit leaves what the others were given as it was.
        drawn = values / how.temperature + gumbel(self._seed, position, tokens)
        return int(tokens[drawn.argmax()])


def completed(sampling: Sampling, *before: dict[str, Any]) -> Sampling:
    """With nothing left open: what is None is as in the last of `before` that says it, else as in
    llama.cpp."""
    known = asdict(DEFAULTS)
    for told in (*before, asdict(sampling)):
        known |= {name: value for name, value in told.items() if value is not None}
    return Sampling(**known)


def _logprobs(raw: Floats, token: int, count: int) -> Logprobs:
    highest = float(raw.max())
    total = highest + math.log(float(np.exp(raw - highest).sum(dtype=np.float64)))

    def told(which: int) -> float:
        return max(float(raw[which]) - total, _LEAST)

    if not count:
        return Logprobs(told(token))
    top = np.argpartition(raw, max(len(raw) - count, 0))[-count:].tolist()
    top.sort(key=lambda which: (-float(raw[which]), which))
    return Logprobs(told(token), tuple((which, told(which)) for which in top))


# -- which tokens may be drawn at all. Plain arrays in, plain arrays out ------------------

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


# -- randomness that is looked up, not drawn in turn: the same place has the same noise ----

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
