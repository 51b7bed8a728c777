"""How the loops of the control plane use a store that may fail.

A failure of the store is waited out, for reads as for writes: a loop that ends because of one
would leave a half-dead engine. A change that can never be written is left out, so that one
job can't hold up all others.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

from penstock.control.ledger import Ledger
from penstock.core.errors import StoreFailed, Unavailable
from penstock.core.job import Job
from penstock.core.ledger import Answer, BulkAnswer, BulkMove, Change, ChangeOutcome
from penstock.ports.clock import Clock, backoff

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 4.0
"""Seconds between tries; each pause is twice the one before."""


class Retry:
    """Asks a store again, with back-off, for as long as it fails."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.trouble = ""
        """Why the call that is under way can't succeed at the moment."""

    async def __call__(self, what: str, ask: Callable[[], Awaitable[T]]) -> T:
        """The answer of `ask`, however often it raises StoreFailed before that."""
        pauses: Iterator[float] | None = None
        while True:
            try:
                answer = await ask()
            except StoreFailed as error:
                pauses = pauses or backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
                pause = next(pauses)
                self.trouble = str(error)
                log.error("can't %s: %s; trying again in %g s", what, error, pause)
                await self._clock.sleep(pause)
            else:
                self.trouble = ""
                return answer


class RetryingStore:
    """The part of a Ledger that the scheduler needs; each call waits until it succeeds."""

    def __init__(self, store: Ledger, clock: Clock) -> None:
        self._store = store
        self.retry = Retry(clock)

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        what = f"commit {len(changes)} changes"
        return await self.retry(what, lambda: self._store.apply(changes))

    async def commit(
        self, changes: Sequence[Change], bulk: Sequence[BulkMove]
    ) -> tuple[list[Answer], list[BulkAnswer]]:
        what = f"commit {len(changes) + len(bulk)} changes"
        return await self.retry(what, lambda: self._store.commit(changes, bulk, patient=True))

    async def get(self, job_id: str) -> Job | None:
        return await self.retry(f"read job {job_id}", lambda: self._store.get(job_id))

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        return await self.retry(f"read {len(seqs)} jobs", lambda: self._store.fetch(seqs))

    async def recall(self, name: str) -> bytes | None:
        return await self.retry(f"read {name!r}", lambda: self._store.recall(name))


Apply = Callable[[Sequence[Change]], Awaitable[list[Answer]]]


async def apply_storable(apply: Apply, changes: Sequence[Change]) -> list[Answer]:
    """Apply what can be stored. A change that can't be is REFUSED; its answer has no job."""
    try:
        return await apply(changes)
    except Unavailable:
        raise
    except Exception as error:
        if len(changes) > 1:
            half = len(changes) // 2
            first = await apply_storable(apply, changes[:half])
            return first + await apply_storable(apply, changes[half:])
        log.exception("leaving out a change that can't be stored: %r", changes[0])
        return [Answer(ChangeOutcome.REFUSED, None, why=f"it can't be stored: {error}")]
