"""A store that is asked again when it can't be read for a moment.

Writes have the patience of `Checkpoint`; this is the same for what a run reads between them,
so that a store that is lost for some seconds costs a run nothing but those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from penstock.core.errors import StoreCorrupt, Unavailable
from penstock.ports.clock import Clock
from penstock.workloads.pipeline.store import PipelineStore

_READS = frozenset({"breaker", "fan", "get", "glance", "items", "items_by_key", "recall"})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


def patient(store: PipelineStore, clock: Clock, seconds: float) -> PipelineStore:
    """The store, with its reads tried again for so long."""
    return cast(PipelineStore, _Patient(store, clock, seconds))


class _Patient:
    def __init__(self, store: PipelineStore, clock: Clock, seconds: float) -> None:
        self._store, self._clock, self._seconds = store, clock, seconds

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        return partial(self._ask, call) if name in _READS else call

    async def _ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        since, wait = self._clock.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return await call(*args, **kwargs)
            except StoreCorrupt:
                raise
            except Unavailable:
                if self._clock.monotonic() - since + wait > self._seconds:
                    raise
            await self._clock.sleep(wait)
            wait = min(wait * 2, _LONGEST_PAUSE)
