"""Container jobs in memory: for tests, and for workers that need not outlive their process."""

from __future__ import annotations

import asyncio
from collections import Counter

from msgspec.structs import replace

from penstock.core.errors import Unavailable
from penstock.lifecycles.container import CONTAINER, STORED, ContainerJobState
from penstock.workloads.container import store_rules
from penstock.workloads.container.job import ContainerRecord
from penstock.workloads.container.store import Change, RecordQuery


class MemoryContainerStore:
    """In-memory `penstock.workloads.container.store.ContainerStore`."""

    def __init__(self) -> None:
        self._records: dict[str, ContainerRecord] = {}
        self._bodies: dict[str, bytes] = {}
        self._last_seq = 0
        self._closed = False

    async def add(self, record: ContainerRecord, *, most_waiting: int = 0) -> ContainerRecord:
        store_rules.check_new(record)
        await self._turn()
        self._refuse_taken(record)
        if most_waiting and (await self.tally())[CONTAINER.initial] >= most_waiting:
            raise store_rules.queue_full(most_waiting)
        self._last_seq += 1
        record = replace(record, seq=self._last_seq)
        self._records[record.job_id] = replace(record, body=b"")
        self._bodies[record.job_id] = record.body
        return record

    def _refuse_taken(self, record: ContainerRecord) -> None:
        if record.job_id in self._records:
            raise store_rules.id_taken(record.job_id)
        if (held := self._keyed(record.key)) is not None:
            raise store_rules.key_taken(record.key, held.job_id)

    async def change(self, change: Change) -> ContainerRecord:
        await self._turn()
        record = self._records.get(change.job_id)
        if record is None:
            raise store_rules.missing(change.job_id)
        after = self._records[change.job_id] = store_rules.advance(record, change)
        return after

    async def get(self, job_id: str, *, body: bool = True) -> ContainerRecord | None:
        record = self._records.get(job_id)
        return self._whole(record) if body else record

    async def by_key(self, key: str) -> ContainerRecord | None:
        return self._whole(self._keyed(key))

    def _keyed(self, key: str) -> ContainerRecord | None:
        return next((held for held in self._records.values() if key and held.key == key), None)

    def _whole(self, record: ContainerRecord | None) -> ContainerRecord | None:
        return None if record is None else replace(record, body=self._bodies[record.job_id])

    async def find(self, query: RecordQuery) -> list[ContainerRecord]:
        found = [record for record in self._records.values() if _matches(query, record)]
        found.sort(key=lambda record: record.seq, reverse=True)
        return found[: max(query.limit, 0)]

    async def unfinished(self) -> list[ContainerRecord]:
        return sorted((held for held in self._records.values() if not held.is_final), key=_turn_of)

    async def tally(self) -> dict[ContainerJobState, int]:
        counts = Counter(record.state for record in self._records.values())
        return {state: counts[state] for state in STORED}

    async def prune(self, finished_before: float, *, keep: int = 0, limit: int = 500) -> list[str]:
        await self._turn()
        ended = sorted((held for held in self._records.values() if held.is_final), key=_end_of)
        beyond = len(ended) - keep if keep else 0
        gone = [
            record.job_id
            for n, record in enumerate(ended[: max(limit, 0)])
            if n < beyond or _end_of(record)[0] < finished_before
        ]
        for job_id in gone:
            del self._records[job_id], self._bodies[job_id]
        return gone

    async def _turn(self) -> None:
        """Others go first, as they may with a file."""
        await asyncio.sleep(0)
        if self._closed:
            raise Unavailable("the container store is closed")

    async def close(self) -> None:
        self._closed = True


def _turn_of(record: ContainerRecord) -> tuple[bool, int, int]:
    waits = record.state is CONTAINER.initial
    return waits, record.priority.rank if waits else 0, record.seq


def _end_of(record: ContainerRecord) -> tuple[float, int]:
    return record.finished_at or 0, record.seq


def _matches(query: RecordQuery, record: ContainerRecord) -> bool:
    name, value = query.label or ("", "")
    return (
        (not query.states or record.state in query.states)
        and (query.label is None or record.labels.get(name) == value)
        and (query.image is None or record.image == query.image)
        and (query.code is None or (record.error is not None and record.error.code == query.code))
        and (query.before is None or record.seq < query.before)
    )
