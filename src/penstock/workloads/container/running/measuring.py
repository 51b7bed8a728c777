"""What a container used, looked at while it runs and once more after its end.

Some engines can tell only of a running container, some keep the most memory it ever had; of
all that was seen the most counts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from penstock.ports.clock import Clock
from penstock.workloads.container.engine import ContainerEngine, EngineError
from penstock.workloads.container.job import Usage
from penstock.workloads.container.running.patience import Late, within

_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between looks; the last again and again."""
_ANSWER = 5.0

N = TypeVar("N", int, float)


class Meter:
    def __init__(self, engine: ContainerEngine, clock: Clock, name: str) -> None:
        self._engine, self._clock, self._name = engine, clock, name
        self.usage = Usage()

    async def keep_looking(self) -> None:
        """Until it is cancelled."""
        for pause in _PAUSES:
            await self._clock.sleep(pause)
            await self.look()
        while True:
            await self._clock.sleep(_PAUSES[-1])
            await self.look()

    async def look(self) -> None:
        """An engine that does not say is not waited for, and no reason to fail."""
        with suppress(EngineError, Late):
            seen = await within(self._clock, _ANSWER, self._engine.usage(self._name))
            self.usage = Usage(
                _most(self.usage.peak_memory_bytes, seen.peak_memory_bytes),
                _most(self.usage.cpu_seconds, seen.cpu_seconds),
            )


def _most(one: N | None, other: N | None) -> N | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)
