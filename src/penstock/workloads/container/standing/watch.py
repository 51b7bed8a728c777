"""Whether the engine answers: asked every few seconds, and at once when there is doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.ports.clock import Clock
from penstock.workloads.container.engine import Engine, EngineError, EngineFacts
from penstock.workloads.container.running.patience import Late, done_within, drop, within

EVERY = 5.0
_PATIENCE = 10.0
"""Seconds after which an engine that says nothing counts as gone."""


class EngineWatch:
    def __init__(self, engine: Engine, clock: Clock, looked: Callable[[], None]) -> None:
        """`looked` is called after every look."""
        self._engine, self._clock, self._looked = engine, clock, looked
        self._doubt = asyncio.Event()
        self._since = clock.monotonic()
        self.facts: EngineFacts | None = None
        """What it said last; None until it has answered once."""
        self.error = "it has not been asked yet"
        """What it said instead of answering; empty while it answers."""

    @property
    def reachable(self) -> bool:
        return not self.error

    @property
    def problem(self) -> str:
        """In a sentence; empty while it answers."""
        if self.reachable:
            return ""
        seconds = self._clock.monotonic() - self._since
        return f"the engine does not answer since {seconds:.0f} s: {self.error}"

    def doubt(self) -> None:
        """Something failed that may be the engine's fault: look now."""
        self._doubt.set()

    def failed(self, error: str) -> None:
        """It did not answer just now: so it counts as gone until it does."""
        self._note(error)
        self.doubt()

    async def look(self) -> None:
        try:
            self.facts = await within(self._clock, _PATIENCE, self._engine.facts())
            self._note("")
        except Late:
            self._note(f"it said nothing for {_PATIENCE:g} s")
        except EngineError as error:
            self._note(str(error) or type(error).__name__)
        self._looked()

    async def run(self) -> None:
        while True:
            doubt = asyncio.ensure_future(self._doubt.wait())
            try:
                await done_within(self._clock, EVERY, doubt)
            finally:
                await drop(doubt)
            self._doubt.clear()
            await self.look()

    def _note(self, error: str) -> None:
        if bool(error) != bool(self.error):
            self._since = self._clock.monotonic()
        self.error = error
