"""A cancel token that threads can wait on and coroutines can ask."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.core.signals import Cancelled


class Token:
    """See `penstock.ports.executor.CancelToken`."""

    __slots__ = ("_event", "_listeners", "_lock", "reason")

    def __init__(self) -> None:
        self._event: threading.Event | None = None
        self._listeners: list[Callable[[], None]] | None = None
        self._lock = threading.Lock()
        self.reason = ""

    @property
    def requested(self) -> bool:
        return bool(self.reason)

    def request(self, reason: str = "cancelled") -> None:
        """Ask the work to end; the first reason counts."""
        with self._lock:
            if not self.reason:
                self.reason = reason or "cancelled"
            if self._event is not None:
                self._event.set()
            listeners, self._listeners = self._listeners or (), None
        for listener in listeners:
            listener()

    def when_requested(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call it once when the end is asked for, in whichever thread asks, or now if that
        has happened. Returns how to take it back."""
        with self._lock:
            if not self.reason:
                if self._listeners is None:
                    self._listeners = []
                self._listeners.append(listener)
                return lambda: self._forget(listener)
        listener()
        return _nothing

    def _forget(self, listener: Callable[[], None]) -> None:
        with self._lock:
            if self._listeners and listener in self._listeners:
                self._listeners.remove(listener)

    def wait(self, timeout: float | None = None) -> bool:
        with self._lock:
            if self.reason:
                return True
            if self._event is None:  # most jobs never wait, so most never need an event
                self._event = threading.Event()
        return self._event.wait(timeout)

    def raise_if_requested(self) -> None:
        if self.reason:
            raise Cancelled(self.reason)


def _nothing() -> None:
    pass
