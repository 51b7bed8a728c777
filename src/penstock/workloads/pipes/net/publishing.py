"""A node's own record, on its way to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from penstock.workloads.pipes.net.records import NodeRecord

PACE = 1.0
"""Seconds between two records that differ in figures only."""


class Publisher:
    """Tells of what matters at once, and of figures no more often than every second."""

    def __init__(self, record: NodeRecord, tell: Callable[[NodeRecord], None]) -> None:
        self.record = record
        """The newest, told or not."""
        self._told = record
        self._told_at = float("-inf")
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None

    def publish(self, record: NodeRecord) -> None:
        """Its boot and version are seen to here."""
        if replace(record, boot=self.record.boot, version=self.record.version) == self.record:
            return
        self.record = replace(record, boot=self.record.boot, version=self.record.version + 1)
        if self.record.material() != self._told.material():
            self.flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._told_at + PACE), self.flush)

    def flush(self) -> None:
        self.stop()
        self._told, self._told_at = self.record, asyncio.get_running_loop().time()
        self._tell(self.record)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
