"""What waits, and who is next.

Between tenants the order is fair: each has a virtual time that advances with every job of
its own that is picked, and the one that is furthest behind goes first. Within a tenant the
order is `penstock.core.policy.rank`: priority, softened by age.

Jobs that need the same things (topic, placement labels) and fall under the same limits share
a *lane*: when no worker has room for one of them, none of them needs looking at. A tenant may
have a great many lanes, so their first jobs are in a heap of their own; what is dropped stays
in the heaps until it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.core.job import Job
from penstock.core.policy import rank, ready_at

PLACEMENT = "place."
"""A label `place.gpu=yes` asks for a worker with the label `gpu=yes`. Others don't matter."""


class Bucket(NamedTuple):
    """One key's share of one limit."""

    limit: str
    key: tuple[str, ...]


class Lane(NamedTuple):
    """What a job needs: of a worker, and of the limits that it falls under."""

    topic: str
    needs: frozenset[tuple[str, str]]
    buckets: tuple[Bucket, ...] = ()

    @classmethod
    def of(cls, job: Job, buckets: tuple[Bucket, ...] = ()) -> Lane:
        labels = job.request.labels
        if not labels:
            return cls(job.request.topic, _NOTHING, buckets)
        needs = {
            (key.removeprefix(PLACEMENT), value)
            for key, value in labels.items()
            if key.startswith(PLACEMENT)
        }
        return cls(job.request.topic, frozenset(needs), buckets)


_NOTHING: frozenset[tuple[str, str]] = frozenset()

_Entry = tuple[str, Lane]
"""(tenant, lane): one adding of a job. A job that is added again has another one."""
_Place = tuple[float, int, _Entry]
"""(rank, seq, entry): a place in a heap, good for as long as the entry is."""


class _Tenant:
    """One tenant's waiting jobs: a heap a lane, and a heap of the first of each lane."""

    __slots__ = ("_shown", "heads", "lanes", "shut", "time")

    def __init__(self, time: float) -> None:
        self.time = time
        self.lanes: dict[Lane, list[_Place]] = {}
        self.heads: list[_Place] = []
        """The first of each lane that is not shut, and what was or will be the first of one."""
        self.shut: set[Lane] = set()
        """Lanes that a limit keeps back."""
        self._shown: set[int] = set()
        """By `id`, what is in `heads`, or set aside from there: nothing is twice."""

    def show(self, place: _Place) -> None:
        if id(place) not in self._shown:
            self._shown.add(id(place))
            heapq.heappush(self.heads, place)

    def hide(self) -> None:
        self._shown.discard(id(heapq.heappop(self.heads)))

    def clear(self) -> None:
        self.lanes.clear()
        self.heads.clear()
        self.shut.clear()
        self._shown.clear()


class Backlog:
    """Every job that is ready or delayed, by the order in which it should go."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._delayed: list[tuple[float, int, _Entry, float]] = []
        self._shut: dict[Bucket, list[tuple[_Tenant, Lane]]] = {}
        """Lanes that wait until a limit has room again."""
        self._aside: list[tuple[_Tenant, _Place]] = []
        """Heads of lanes for which the last pick found no room."""
        self._clock = 0.0
        self._passed_over: list[_Tenant] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: int) -> bool:
        return seq in self._entries

    def add(self, job: Job, now: float, buckets: tuple[Bucket, ...] = ()) -> None:
        seq = job.seq
        if seq in self._entries:
            return
        request = job.request
        entry = (request.tenant, Lane.of(job, buckets))
        self._entries[seq] = entry
        order = rank(request, job.accepted_at)
        start = ready_at(request, job.accepted_at)
        if start > now:
            heapq.heappush(self._delayed, (start, seq, entry, order))
        else:
            self._enqueue((order, seq, entry))

    def _enqueue(self, place: _Place) -> None:
        name, lane = place[2]
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._clock)
        elif not tenant.lanes:
            tenant.time = max(tenant.time, self._clock)
        heap = tenant.lanes.get(lane)
        if heap is None:
            tenant.lanes[lane] = [place]
            tenant.show(place)
            return
        heapq.heappush(heap, place)
        if heap[0] is place and lane not in tenant.shut:
            tenant.show(place)

    def discard(self, seq: int) -> None:
        """Forget a job; its place in a heap is skipped when it comes up."""
        self._entries.pop(seq, None)

    def empty(self) -> list[int]:
        """Forget every job, and return them; tenants keep their turns."""
        seqs = list(self._entries)
        self._entries.clear()
        self._delayed.clear()
        self._shut.clear()
        self._aside.clear()
        for tenant in self._tenants.values():
            tenant.clear()
        return seqs

    def wake(self, now: float) -> float | None:
        """Let delayed jobs in whose time has come; return when the next one's will."""
        delayed, entries = self._delayed, self._entries
        while delayed:
            start, seq, entry, order = delayed[0]
            waits = entries.get(seq) is entry
            if waits and start > now:
                return start
            heapq.heappop(delayed)
            if waits:
                self._enqueue((order, seq, entry))
        return None

    def open(self, bucket: Bucket) -> None:
        """A limit may have room again: ask anew for the lanes that it shut."""
        for tenant, lane in self._shut.pop(bucket, ()):
            if lane in tenant.shut:
                tenant.shut.discard(lane)
                self._show(tenant, lane)

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
        for tenant, head in self._aside:
            heapq.heappush(tenant.heads, head)
        self._aside.clear()
        for tenant in self._passed_over:
            # Whom nobody could serve has saved up no turns for when somebody can.
            tenant.time = max(tenant.time, self._clock)
        self._passed_over.clear()
        turns = [(tenant.time, name) for name, tenant in self._tenants.items() if tenant.lanes]
        heapq.heapify(turns)
        while turns and has_room():
            time, name = turns[0]
            tenant = self._tenants[name]
            lane = self._best_lane(tenant, blocked)
            if lane is None:
                heapq.heappop(turns)
                self._passed_over.append(tenant)
                continue
            found = place(lane)
            if found is None:
                blocked.add(lane)
                continue
            if isinstance(found, Bucket):
                tenant.shut.add(lane)
                self._shut.setdefault(found, []).append((tenant, lane))
                continue
            tenant.hide()
            _, seq, _ = heapq.heappop(tenant.lanes[lane])
            del self._entries[seq]
            self._show(tenant, lane)
            self._clock = time
            tenant.time = time + 1
            heapq.heapreplace(turns, (tenant.time, name))
            yield seq, found

    def _best_lane(self, tenant: _Tenant, blocked: set[Lane]) -> Lane | None:
        """The lane whose first job is the tenant's next; that job is then the first head."""
        heads, lanes = tenant.heads, tenant.lanes
        while heads:
            head = heads[0]
            lane = head[2][1]
            heap = lanes.get(lane)
            if heap is None or heap[0] is not head or lane in tenant.shut:
                tenant.hide()
            elif self._entries.get(head[1]) is not head[2]:
                tenant.hide()
                self._show(tenant, lane)
            elif lane in blocked:
                self._aside.append((tenant, heapq.heappop(heads)))
            else:
                return lane
        return None

    def _show(self, tenant: _Tenant, lane: Lane) -> None:
        """Make the first of a lane a head again, or forget the lane."""
        heap = tenant.lanes.get(lane)
        if heap is None:
            return
        while heap and self._entries.get(heap[0][1]) is not heap[0][2]:
            heapq.heappop(heap)
        if heap:
            tenant.show(heap[0])
        else:
            del tenant.lanes[lane]
