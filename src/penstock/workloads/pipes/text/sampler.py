"""How the next token is chosen: as llama.cpp does it for the spool, in the same order.

Penalties, then the `top_k` likeliest, of them those that make up `top_p`, of them those not below
`min_p` of the likeliest, then the temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from penstock.workloads.llm.values import LlmCode, LlmFailure, Sampling
from penstock.workloads.pipes.text.filters import Floats, candidates, penalised
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
