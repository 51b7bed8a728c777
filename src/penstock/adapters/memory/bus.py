"""The bus within one process: what is published gathers until its reader's next turn."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle

from penstock.ports.bus import AnyMessage, Handler

log = logging.getLogger(__name__)


class MemoryBus:
    """See `penstock.ports.bus.Bus`."""

    def __init__(self) -> None:
        self._readers: dict[str, list[_Reader]] = defaultdict(list)
        self._groups: dict[tuple[str, str], cycle[_Reader]] = {}

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        readers = self._readers.get(subject, ())
        groups = set()
        for reader in readers:
            if reader.group is None:
                reader.take(messages)
            elif reader.group not in groups:
                groups.add(reader.group)
                next(self._groups[subject, reader.group]).take(messages)

    def subscribe(self, subject: str, handler: Handler, *, group: str | None = None) -> _Reader:
        reader = _Reader(self, subject, handler, group)
        self._readers[subject].append(reader)
        self._regroup(subject, group)
        return reader

    def _regroup(self, subject: str, group: str | None) -> None:
        if group is not None:
            members = [reader for reader in self._readers[subject] if reader.group == group]
            self._groups[subject, group] = cycle(members)

    def _forget(self, reader: _Reader) -> None:
        if reader in self._readers[reader.subject]:
            self._readers[reader.subject].remove(reader)
            self._regroup(reader.subject, reader.group)

    async def close(self) -> None:
        for readers in list(self._readers.values()):
            for reader in list(readers):
                await reader.close()


class _Reader:
    """One subscription: a task that hands its handler whatever has gathered."""

    def __init__(self, bus: MemoryBus, subject: str, handler: Handler, group: str | None) -> None:
        self._bus, self.subject, self._handler, self.group = bus, subject, handler, group
        self._gathered: list[AnyMessage] = []
        self._wake = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"bus {subject}")

    def take(self, messages: Sequence[AnyMessage]) -> None:
        self._gathered.extend(messages)
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._gathered = self._gathered, []
            try:
                await self._handler(batch)
            except Exception:
                log.exception("a reader of %s failed on %d messages", self.subject, len(batch))

    async def close(self) -> None:
        self._bus._forget(self)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
