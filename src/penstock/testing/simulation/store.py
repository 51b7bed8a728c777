"""A disk that can be slow, refuse, and outlive the engine that writes it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.adapters.memory.store import MemoryStore
from penstock.core.errors import StoreFailed
from penstock.core.transition import Answer, Change
from penstock.ports.clock import Clock
from penstock.testing.history import Committed, History


class FaultyStore(MemoryStore):
    """A MemoryStore that fails on demand and tells the history of every commit."""

    def __init__(self, clock: Clock, chance: random.Random, history: History) -> None:
        super().__init__()
        self._clock, self._chance, self._history = clock, chance, history
        self.failing = False
        self.slowness = 0.0
        """Seconds that a commit, and the answer after it, take at most."""

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        await self._dawdle()
        self._refuse()
        answers = await super().apply(changes)
        await self._dawdle()
        return answers

    async def remember(self, name: str, value: bytes) -> None:
        await self._dawdle()
        self._refuse()
        await super().remember(name, value)

    async def forget(self, name: str) -> bool:
        await self._dawdle()
        self._refuse()
        return await super().forget(name)

    def _keep(self, answer: Answer, moved: list[Answer]) -> None:
        super()._keep(answer, moved)
        self._history.events.extend(map(Committed, answer.transitions))

    async def _dawdle(self) -> None:
        if self.slowness:
            await self._clock.sleep(self.slowness * self._chance.random())

    def _refuse(self) -> None:
        if self.failing:
            raise StoreFailed("the simulated disk refuses")

    def crash(self) -> None:
        """Whoever listened is gone; what was committed stays."""
        self.listeners.clear()

    def close_history(self) -> None:
        """Write down what is held now."""
        self._history.records = dict(self._jobs)
        self._history.logs = {job_id: tuple(log) for job_id, log in self._logs.items()}
