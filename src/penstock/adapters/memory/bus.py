"""The bus within one process: what is published gathers until its reader's next turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle

from penstock.ports.bus import AnyMessage, Handler
from penstock.ports.reader import Reader


class MemoryBus:
    """See `penstock.ports.bus.Bus`."""

    def __init__(self) -> None:
        self._readers: dict[str, list[Reader]] = defaultdict(list)
        self._groups: dict[tuple[str, str], cycle[Reader]] = {}

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        readers = self._readers.get(subject, ())
        groups = set()
        for reader in readers:
            if reader.group is None:
                reader.take(messages)
            elif reader.group not in groups:
                groups.add(reader.group)
                next(self._groups[subject, reader.group]).take(messages)

    def subscribe(self, subject: str, handler: Handler, *, group: str | None = None) -> Reader:
        reader = Reader(subject, handler, self._forget, group)
        self._readers[subject].append(reader)
        self._regroup(subject, group)
        return reader

    def _regroup(self, subject: str, group: str | None) -> None:
        if group is not None:
            members = [reader for reader in self._readers[subject] if reader.group == group]
            self._groups[subject, group] = cycle(members)

    def _forget(self, reader: Reader) -> None:
        if reader in self._readers[reader.subject]:
            self._readers[reader.subject].remove(reader)
            self._regroup(reader.subject, reader.group)

    async def close(self) -> None:
        for readers in list(self._readers.values()):
            for reader in list(readers):
                await reader.close()
