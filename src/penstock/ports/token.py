"""A cancel token that threads can wait on and coroutines can ask."""

from __future__ import annotations

import threading

from penstock.core.signals import Cancelled


class Token:
    """See `penstock.ports.executor.CancelToken`."""

    __slots__ = ("_event", "_lock", "reason")

    def __init__(self) -> None:
        self._event: threading.Event | None = None
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
