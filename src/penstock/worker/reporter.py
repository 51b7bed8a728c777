"""What executors tell of themselves, passed on to the engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.ports.bus import HEARTBEAT, Bus, WorkerFacts
from penstock.ports.clock import Clock
from penstock.ports.executor import Executor

log = logging.getLogger(__name__)

_EVERY = 1.0
"""Seconds between two looks."""


class Reporter:
    """Tells facts when they are new, at most once a second."""

    def __init__(
        self, bus: Bus, worker_id: str, session: str, executors: Sequence[Executor], clock: Clock
    ) -> None:
        self._bus, self._worker_id, self._session = bus, worker_id, session
        self._executors, self._clock = executors, clock
        self._telling = [e for e in executors if hasattr(e, "facts")]
        self._told: Mapping[str, Any] = {}
        self._next = float("-inf")

    def labels(self) -> dict[str, str]:
        """What the worker is known by because of its executors."""
        return {
            name: value
            for executor in self._executors
            for name, value in getattr(executor, "labels", {}).items()
        }

    def begin_again(self) -> None:
        """The engine is new, or new to us: it knows nothing yet."""
        self._told, self._next = {}, float("-inf")

    def tell(self) -> None:
        now = self._clock.monotonic()
        if now < self._next or not self._telling:
            return
        self._next = now + _EVERY
        facts = self._gathered()
        if facts != self._told:
            self._told = facts
            self._bus.publish(HEARTBEAT, [self._message(facts)])

    def facts(self) -> WorkerFacts:
        """All facts as they are now, for a caller that can't wait until they are told."""
        self._told = self._gathered()
        return self._message(self._told)

    def _message(self, facts: Mapping[str, Any]) -> WorkerFacts:
        return WorkerFacts(self._worker_id, self._session, facts)

    def _gathered(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for executor in self._telling:
            try:
                facts.update(executor.facts())
            except Exception:
                log.exception("%s can't tell its facts", type(executor).__name__)
        return facts
