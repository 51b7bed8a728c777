"""Which worker gets a job, and why none does. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from penstock.control.backlog import Lane
from penstock.control.roster import Pool, WorkerRecord
from penstock.ports.executor import PAUSED


@lru_cache(maxsize=4096)
def matches(topic: str, glob: str) -> bool:
    """Whether a topic is meant by a glob; a star crosses dots."""
    return fnmatchcase(topic, glob)


def serves(pool: Pool, worker: WorkerRecord, lane: Lane) -> bool:
    """Whether the worker could ever run what is in this lane."""
    if pool.topics and not any(matches(lane.topic, glob) for glob in pool.topics):
        return False
    if not any(matches(lane.topic, glob) for glob in worker.topics):
        return False
    return all(worker.labels.get(key, pool.labels.get(key)) == value for key, value in lane.needs)


_Candidate = tuple[float, int, WorkerRecord]
"""(minus its share of free room, its place among the workers, the worker)"""


def paused_topics(worker: WorkerRecord) -> Mapping[str, str]:
    """Topics that it serves but can't run at present, and why."""
    told = worker.facts.get(PAUSED)
    return told if isinstance(told, Mapping) else {}


def paused_everywhere(workers: Iterable[WorkerRecord]) -> dict[str, str]:
    """Topics that all workers who serve them can't run at present, and why."""
    present = [w for w in workers if w.ready]
    paused = {topic: why for w in present for topic, why in paused_topics(w).items()}
    return {topic: why for topic, why in paused.items() if not any(_can(w, topic) for w in present)}


def _can(worker: WorkerRecord, topic: str) -> bool:
    served = any(matches(topic, glob) for glob in worker.topics)
    return served and topic not in paused_topics(worker)


class Places:
    """Finds the least busy worker for a lane, counting what it gives out."""

    def __init__(
        self, workers: Iterable[WorkerRecord], pools: Mapping[str, Pool], paused: Collection[str]
    ) -> None:
        everyone = list(workers)
        self._pools = pools
        self._ready = [w for w in everyone if w.ready and w.pool not in paused]
        self._room = {w.worker_id: w.limit - len(w.held) for w in self._ready}
        self._left = sum(room for room in self._room.values() if room > 0)
        self._pool_room = {
            name: pool.capacity - sum(len(w.held) for w in everyone if w.pool == name)
            for name, pool in pools.items()
            if pool.capacity is not None
        }
        self._able: dict[tuple[str, frozenset[tuple[str, str]]], list[_Candidate]] = {}
        self._last: Lane | None = None
        self._candidates: list[_Candidate] = []

    def has_room(self) -> bool:
        """Whether anybody has room for anything."""
        return self._left > 0

    def find(self, lane: Lane) -> str | None:
        if lane is not self._last:
            self._last, self._candidates = lane, self._who_could(lane)
        room, pool_room, heap = self._room, self._pool_room, self._candidates
        while heap:
            rank, number, worker = heap[0]
            free = room[worker.worker_id]
            if free <= 0 or pool_room.get(worker.pool, 1) <= 0:
                heapq.heappop(heap)  # rooms only get smaller
            elif (busier := -free / worker.limit) != rank:
                heapq.heapreplace(heap, (busier, number, worker))  # it got one of another lane
            else:
                free -= 1
                room[worker.worker_id] = free
                heapq.heapreplace(heap, (-free / worker.limit, number, worker))
                self._left -= 1
                if worker.pool in pool_room:
                    pool_room[worker.pool] -= 1
                return worker.worker_id
        return None

    def _who_could(self, lane: Lane) -> list[_Candidate]:
        """The workers that could run what is in this lane, as a heap, the least busy first."""
        needs = (lane.topic, lane.needs)
        able = self._able.get(needs)
        if able is None:
            able = [
                (-self._room[w.worker_id] / w.limit, number, w)
                for number, w in enumerate(self._ready)
                if self._room[w.worker_id] > 0
                and serves(self._pools[w.pool], w, lane)
                and lane.topic not in paused_topics(w)
            ]
            heapq.heapify(able)
            self._able[needs] = able
        return able


def why_waiting(
    lane: Lane,
    workers: Iterable[WorkerRecord],
    pools: Mapping[str, Pool],
    paused: Collection[str] = (),
) -> str:
    """The reason, in a sentence, why nothing in this lane is dispatched right now."""
    everyone = list(workers)
    open_pools = [p for p in pools.values() if _may_serve(p, lane.topic)]
    if not open_pools:
        return f"no pool serves the topic {lane.topic}"
    known = [w for w in everyone if any(matches(lane.topic, glob) for glob in w.topics)]
    if not known:
        return f"no worker is here that serves the topic {lane.topic}"
    able = [w for w in known if serves(pools[w.pool], w, lane)]
    if not able:
        wanted = ", ".join(f"{key}={value}" for key, value in sorted(lane.needs))
        return f"no worker that serves {lane.topic} has the labels {wanted}"
    present = [w for w in able if w.ready]
    if not present:
        return "every worker that could run it is missing or draining"
    if all(w.pool in paused for w in present):
        names = sorted({w.pool for w in present})
        return _paused(names)
    present = [w for w in present if w.pool not in paused]
    reasons = {why for w in present if (why := paused_topics(w).get(lane.topic))}
    present = [w for w in present if lane.topic not in paused_topics(w)]
    if not present:
        return f"the topic {lane.topic} is paused: {'; '.join(sorted(reasons))}"
    full = {w.pool for w in present if _is_full(pools[w.pool], everyone)}
    if full >= {w.pool for w in present}:
        return f"the pool {', '.join(sorted(full))} is at its capacity"
    if all(len(w.held) >= w.limit for w in present):
        held = sum(len(w.held) for w in present)
        return f"all workers that could run it are busy ({held} jobs on {len(present)})"
    return "it is about to be dispatched"


def _may_serve(pool: Pool, topic: str) -> bool:
    return not pool.topics or any(matches(topic, glob) for glob in pool.topics)


def _is_full(pool: Pool, workers: Iterable[WorkerRecord]) -> bool:
    if pool.capacity is None:
        return False
    return sum(len(w.held) for w in workers if w.pool == pool.name) >= pool.capacity


def _paused(names: list[str]) -> str:
    if len(names) == 1:
        return f"the pool {names[0]} is paused"
    return f"the pools {', '.join(names)} are paused"
