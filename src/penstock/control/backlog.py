"""What waits, and who is next.

Between tenants the order is fair: each has a virtual time that advances with every job of
its own that is picked, and the one that is furthest behind goes first. Within a tenant the
order is `penstock.core.policy.rank`: priority, softened by age.

Jobs that need the same things (topic, placement labels) share a *lane*: when no worker has
room for one of them, none of them needs looking at.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.core.job import Job
from penstock.core.policy import rank, ready_at

PLACEMENT = "place."
"""A label `place.gpu=yes` asks for a worker with the label `gpu=yes`. Others don't matter."""


class Lane(NamedTuple):
    """What a job needs of a worker."""

    topic: str
    needs: frozenset[tuple[str, str]]

    @classmethod
    def of(cls, job: Job) -> Lane:
        labels = job.request.labels
        if not labels:
            return cls(job.request.topic, _NOTHING)
        needs = {
            (key.removeprefix(PLACEMENT), value)
            for key, value in labels.items()
            if key.startswith(PLACEMENT)
        }
        return cls(job.request.topic, frozenset(needs))


_NOTHING: frozenset[tuple[str, str]] = frozenset()


class _Tenant:
    """One tenant's waiting jobs, a heap of (rank, seq) a lane."""

    __slots__ = ("lanes", "time")

    def __init__(self, time: float) -> None:
        self.time = time
        self.lanes: dict[Lane, list[tuple[float, int]]] = {}


class Backlog:
    """Every job that is ready or delayed, by the order in which it should go."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[str, Lane]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._delayed: list[tuple[float, int, str, Lane, float]] = []
        self._clock = 0.0
        self._passed_over: list[_Tenant] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: int) -> bool:
        return seq in self._entries

    def add(self, job: Job, now: float) -> None:
        seq = job.seq
        if seq in self._entries:
            return
        lane = Lane.of(job)
        tenant = job.request.tenant
        self._entries[seq] = (tenant, lane)
        order = rank(job.request, job.accepted_at)
        start = ready_at(job.request, job.accepted_at)
        if start > now:
            heapq.heappush(self._delayed, (start, seq, tenant, lane, order))
        else:
            self._enqueue(tenant, lane, order, seq)

    def _enqueue(self, tenant: str, lane: Lane, order: float, seq: int) -> None:
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = _Tenant(self._clock)
        elif not queue.lanes:
            queue.time = max(queue.time, self._clock)
        heapq.heappush(queue.lanes.setdefault(lane, []), (order, seq))

    def discard(self, seq: int) -> None:
        """Forget a job; its place in a heap is skipped when it comes up."""
        self._entries.pop(seq, None)

    def wake(self, now: float) -> float | None:
        """Let delayed jobs in whose time has come; return when the next one's will."""
        delayed = self._delayed
        while delayed and (delayed[0][0] <= now or delayed[0][1] not in self._entries):
            _, seq, tenant, lane, order = heapq.heappop(delayed)
            if seq in self._entries:
                self._enqueue(tenant, lane, order, seq)
        return delayed[0][0] if delayed else None

    def pick(self, place: Callable[[Lane], str | None]) -> Iterator[tuple[int, str]]:
        """Yield (seq, worker) in fair order for as long as `place` finds room.

        What is yielded has left the backlog. `place` is asked once a job and answers None
        when nobody has room for the lane; the lane is then left alone until the next pick.
        """
        blocked: set[Lane] = set()
        for queue in self._passed_over:
            # Whom nobody could serve has saved up no turns for when somebody can.
            queue.time = max(queue.time, self._clock)
        self._passed_over.clear()
        turns = [(queue.time, name) for name, queue in self._tenants.items() if queue.lanes]
        heapq.heapify(turns)
        while turns:
            time, name = turns[0]
            queue = self._tenants[name]
            lane = self._best_lane(queue, blocked)
            if lane is None:
                heapq.heappop(turns)
                self._passed_over.append(queue)
                continue
            worker = place(lane)
            if worker is None:
                blocked.add(lane)
                continue
            _, seq = heapq.heappop(queue.lanes[lane])
            del self._entries[seq]
            self._clock = time
            queue.time = time + 1
            heapq.heapreplace(turns, (queue.time, name))
            yield seq, worker

    def _best_lane(self, queue: _Tenant, blocked: set[Lane]) -> Lane | None:
        best: tuple[tuple[float, int], Lane] | None = None
        for lane in list(queue.lanes):
            heap = queue.lanes[lane]
            while heap and heap[0][1] not in self._entries:
                heapq.heappop(heap)
            if not heap:
                del queue.lanes[lane]
            elif lane not in blocked and (best is None or heap[0] < best[0]):
                best = (heap[0], lane)
        return None if best is None else best[1]

    def lanes(self) -> set[Lane]:
        return {lane for _, lane in self._entries.values()}
