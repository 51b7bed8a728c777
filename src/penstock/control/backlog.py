"""What waits, and who is next.

Between tenants the order is fair: each has a virtual time that advances with every job of
its own that is picked, and the one that is furthest behind goes first. Within a tenant the
order is `penstock.core.policy.rank`: priority, softened by age.

Jobs that need the same things (topic, placement labels) and fall under the same limits share
a *lane*: when no worker has room for one of them, none of them needs looking at. A tenant's
jobs in one lane are a *line*. It may have a great many lines, so their heads are in a heap of
their own; what is dropped stays in the heaps until it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from penstock.control.buckets import Bucket
from penstock.core.job import Job
from penstock.core.policy import rank, ready_at

PLACEMENT = "place."
"""A label `place.gpu=yes` asks for a worker with the label `gpu=yes`. Others don't matter."""


class Lane(NamedTuple):
    """What a job needs: of a worker, and of the limits that it falls under."""

    topic: str
    needs: frozenset[tuple[str, str]]
    buckets: tuple[Bucket, ...] = ()

    @classmethod
    def of(cls, job: Job, buckets: tuple[Bucket, ...] = ()) -> Lane:
        topic, labels = job.request.topic, job.request.labels
        needs = _NOTHING
        if labels:
            needs = frozenset(
                [
                    (key.removeprefix(PLACEMENT), value)
                    for key, value in labels.items()
                    if key.startswith(PLACEMENT)
                ]
            )
        return cls(topic, needs, buckets) if needs or buckets else _plain(topic)


_NOTHING: frozenset[tuple[str, str]] = frozenset()


@lru_cache(maxsize=1000)
def _plain(topic: str) -> Lane:
    """The lane of most jobs; one object a topic, which is found faster than an equal one."""
    return Lane(topic, _NOTHING)


class _Line:
    """One tenant's jobs in one lane."""

    __slots__ = ("heads", "heap", "lane", "shut")

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.heap: list[_Place] = []
        self.heads: list[_Place] = []
        """Those of its places that are among the tenant's heads, the first one last."""
        self.shut = False
        """Whether a limit keeps it back: nothing of it is then a head."""

    def __lt__(self, other: object) -> bool:
        return False  # places differ before this, unless they are the same job's


_MOST_IDLE = 100
"""Tenants without jobs that are remembered."""
_Place = tuple[float, int, _Line]
"""(rank, seq, line)"""
_Delay = tuple[float, int, str, Lane, float]
"""(start, seq, tenant, lane, rank)"""


class _Tenant:
    """One tenant's lines, and which of them has its next job."""

    __slots__ = ("heads", "lines", "time")

    def __init__(self, time: float) -> None:
        self.time = time
        self.lines: dict[Lane, _Line] = {}
        self.heads: list[_Place] = []
        """The first of each line that is not shut; and some that were, or are dropped."""

    def show(self, place: _Place) -> None:
        """Let the first of a line be among the heads, once."""
        line = place[2]
        if not line.heads or line.heads[-1] is not place:
            line.heads.append(place)
            heapq.heappush(self.heads, place)

    def hide(self) -> None:
        """Take out the first of the heads; it is its line's first, too."""
        heapq.heappop(self.heads)[2].heads.pop()

    def clear(self) -> None:
        self.lines.clear()
        self.heads.clear()


class Backlog:
    """Every job that is ready or delayed, by the order in which it should go."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Place | _Delay] = {}
        """The one place in a heap, by seq, that counts."""
        self._tenants: dict[str, _Tenant] = {}
        self._delayed: list[_Delay] = []
        self._shut: dict[Bucket, list[tuple[_Tenant, _Line]]] = {}
        """Lines that wait until a limit has room again."""
        self._aside: list[tuple[_Tenant, _Line]] = []
        """Lines for which the last pick found no room: nothing of them is a head until the next."""
        self._clock = 0.0
        self._start = 0.0
        """Where forgotten tenants had got to: nobody gains a turn by being forgotten."""
        self._passed_over: list[_Tenant] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: int) -> bool:
        return seq in self._waiting

    def add(self, job: Job, now: float, buckets: tuple[Bucket, ...] = ()) -> None:
        seq = job.seq
        if seq in self._waiting:
            return
        request, accepted_at = job.request, job.accepted_at
        lane = Lane.of(job, buckets)
        order = rank(request, accepted_at)
        start = ready_at(request, accepted_at)
        if start > now:
            delay = (start, seq, request.tenant, lane, order)
            self._waiting[seq] = delay
            heapq.heappush(self._delayed, delay)
        else:
            self._enqueue(request.tenant, lane, order, seq)

    def _enqueue(self, name: str, lane: Lane, order: float, seq: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(max(self._start, self._clock))
        elif not tenant.lines:
            tenant.time = max(tenant.time, self._clock)
        line = tenant.lines.get(lane)
        if line is None:
            line = tenant.lines[lane] = _Line(lane)
        place = (order, seq, line)
        self._waiting[seq] = place
        heapq.heappush(line.heap, place)
        if line.heap[0] is place and not line.shut:
            tenant.show(place)

    def discard(self, seq: int) -> None:
        """Forget a job; its place in a heap is skipped when it comes up."""
        self._waiting.pop(seq, None)

    def empty(self) -> list[int]:
        """Forget every job, and return them; tenants keep their turns."""
        seqs = list(self._waiting)
        self._waiting.clear()
        self._delayed.clear()
        self._shut.clear()
        self._aside.clear()
        for tenant in self._tenants.values():
            tenant.clear()
        return seqs

    def wake(self, now: float) -> float | None:
        """Let delayed jobs in whose time has come; return when the next one's will."""
        delayed = self._delayed
        while delayed:
            delay = delayed[0]
            start, seq, tenant, lane, order = delay
            waits = self._waiting.get(seq) is delay
            if waits and start > now:
                return start
            heapq.heappop(delayed)
            if waits:
                self._enqueue(tenant, lane, order, seq)
        return None

    def open(self, bucket: Bucket) -> None:
        """A limit may have room again: ask anew for the lines that it shut."""
        for tenant, line in self._shut.pop(bucket, ()):
            line.shut = False
            self._lead(tenant, line)

    def pick(
        self,
        place: Callable[[Lane], str | Bucket | None],
        has_room: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[int, str]]:
        """Yield (seq, worker) in fair order for as long as `place` finds room.

        What is yielded has left the backlog. `place` is asked once a job and answers None
        when nobody has room for the lane, which is then left alone until the next pick; or
        the bucket that is full, and the lane is left alone until it is opened. Nobody is
        asked any more when there is no room for anything.
        """
        blocked: set[Lane] = set()
        aside, self._aside = self._aside, []
        for tenant, left in aside:
            self._lead(tenant, left)
        for tenant in self._passed_over:
            # Whom nobody could serve has saved up no turns for when somebody can.
            tenant.time = max(tenant.time, self._clock)
        self._passed_over.clear()
        self._forget_idle()
        turns = [(tenant.time, name) for name, tenant in self._tenants.items() if tenant.lines]
        heapq.heapify(turns)
        while turns:
            time, name = turns[0]
            tenant = self._tenants[name]
            line = self._next_line(tenant, blocked)
            if line is None:
                heapq.heappop(turns)
                self._passed_over.append(tenant)
                continue
            found = place(line.lane)
            if found is None:
                if not has_room():
                    return
                blocked.add(line.lane)
            elif not isinstance(found, str):
                line.shut = True
                self._shut.setdefault(found, []).append((tenant, line))
            else:
                seq = self._take(tenant, line)
                self._clock = time
                tenant.time = time + 1
                heapq.heapreplace(turns, (tenant.time, name))
                yield seq, found

    def _forget_idle(self) -> None:
        """Forget tenants without jobs; a few that have just had their turn are kept for that."""
        idle = [(name, tenant.time) for name, tenant in self._tenants.items() if not tenant.lines]
        for name, time in idle:
            if time <= self._clock or len(idle) > _MOST_IDLE:
                self._start = max(self._start, time)
                del self._tenants[name]

    def _take(self, tenant: _Tenant, line: _Line) -> int:
        """Take out the first of a line, which is the first of the heads; another one leads."""
        heap, waiting = line.heap, self._waiting
        _, seq, _ = heapq.heappop(heap)
        del waiting[seq]
        line.heads.pop()
        if heap and not line.heads and waiting.get(heap[0][1]) is heap[0]:
            line.heads.append(heap[0])
            heapq.heapreplace(tenant.heads, heap[0])
        else:
            heapq.heappop(tenant.heads)
            self._lead(tenant, line)
        return seq

    def _next_line(self, tenant: _Tenant, blocked: set[Lane]) -> _Line | None:
        """The line that has the tenant's next job, which is then the first of the heads."""
        heads = tenant.heads
        while heads:
            head = heads[0]
            line = head[2]
            if line.shut or not line.heap or line.heap[0] is not head:
                tenant.hide()
            elif self._waiting.get(head[1]) is not head:
                tenant.hide()
                self._lead(tenant, line)
            elif blocked and line.lane in blocked:
                tenant.hide()
                self._aside.append((tenant, line))
            else:
                return line
        return None

    def _lead(self, tenant: _Tenant, line: _Line) -> None:
        """Show who is first in a line now, or forget the line."""
        heap = line.heap
        while heap and self._waiting.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        if heap:
            tenant.show(heap[0])
        elif tenant.lines.get(line.lane) is line:
            del tenant.lines[line.lane]
