"""Language models that workers serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from penstock.ports.clock import Clock
from penstock.ports.engine_api import EngineApi
from penstock.workloads.llm.values import topics_by_model

_FRESH = 1.0
"""Seconds for which a model's presence is cached."""


class ServedModel(Struct, frozen=True):
    name: str
    topic: str
    since: float
    """When it was first seen."""
    paused: str = ""
    """Why it can't be used at present."""
    facts: Mapping[str, Any] = {}
    """What its worker reports: `context`, `size`, `architecture` and so on."""


class Served:
    """Asks the EngineApi at most once a second, and for each model that was unknown."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, ServedModel] = {}
        self._until = float("-inf")

    async def find(self, api: EngineApi, name: str) -> ServedModel | None:
        if self._clock.monotonic() >= self._until or name not in self._known:
            await self._look(api)
        return self._known.get(name)

    async def list(self, api: EngineApi) -> list[ServedModel]:
        """By name."""
        await self._look(api)
        return list(self._known.values())

    async def _look(self, api: EngineApi) -> None:
        served = topics_by_model(await api.topics())
        status = await api.status()
        paused, facts = status.paused_topics, status.models
        now = self._clock.now()
        self._known = {
            name: ServedModel(
                name, topic, self._since(name, now), paused.get(topic, ""), facts.get(topic, {})
            )
            for name, topic in sorted(served.items())
        }
        self._until = self._clock.monotonic() + _FRESH

    def _since(self, name: str, now: float) -> float:
        known = self._known.get(name)
        return now if known is None else known.since
