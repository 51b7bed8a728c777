"""The queue of waiting jobs, and which of them goes next.

Tenants take turns: each has a virtual time that advances with every job of its own that is
picked, and the tenant that is furthest behind goes first. Within a tenant the order is
`penstock.core.job.rank`: priority, softened by age.

Jobs with the same `QueueKey` need the same resources: room at a worker, and room within the
limits that they count against. A tenant's jobs with one key are a `TenantQueue`. When a resource
is exhausted, the queues that need it are set aside as their turn comes, and come back one
by one, in the order of turns, once it may have room again: a pick costs the same however many
tenants and queues wait for something else.

Discarded jobs stay in the heaps until they come up, or until they are the larger part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

from penstock.control.limits import Bucket
from penstock.core.job import Job, rank, ready_at

PLACEMENT = "place."
"""A label `place.gpu=yes` asks for a worker with the label `gpu=yes`. Others don't matter."""
_MAX_IDLE = 100
"""Tenants without jobs that are remembered until their turn would have come."""
_SLACK = 1000
"""Stale entries that are never worth a clean-up."""


class QueueKey(NamedTuple):
    """What a job needs: of a worker, and of the limits that it counts against."""

    topic: str
    needs: frozenset[tuple[str, str]]
    """Labels, as name and value, that the worker must have."""
    buckets: tuple[Bucket, ...] = ()
    is_child: bool = False
    """Whether another job submitted it: a worker with many waiting parents takes no others."""

    @classmethod
    def of(cls, job: Job, buckets: tuple[Bucket, ...] = ()) -> QueueKey:
        topic, labels = job.request.topic, job.request.labels
        is_child = job.request.child_of is not None
        needs = _NOTHING
        if labels:
            needs = frozenset(
                [
                    (key.removeprefix(PLACEMENT), value)
                    for key, value in labels.items()
                    if key.startswith(PLACEMENT)
                ]
            )
        if needs or buckets:
            return cls(topic, needs, buckets, is_child)
        return _plain(topic, is_child)

    @property
    def without_buckets(self) -> QueueKey:
        """What it needs of a worker."""
        if not self.buckets:
            return self
        if self.needs:
            return QueueKey(self.topic, self.needs, is_child=self.is_child)
        return _plain(self.topic, self.is_child)


_NOTHING: frozenset[tuple[str, str]] = frozenset()


@lru_cache(maxsize=1000)
def _plain(topic: str, is_child: bool) -> QueueKey:
    """The key of most jobs; one object a topic, which is found faster than an equal one."""
    return QueueKey(topic, _NOTHING, is_child=is_child)


class _Resource:
    """Something that may be exhausted: workers for a key without buckets, or a limit's bucket."""

    __slots__ = ("exhausted", "name", "queues", "turn", "waiting")

    def __init__(self, name: QueueKey | Bucket) -> None:
        self.name = name
        self.queues = 0
        """How many need it."""
        self.exhausted = False
        self.waiting: list[tuple[int, str, TenantQueue]] = []
        """Queues that were set aside, by the virtual time that their tenant had then."""
        self.turn: _Turn | None = None
        """Its entry in the order of turns, for the first of the waiting, while it has room."""

    def __lt__(self, other: object) -> bool:
        return True  # a tenant's turn comes when all its queues are back


class _Tenant:
    """One tenant's queues, and which of them has its next job."""

    __slots__ = ("has_turn", "heads", "name", "queues", "time")

    def __init__(self, name: str, time: int) -> None:
        self.name, self.time = name, time
        self.queues: dict[QueueKey, TenantQueue] = {}
        self.heads: list[_Entry] = []
        """A heap of the first job of each queue that is not set aside, and of stale entries."""
        self.has_turn = False
        """Whether it is in the order of turns."""

    def __lt__(self, other: object) -> bool:
        return False


class TenantQueue:
    """One tenant's jobs with one key, by rank and then by order of acceptance."""

    __slots__ = ("aside", "fifo", "heads", "heap", "key", "length", "resources", "tenant")

    def __init__(self, tenant: _Tenant, key: QueueKey, resources: list[_Resource]) -> None:
        self.tenant, self.key, self.resources = tenant, key, resources
        self.length = 0
        """How many of its entries count."""
        self.fifo: deque[_Entry] = deque()
        """Entries that came in order."""
        self.heap: list[_Entry] = []
        """Entries that did not."""
        self.heads: list[_Entry] = []
        """Those of its entries that are among the tenant's heads, the first one last."""
        self.aside = False
        """Whether it waits for a resource: nothing of it is then a head."""

    def __lt__(self, other: object) -> bool:
        return False  # entries differ before this, unless they are the same job's

    def push(self, entry: _Entry) -> None:
        fifo = self.fifo
        if not fifo or fifo[-1] < entry:
            fifo.append(entry)
        else:
            heappush(self.heap, entry)
        self.length += 1

    def first(self, waiting: dict[int, _Entry | _Delay]) -> _Entry | None:
        """The first entry that counts; stale ones before it are dropped."""
        fifo, heap = self.fifo, self.heap
        while fifo and waiting.get(fifo[0][1]) is not fifo[0]:
            fifo.popleft()
        while heap and waiting.get(heap[0][1]) is not heap[0]:
            heappop(heap)
        if heap and (not fifo or heap[0] < fifo[0]):
            return heap[0]
        return fifo[0] if fifo else None


_Entry = tuple[float, int, TenantQueue]
"""(rank, seq, queue)"""
_Delay = tuple[float, int, str, QueueKey, float]
"""(start, seq, tenant, key, rank)"""
_Turn = tuple[int, str, _Tenant | _Resource]
"""(virtual time, tenant's name, the tenant, or the resource that the tenant's queue awaits)"""


class Backlog:
    """Every job that is ready or delayed, in the order in which it should go."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Entry | _Delay] = {}
        """The one entry, by seq, that counts."""
        self._delayed: list[_Delay] = []
        self._tenants: dict[str, _Tenant] = {}
        self._idle: dict[str, _Tenant] = {}
        """Tenants without jobs, the longest idle first."""
        self._turns: list[_Turn] = []
        self._resources: dict[QueueKey | Bucket, _Resource] = {}
        """Workers by key without buckets, and limits by bucket."""
        self._no_worker: dict[_Resource, None] = {}
        """Those that are exhausted as no worker had room."""
        self._exhausted = 0
        """How many resources are."""
        self._clock = 0
        """The virtual time of the last pick."""
        self._start = 0
        """The virtual time of forgotten tenants: nobody gains a turn by being forgotten."""
        self._stale = 0
        """How many entries were discarded since the heaps were built."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: int) -> bool:
        return seq in self._waiting

    # -- coming and going ---------------------------------------------------------

    def add(
        self,
        job: Job,
        now: float,
        buckets: tuple[Bucket, ...] = (),
        order: float | None = None,
    ) -> None:
        """Let a job wait; `order` is its rank, if that is not its own."""
        seq = job.seq
        if seq in self._waiting:
            return
        request, accepted_at = job.request, job.accepted_at
        key = QueueKey.of(job, buckets)
        if order is None:
            order = rank(request, accepted_at)
        start = ready_at(request, accepted_at)
        if start > now:
            delay = (start, seq, request.tenant, key, order)
            self._waiting[seq] = delay
            heappush(self._delayed, delay)
        else:
            self._enqueue(request.tenant, key, order, seq)

    def wake(self, now: float) -> float | None:
        """Enqueue delayed jobs whose time has come; return the time of the next one."""
        delayed = self._delayed
        while delayed:
            delay = delayed[0]
            start, seq, tenant, key, order = delay
            waits = self._waiting.get(seq) is delay
            if waits and start > now:
                return start
            heappop(delayed)
            if waits:
                self._enqueue(tenant, key, order, seq)
        return None

    def discard(self, seq: int) -> None:
        """Forget a job; its entry is skipped when it comes up."""
        entry = self._waiting.pop(seq, None)
        if entry is None:
            return
        if len(entry) == 3:
            queue = entry[2]
            queue.length -= 1
            if not queue.length:
                self._remove(queue)
        self._stale += 1
        if self._stale > len(self._waiting) + _SLACK:
            self._rebuild()

    def empty(self) -> list[int]:
        """Forget every job, and return them; tenants keep their turns."""
        seqs = list(self._waiting)
        for heap in (self._waiting, self._delayed, self._turns, self._resources, self._no_worker):
            heap.clear()
        self._exhausted = self._stale = 0
        for tenant in self._tenants.values():
            tenant.queues.clear()
            tenant.heads.clear()
            tenant.has_turn = False
        self._idle = dict(self._tenants)
        return seqs

    def _rebuild(self) -> None:
        """Drop all stale entries."""
        entries = list(self._waiting.values())
        self.empty()
        for entry in entries:
            if len(entry) == 3:
                order, seq, queue = entry
                self._enqueue(queue.tenant.name, queue.key, order, seq)
            else:
                self._waiting[entry[1]] = entry
                heappush(self._delayed, entry)

    def _enqueue(self, name: str, key: QueueKey, order: float, seq: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, max(self._start, self._clock))
        elif not tenant.queues:
            del self._idle[name]
            tenant.time = max(tenant.time, self._clock)
        queue = tenant.queues.get(key)
        if queue is None:
            needed = [self._resource(key.without_buckets), *map(self._resource, key.buckets)]
            queue = tenant.queues[key] = TenantQueue(tenant, key, needed)
        entry = (order, seq, queue)
        self._waiting[seq] = entry
        queue.push(entry)
        if not queue.aside and (not queue.heads or entry < queue.heads[-1]):
            self._show(queue, entry)

    def _remove(self, queue: TenantQueue) -> None:
        """Forget a queue that is empty, and its tenant if it has no other."""
        tenant, idle = queue.tenant, self._idle
        del tenant.queues[queue.key]
        for resource in queue.resources:
            self._release(resource)
        if tenant.queues:
            return
        idle[tenant.name] = tenant
        while idle:
            name, longest = next(iter(idle.items()))
            if longest.time > self._clock and len(idle) <= _MAX_IDLE:
                break
            self._start = max(self._start, longest.time)
            del idle[name], self._tenants[name]

    # -- resources ----------------------------------------------------------------

    def open(self, bucket: Bucket) -> None:
        """A limit may have room again: let the queues that wait for it come back."""
        if (resource := self._resources.get(bucket)) is not None:
            self._reopen(resource)

    def _resource(self, name: QueueKey | Bucket) -> _Resource:
        """The resource, for one queue more."""
        resource = self._resources.get(name)
        if resource is None:
            resource = self._resources[name] = _Resource(name)
        resource.queues += 1
        return resource

    def _release(self, resource: _Resource) -> None:
        """Forget a resource that no queue needs any more."""
        resource.queues -= 1
        if not resource.queues and self._resources.pop(resource.name, None) is not None:
            self._no_worker.pop(resource, None)
            self._exhausted -= resource.exhausted

    def _exhaust(self, resource: _Resource) -> None:
        if not resource.exhausted:
            resource.exhausted = True
            resource.turn = None
            self._exhausted += 1

    def _reopen(self, resource: _Resource) -> None:
        if resource.exhausted:
            resource.exhausted = False
            self._exhausted -= 1
            if resource.waiting:
                time, name, _ = resource.waiting[0]
                resource.turn = (time, name, resource)
                heappush(self._turns, resource.turn)

    # -- turns --------------------------------------------------------------------

    def pick(
        self,
        place: Callable[[QueueKey], str | Bucket | None],
        has_room: Callable[[], bool] = lambda: True,
        freed: Callable[[], Iterable[QueueKey]] | None = None,
    ) -> Iterator[tuple[int, str]]:
        """Yield (seq, worker) in fair order for as long as `place` finds room.

        What is yielded has left the backlog. `place` is asked once a job. It answers None
        when no worker has room for the key: the key is not tried again until `freed` names
        it (without buckets), or until the next pick if there is no `freed`. Or it answers
        with a bucket that is full: its keys are not tried again until it is opened.
        The pick ends when there is no room for anything.
        """
        if freed is None:
            again = list(self._no_worker)
        else:
            again = [r for r in map(self._resources.get, freed()) if r in self._no_worker]
        for resource in again:
            del self._no_worker[resource]
            self._reopen(resource)
        turns, waiting = self._turns, self._waiting
        while turns:
            turn = turns[0]
            time, name, tenant = turn
            if isinstance(tenant, _Resource):
                self._bring_back(turn, tenant)
                continue
            heads = tenant.heads
            if not heads:
                heappop(turns)
                tenant.has_turn = False
                continue
            if time != tenant.time:  # it had no jobs for a while
                heapreplace(turns, (tenant.time, name, tenant))
                continue
            entry = heads[0]
            seq, queue = entry[1], entry[2]
            if queue.aside or waiting.get(seq) is not entry:
                self._drop_head(tenant)
                continue
            if self._exhausted and self._set_aside(queue):
                continue
            found = place(queue.key)
            if isinstance(found, str):
                if time < self._clock:
                    time = self._clock  # it could not be served, and has saved up no turns
                self._clock = time
                tenant.time = time = time + 1
                del waiting[seq]
                queue.length -= 1
                fifo = queue.fifo
                if fifo and fifo[0] is entry:
                    fifo.popleft()
                else:
                    heappop(queue.heap)
                if queue.length and fifo and not queue.heap and len(queue.heads) == 1:
                    queue.heads[0] = entry = fifo[0]
                    heapreplace(heads, entry)
                else:
                    self._drop_head(tenant)
                    if not queue.length:
                        self._remove(queue)
                if tenant.queues:
                    heapreplace(turns, (time, name, tenant))
                else:
                    heappop(turns)
                    tenant.has_turn = False
                yield seq, found
            elif found is None:
                if not has_room():
                    return
                self._no_worker[queue.resources[0]] = None
                self._exhaust(queue.resources[0])
            else:
                self._exhaust(self._resources[found])

    def _drop_head(self, tenant: _Tenant) -> None:
        """Drop the first of a tenant's heads; another one of its queue may follow."""
        entry = heappop(tenant.heads)
        queue = entry[2]
        if queue.heads[-1] is entry:
            queue.heads.pop()
        else:
            queue.heads.remove(entry)
        if not queue.aside:
            self._show_first(queue)

    def _show_first(self, queue: TenantQueue) -> None:
        first = queue.first(self._waiting)
        if first is not None and (not queue.heads or queue.heads[-1] is not first):
            self._show(queue, first)

    def _show(self, queue: TenantQueue, entry: _Entry) -> None:
        """Let the first job of a queue be among its tenant's heads."""
        tenant = queue.tenant
        queue.heads.append(entry)
        heappush(tenant.heads, entry)
        if not tenant.has_turn:
            tenant.has_turn = True
            heappush(self._turns, (tenant.time, tenant.name, tenant))

    def _set_aside(self, queue: TenantQueue) -> bool:
        """Let a queue whose turn it is wait for a resource that is exhausted, if any is."""
        for resource in queue.resources:
            if resource.exhausted:
                tenant = queue.tenant
                queue.aside = True
                self._drop_head(tenant)
                heappush(resource.waiting, (tenant.time, tenant.name, queue))
                return True
        return False

    def _bring_back(self, turn: _Turn, resource: _Resource) -> None:
        """Let the first queue that waits for a resource have its turn again."""
        if resource.turn is not turn:
            heappop(self._turns)  # it is exhausted again
            return
        _, _, queue = heappop(resource.waiting)
        if resource.waiting:
            time, name, _ = resource.waiting[0]
            resource.turn = (time, name, resource)
            heapreplace(self._turns, resource.turn)
        else:
            resource.turn = None
            heappop(self._turns)
        queue.aside = False
        self._show_first(queue)
