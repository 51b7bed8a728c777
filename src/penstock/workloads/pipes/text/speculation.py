"""Speculative decoding by lookup: several tokens in one round trip, and the same text.

What followed the last tokens when they came before (in the prompt or in the answer) is proposed,
and computed along with the newest token. The sampler chooses from the model's logits as ever: a
proposed token is accepted where it is the one that was chosen.

Whether that pays is measured: how long steps of each size take, and how often a proposal is right.
The latter costs nothing, as plain steps can be compared with what would have been proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

SIZES = (2, 7, 15)
"""How many tokens may be proposed in one step. Three in all cost a CPU hardly more than one."""
_LENGTHS = (4, 2)
"""Of what is looked up, the longer first."""
_GAIN = 1.05
"""How much faster a step with proposals has to be."""
_WEIGHT = 0.1
"""Of the newest proposal in the share that was right."""
_OLD = 128
"""Steps after which a time is measured anew."""


class Lookup:
    """What followed the same tokens last time."""

    def __init__(self, ends: Collection[int] = ()) -> None:
        self._ends = ends
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def __call__(self, ids: Sequence[int], most: int) -> list[int]:
        """At most so many tokens; none that ends an answer."""
        self._learn(ids)
        for length in _LENGTHS:
            at = self._after.get(tuple(ids[-length:]), len(ids))
            if at < len(ids):
                return self._from(ids, at, most)
        return []

    def _learn(self, ids: Sequence[int]) -> None:
        if len(ids) < self._known:  # some were taken back
            self._after, self._known = {}, 0
        for at in range(self._known, len(ids)):
            for length in _LENGTHS:
                if length <= at:
                    self._after[tuple(ids[at - length : at])] = at
        self._known = len(ids)

    def _from(self, ids: Sequence[int], at: int, most: int) -> list[int]:
        found: list[int] = []
        for place in range(at, at + most):
            # Beyond the end it goes on with itself: what is said over and over.
            token = ids[place] if place < len(ids) else found[place - len(ids)]
            if token in self._ends:
                break
            found.append(token)
        return found


class StepTimes:
    """How long steps take with so many tokens proposed, for all jobs of an origin."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[float, int]] = {}
        """By size: seconds, and the number of the step that they are of."""
        self._steps = 0

    def add(self, size: int, seconds: float) -> None:
        self._steps += 1
        before = self.of(size)
        if before is not None:
            seconds = before + 0.2 * (min(seconds, 2 * before) - before)
        self._seconds[size] = (seconds, self._steps)

    def of(self, size: int) -> float | None:
        """None if that has to be found out."""
        seconds, step = self._seconds.get(size, (0.0, -_OLD))
        return seconds if self._steps - step < _OLD else None


class Speculation:
    """Of one answer."""

    def __init__(
        self,
        times: StepTimes,
        lookup: Lookup,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._times, self._lookup, self._clock = times, lookup, clock
        self._share = 0.5
        """Of proposals that were right, lately."""
        self._expected: list[int] = []
        self._size = 0
        self._began = 0.0

    def propose(self, ids: Sequence[int], most: int) -> list[int]:
        """What is to be computed along with the last of `ids`. A step begins."""
        self._expected = self._lookup(ids, max(1, min(most, SIZES[-1])))
        self._size = self._best(min(most, len(self._expected)))
        self._began = self._clock()
        return self._expected[: self._size]

    def compare(self, chosen: Sequence[int]) -> None:
        """The step is over, with these tokens: all that was right, and one more."""
        if not self._began:
            return  # the first token: its step was the prompt's
        self._times.add(self._size, self._clock() - self._began)
        for token, expected in zip(chosen, self._expected, strict=False):
            self._share += _WEIGHT * ((token == expected) - self._share)

    def _best(self, most: int) -> int:
        """The size with most tokens in a second."""
        seconds = self._times.of(0)
        if seconds is None:
            return 0
        best, rate = 0, _GAIN / seconds
        before, token = 0, 0.0
        for size in SIZES:
            if size > most:
                break
            known = self._times.of(size)
            # One that was not tried should cost as much a token as those before it.
            took = known or seconds + token * (size - before)
            before, seconds, token = size, took, max(0.0, (took - seconds) / (size - before))
            tokens = sum(self._share**n for n in range(size + 1))
            if tokens / seconds > rate:
                best, rate = size, tokens / seconds
            if known is None:
                break
        return best
