"""Pipeline runs in memory: for tests, and for pipelines that need not outlive their process."""

from __future__ import annotations

import asyncio
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from penstock.core.errors import Conflict, NotFound, PipelineBusy, Unavailable
from penstock.ports.store import Listeners
from penstock.workloads.pipeline import store_rules
from penstock.workloads.pipeline.records import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    StageRecord,
)
from penstock.workloads.pipeline.store import (
    CancelAnswer,
    Claim,
    Happening,
    RunQuery,
    Save,
    Saved,
)
from penstock.workloads.pipeline.store_rules import Head
from penstock.workloads.pipeline.summary import ending_of

Listener = Callable[[Sequence[str]], None]
_PARTS = ("errors", "summary", "alerts", "abandoned_items", "fingerprint")
"""What a save sets as it is, if it is set."""


class StageItems:
    """The items of one stage: by number and by key."""

    def __init__(self) -> None:
        self.items: dict[int, ItemRecord] = {}
        self.seqs: list[int] = []
        self.keys: dict[str, int] = {}

    def fresh(self, items: Iterable[ItemRecord]) -> dict[int, ItemRecord]:
        """Those whose key is new. Raises Conflict if a number is taken by another key."""
        new: dict[int, ItemRecord] = {}
        keys: set[str] = set()
        for item in items:
            if item.key in self.keys or item.key in keys:
                continue
            if item.seq in self.items or item.seq in new:
                raise Conflict(f"item {item.seq} has another key than {item.key!r}")
            new[item.seq] = item
            keys.add(item.key)
        return new

    def add(self, new: dict[int, ItemRecord]) -> None:
        for seq, item in new.items():
            self.items[seq] = item
            self.keys[item.key] = seq
            insort(self.seqs, seq)

    def end(self, item: ItemRecord) -> None:
        known = self.items[item.seq]
        self.items[item.seq] = replace(item, key=known.key, input=known.input)

    def page(self, after: int, limit: int, outcomes: Sequence[ItemOutcome]) -> list[ItemRecord]:
        found: list[ItemRecord] = []
        for index in range(bisect_right(self.seqs, after), len(self.seqs)):
            if len(found) >= limit:
                break
            item = self.items[self.seqs[index]]
            if not outcomes or item.outcome in outcomes:
                found.append(item)
        return found


class MemoryPipelineStore:
    """In-memory `penstock.workloads.pipeline.store.PipelineStore`."""

    def __init__(self) -> None:
        self._runs: dict[str, PipelineRecord] = {}
        self._items: dict[str, defaultdict[str, StageItems]] = {}
        self._events: dict[str, list[PipelineEvent]] = {}
        self._last_event = 0
        self._breakers: dict[str, Breaker] = {}
        self._declared: dict[str, PipelineInfo] = {}
        self._facts: dict[str, bytes] = {}
        self._listeners: Listeners[Sequence[str]] = Listeners()
        self._closed = False

    # -- the life of a run --------------------------------------------------------

    async def create(
        self, record: PipelineRecord, *, single_flight: bool = False
    ) -> PipelineRecord:
        await self._turn()
        held = self._runs.get(record.id)
        if held is not None:
            return held
        if single_flight:
            for run in self._runs.values():
                same = (run.pipeline, run.tenant) == (record.pipeline, record.tenant)
                if same and not run.is_final:
                    raise PipelineBusy(
                        f"pipeline {record.pipeline} is running already, as job {run.id}",
                        running=run.id,
                        hint="wait for that job, or cancel it",
                    )
        self._items[record.id] = defaultdict(StageItems)
        self._events[record.id] = []
        self._keep(replace(record, stages=_ordered(record.stages)))
        return self._runs[record.id]

    async def claim(self, claim: Claim) -> PipelineRecord | None:
        await self._turn()
        record = self._run(claim.job_id)
        head = store_rules.take(Head.of(record), claim)
        return None if head is None else self._keep(head.onto(record))

    async def save(self, save: Save) -> Saved:
        await self._turn()
        record = self._run(save.job_id)
        head = store_rules.advance(save.job_id, Head.of(record), save)
        if head is None:
            return Saved(record.status, record.cancel_requested)
        listed = self._save_items(save)
        stages = {stage.name: stage for stage in (*record.stages, *save.stages)}
        parts = {name: value for name in _PARTS if (value := getattr(save, name)) is not UNSET}
        self._note(save.job_id, save.at, save.happened)
        self._keep(head.onto(record, stages=_ordered(stages.values()), **parts))
        return Saved(head.status, head.cancel_requested, listed)

    def _save_items(self, save: Save) -> int:
        """All of them, or none: what can be wrong is looked for before anything is changed."""
        stages = self._items[save.job_id]
        fresh: dict[str, dict[int, ItemRecord]] = {}
        for group in save.listed:
            known = fresh.setdefault(group.stage, {})
            known |= stages[group.stage].fresh((*known.values(), *group.items))
        for group in save.ended:
            for item in group.items:
                if item.seq not in stages[group.stage].items and item.seq not in fresh.get(
                    group.stage, ()
                ):
                    raise NotFound(f"stage {group.stage} has no item {item.seq}")
        for stage, new in fresh.items():
            stages[stage].add(new)
        for group in save.ended:
            for item in group.items:
                stages[group.stage].end(item)
        return sum(len(new) for new in fresh.values())

    async def request_cancel(self, job_id: str, now: float) -> CancelAnswer:
        await self._turn()
        record = self._run(job_id)
        before = Head.of(record)
        head, answer = store_rules.ask_to_stop(before, now)
        if head is not before:
            self._keep_end(head, record, now, store_rules.WAS_CANCELLED, store_rules.CANCELLED)
        return answer

    async def fail_stale(self, job_id: str, now: float, message: str, version: int) -> bool:
        await self._turn()
        record = self._runs.get(job_id)
        if record is None:
            return False
        head = store_rules.give_up(Head.of(record), now, version)
        if head is None:
            return False
        self._keep_end(head, record, now, message, store_rules.STALE)
        return True

    def _keep_end(
        self, head: Head, record: PipelineRecord, now: float, reason: str, code: str
    ) -> None:
        """Nobody else will say that it has ended."""
        record = head.onto(record)
        if record.is_final:
            info = self._declared.get(record.pipeline)
            record = store_rules.ended_alone(record, info, reason, code)
            ended = Happening(PipelineEventKind.JOB_COMPLETE, ending_of(record))
            self._note(record.id, now, [ended])
        self._keep(record)

    async def forget_stages(self, job_id: str, fence: int, stages: Sequence[str]) -> None:
        await self._turn()
        record = self._run(job_id)
        store_rules.check_fence(job_id, record.fence, fence)
        for stage in stages:
            self._items[job_id].pop(stage, None)
        self._keep(replace(record, version=record.version + 1))

    def _run(self, job_id: str) -> PipelineRecord:
        record = self._runs.get(job_id)
        if record is None:
            raise NotFound(f"no pipeline job {job_id}")
        return record

    def _keep(self, record: PipelineRecord) -> PipelineRecord:
        self._runs[record.id] = record
        self._listeners.tell([record.id])
        return record

    def _note(self, job_id: str, at: float, happened: Iterable[Happening]) -> None:
        for happening in happened:
            self._last_event += 1
            event = PipelineEvent(self._last_event, job_id, at, happening.kind, happening.data)
            self._events[job_id].append(event)

    async def _turn(self) -> None:
        """Others go first, as they may with a file."""
        await asyncio.sleep(0)
        if self._closed:
            raise Unavailable("the pipeline store is closed")

    # -- reading ------------------------------------------------------------------

    async def get(self, job_id: str) -> PipelineRecord | None:
        return self._runs.get(job_id)

    async def glance(self, job_id: str) -> Saved | None:
        run = self._runs.get(job_id)
        return None if run is None else Saved(run.status, run.cancel_requested)

    async def find(self, query: RunQuery) -> list[PipelineRecord]:
        found = [run for run in self._runs.values() if _matches(query, run)]
        found.sort(key=_age, reverse=True)
        return found[: max(query.limit, 0)]

    async def unfinished(self) -> list[PipelineRecord]:
        return sorted((run for run in self._runs.values() if not run.is_final), key=_age)

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 1000,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> list[ItemRecord]:
        return self._stage(job_id, stage).page(after, limit, outcomes)

    async def items_by_key(self, job_id: str, stage: str, keys: Sequence[str]) -> list[ItemRecord]:
        held = self._stage(job_id, stage)
        seqs = sorted({held.keys[key] for key in keys if key in held.keys})
        return [held.items[seq] for seq in seqs]

    async def fan(self, job_id: str, stage: str) -> int:
        items = self._stage(job_id, stage).items.values()
        return sum(item.fan for item in items if item.outcome is ItemOutcome.OK)

    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[PipelineEvent]:
        events = self._events.get(job_id, [])
        start = bisect_right(events, after, key=lambda event: event.id)
        return events[start : start + max(limit, 0)]

    def _stage(self, job_id: str, stage: str) -> StageItems:
        stages = self._items.get(job_id)
        return StageItems() if stages is None or stage not in stages else stages[stage]

    # -- beside the runs ----------------------------------------------------------

    async def breaker(self, name: str) -> Breaker | None:
        return self._breakers.get(name)

    async def breakers(self) -> list[Breaker]:
        return [self._breakers[name] for name in sorted(self._breakers)]

    async def put_breaker(self, breaker: Breaker) -> bool:
        await self._turn()
        held = self._breakers.get(breaker.name)
        if breaker.version != (0 if held is None else held.version + 1):
            return False
        self._breakers[breaker.name] = breaker
        return True

    async def declare(self, infos: Sequence[PipelineInfo]) -> None:
        await self._turn()
        self._declared.update((info.name, info) for info in infos)

    async def declared(self) -> list[PipelineInfo]:
        return [self._declared[name] for name in sorted(self._declared)]

    async def remember(self, name: str, value: bytes) -> None:
        await self._turn()
        self._facts[name] = value

    async def recall(self, name: str) -> bytes | None:
        return self._facts.get(name)

    # -- upkeep -------------------------------------------------------------------

    async def refers(self, tenant: str, pointer: str) -> bool:
        return any(
            pointer in (item.input, item.output)
            for run in self._runs.values()
            if run.tenant == tenant
            for stage in self._items[run.id].values()
            for item in stage.items.values()
        )

    async def pointers(self) -> list[str]:
        held = {
            pointer
            for stages in self._items.values()
            for stage in stages.values()
            for item in stage.items.values()
            for pointer in (item.input, item.output)
        }
        return sorted(pointer for pointer in held if pointer.startswith("blob:"))

    async def prune(self, finished_before: float, limit: int = 1000) -> int:
        await self._turn()
        old = [
            run
            for run in self._runs.values()
            if run.finished_at is not None and run.finished_at < finished_before
        ]
        old.sort(key=lambda run: run.finished_at or 0.0)
        for run in old[: max(limit, 0)]:
            del self._runs[run.id], self._items[run.id], self._events[run.id]
        return len(old[: max(limit, 0)])

    def listen(self, listener: Listener) -> Callable[[], None]:
        return self._listeners.add(listener)

    async def close(self) -> None:
        self._closed = True


def _ordered(stages: Iterable[StageRecord]) -> tuple[StageRecord, ...]:
    return tuple(sorted(stages, key=lambda stage: (stage.index, stage.name)))


def _age(run: PipelineRecord) -> tuple[float, str]:
    return run.created_at, run.id


def _matches(query: RunQuery, run: PipelineRecord) -> bool:
    return (
        query.pipeline in (None, run.pipeline)
        and query.tenant in (None, run.tenant)
        and query.retry_of in (None, run.retry_of)
        and (not query.statuses or run.status in query.statuses)
        and (query.before is None or _age(run) < query.before)
    )
