"""Which models can be asked: those that workers serve a topic for."""

from __future__ import annotations

from msgspec import Struct

from penstock.core.llm import topics_by_model
from penstock.ports.clock import Clock
from penstock.ports.desk import Desk

_FRESH = 1.0
"""Seconds for which a model that was there is taken to be there."""


class ServedModel(Struct, frozen=True):
    name: str
    topic: str
    since: float
    """When it was first seen."""
    paused: str = ""
    """Why it can't be asked at present."""


class Served:
    """Asks the Desk at most once a second, and whenever a model is asked for that it had not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, ServedModel] = {}
        self._until = float("-inf")

    async def find(self, desk: Desk, name: str) -> ServedModel | None:
        if self._clock.monotonic() >= self._until or name not in self._known:
            await self._look(desk)
        return self._known.get(name)

    async def list(self, desk: Desk) -> list[ServedModel]:
        """By name."""
        await self._look(desk)
        return list(self._known.values())

    async def _look(self, desk: Desk) -> None:
        served = topics_by_model(await desk.topics())
        paused = (await desk.status()).paused_topics
        now = self._clock.now()
        self._known = {
            name: ServedModel(name, topic, self._since(name, now), paused.get(topic, ""))
            for name, topic in sorted(served.items())
        }
        self._until = self._clock.monotonic() + _FRESH

    def _since(self, name: str, now: float) -> float:
        known = self._known.get(name)
        return now if known is None else known.since
