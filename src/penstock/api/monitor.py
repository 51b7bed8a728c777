"""Requests that last, and how many there may be.

A stream, or a wait for a job's end, is broken off when its client leaves, when a reader takes
nothing for too long, and when the server closes. One monitor looks after all of them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

from penstock.core.errors import EngineUnavailable, NotAuthenticated, PenstockError, TooMany
from penstock.ports.engine_api import Caller

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Gone(Exception):
    """The client left; nobody is there to answer."""


class Closing(EngineUnavailable):
    """The server is shutting down; the request may be sent again."""


class Stalled(PenstockError):
    """The reader takes nothing of what is sent to it."""


class RequestScope:
    """One stream or wait, which runs in the task that made this. The reason of an abort is raised
    at its end."""

    __slots__ = ("_error", "_open", "_receive", "_task", "may_stay", "since")

    def __init__(
        self,
        open_scopes: set[RequestScope],
        receive: Receive | None,
        may_stay: Callable[[], object] | None,
    ) -> None:
        """With `receive`, it is aborted when the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        self._task, self._open, self._receive = task, open_scopes, receive
        self._error: Exception | None = None
        self.since: float | None = None
        """When sending of the current part began."""
        self.may_stay = may_stay
        """Raises NotAuthenticated once the key is not valid any more."""

    def break_off(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._task.cancel()

    def _leave(self) -> None:
        self.break_off(Gone())

    def __enter__(self) -> RequestScope:
        self._open.add(self)
        if self._receive is not None:
            self._receive.__self__.watch(self._leave)  # type: ignore[attr-defined]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._open.discard(self)
        if self._receive is not None:
            self._receive.__self__.watch(None)  # type: ignore[attr-defined]
        if isinstance(error, asyncio.CancelledError) and self._error is not None:
            self._task.uncancel()
            raise self._error from None


class RequestMonitor:
    """Counts what is attended, and ends what stalls."""

    def __init__(self, now: Callable[[], float], stall: float) -> None:
        self._now, self._stall = now, stall
        self._open: set[RequestScope] = set()
        self._closed = False

    def attending(
        self, receive: Receive | None, may_stay: Callable[[], object] | None = None
    ) -> RequestScope:
        """`receive` is that of an `Exchange`."""
        if self._closed:
            raise _closing()
        return RequestScope(self._open, receive, may_stay)

    def look(self) -> None:
        """Abort requests that are stalled or whose key is no longer valid."""
        latest = self._now() - self._stall
        for one in tuple(self._open):
            if one.since is not None and one.since < latest:
                one.break_off(Stalled("the client read nothing for too long"))
            elif one.may_stay is not None:
                try:
                    one.may_stay()
                except NotAuthenticated as error:
                    one.break_off(error)

    def close(self) -> None:
        self._closed = True
        for one in tuple(self._open):
            one.break_off(_closing())

    def __len__(self) -> int:
        return len(self._open)


def _closing() -> Closing:
    return Closing("the server is closing", hint="try again in a moment")


class ConcurrencyLimit:
    """Limits concurrent requests, per key and in total."""

    def __init__(self, what: str, most: int, most_per_key: int) -> None:
        self._what, self._most, self._most_per_key = what, most, most_per_key
        self._inside: Counter[str] = Counter()
        self.count = 0

    @contextmanager
    def passing(self, caller: Caller) -> Generator[None]:
        key = caller.key_id or caller.principal
        if self._inside[key] >= self._most_per_key:
            raise self._full(f"this key has {self._most_per_key} {self._what} already")
        if self.count >= self._most:
            raise self._full(f"there are {self._most} {self._what} already")
        self._inside[key] += 1
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            self._inside[key] -= 1
            if not self._inside[key]:
                del self._inside[key]

    def _full(self, why: str) -> TooMany:
        return TooMany(why, retry_after=5.0, hint="close some, or raise the limit in the settings")


class RateLimit:
    """Token bucket per key."""

    def __init__(self, rate: float, burst: int, now: Callable[[], float]) -> None:
        self._rate, self._now = rate, now
        self._burst = float(burst or max(1.0, rate))
        self._buckets: dict[str, tuple[float, float]] = {}
        """By key: how many tokens there were, and when."""

    def take(self, key: str) -> None:
        """Raises TooMany, with the time at which there is a token again."""
        now = self._now()
        tokens, then = self._buckets.get(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        if tokens < 1.0:
            wait = (1.0 - tokens) / self._rate
            raise TooMany(
                f"more than {self._rate:g} requests a second with one key",
                retry_after=wait,
                hint=f"wait {wait:.2f} s; many jobs can be submitted in one call",
            )
        self._buckets[key] = (tokens - 1.0, now)
