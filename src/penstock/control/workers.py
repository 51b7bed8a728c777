"""Workers and pools: what is known of them, which one gets a job, and why none can take it.

Whatever decides how much a worker may be given (what it holds, its limit, whether it is
ready, the topics it paused, the pool's pause) is changed by the methods of `Roster` and by
nothing else: they record the worker in `changed`, and `Placement` looks only at those.

Workers with the same pool, topics, labels and paused topics have one *profile*. Jobs that the
same profiles can run share their candidates: for each pool a heap of workers, least busy
first. `Placement.refresh` updates the heaps with the workers that changed since the last time, so
that a turn costs nothing for the workers that did not change.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Any

from msgspec import Struct

from penstock.control.backlog import QueueKey
from penstock.ports.bus import Handshake
from penstock.ports.engine_api import PoolView, TopicView, WorkerView
from penstock.ports.executor import MODELS, PAUSED, REATTACHABLE, SCHEMA

DEFAULT_POOL = "default"
_MAX_KEYS = 10_000
"""Kinds of jobs whose candidates are remembered."""
_GLOB = re.compile(r"[*?[]")
_GONE = 1.0
"""The share of a worker that is forgotten: no entry says so."""


class Pool(Struct, frozen=True):
    """A named group of workers."""

    name: str
    topics: tuple[str, ...] = ()
    """Globs; empty means whatever its workers announce."""
    capacity: int | None = None
    """How many jobs it may hold at once, over all its workers."""
    labels: Mapping[str, str] = {}


MAX_WAITING = 1000
"""Jobs that may wait for their children on one worker before it is given only children."""


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """One worker. To be changed by the roster's methods only, but for `heard_at`."""

    worker_id: str
    pool: str = DEFAULT_POOL
    topics: tuple[str, ...] = ()
    slots: int = 0
    limit: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    """Attempts that it holds, by job id: by its own account and our dispatches."""
    waiting: set[str] = field(default_factory=set)
    """Jobs among them that wait for other jobs, and hold no slot."""
    is_crowded: bool = False
    """So many wait that it takes nothing but children."""
    host: str = ""
    pid: int = 0
    local: bool = False
    session: str = ""
    link: int = 0
    heard_at: float = 0.0
    """Monotonic."""
    missing_since: float | None = None
    """Monotonic time at which its connection dropped; None while it is connected."""
    draining: bool = False
    leaving_session: str | None = None
    """The session that was asked to drain, also after a lost connection."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What its executors report about themselves."""
    paused_topics: Mapping[str, str] = field(default_factory=dict)
    """Topics that it serves but can't run at present, and why."""
    reattachable: Mapping[str, int] = field(default_factory=dict)
    """Lost jobs to whose work it can reattach, by id, and their attempts."""
    reports_starts: bool = True
    """If not, a job that may run only once counts as started when it is dispatched."""

    @property
    def ready(self) -> bool:
        return self.missing_since is None and not self.draining

    @property
    def busy(self) -> int:
        """How many of its slots are taken."""
        return len(self.held) - len(self.waiting)

    @property
    def status(self) -> str:
        if self.missing_since is not None:
            return "missing"
        return "draining" if self.draining else "ready"


class Roster:
    """The workers and pools of one engine."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._workers: dict[str, WorkerRecord] = {}
        self._held: dict[str, dict[str, int]] = {}
        """What each worker holds; the records show the same dicts as read-only."""
        self.workers: Mapping[str, WorkerRecord] = self._workers
        self.pools: dict[str, Pool] = dict(pools)
        self.pools.setdefault(DEFAULT_POOL, Pool(DEFAULT_POOL))
        self._paused: set[str] = set()
        self.changed: dict[str, None] = {}
        """Workers, by id, that changed since the last placement."""
        self.changed_pools: set[str] = set()
        """Pools that were paused or resumed since the last placement."""

    @property
    def paused(self) -> frozenset[str]:
        """Pools whose workers are given nothing new."""
        return frozenset(self._paused)

    def pause(self, name: str) -> None:
        self._paused.add(name)
        self.changed_pools.add(name)

    def resume(self, name: str) -> None:
        self._paused.discard(name)
        self.changed_pools.add(name)

    def pool(self, name: str) -> Pool:
        """A pool that no setting names is created with its first worker."""
        return self.pools.setdefault(name, Pool(name))

    def worker(self, worker_id: str) -> WorkerRecord:
        record = self._workers.get(worker_id)
        if record is None:
            held = self._held[worker_id] = {}
            record = self._workers[worker_id] = WorkerRecord(worker_id, held=held)
            self.changed[worker_id] = None
        return record

    def greet(self, hello: Handshake, monotonic: float) -> WorkerRecord:
        """A worker came, or came back: its handshake replaces what was known of it."""
        self.pool(hello.pool)
        record = self.worker(hello.worker_id)
        record.pool, record.topics, record.labels = hello.pool, hello.topics, hello.labels
        record.slots = record.limit = hello.slots
        record.held = self._held[hello.worker_id] = dict(hello.held)
        record.waiting.clear()  # it says so again
        record.host, record.pid, record.local = hello.host, hello.pid, hello.local
        if hello.session != record.session:
            record.facts = record.paused_topics = {}
            record.reattachable = {}
        record.session, record.link = hello.session, hello.link
        record.reports_starts = hello.reports_starts
        record.heard_at = monotonic
        record.missing_since = None
        record.draining = hello.session == record.leaving_session
        self.changed[hello.worker_id] = None
        return record

    def heard(self, worker_id: str, monotonic: float) -> bool:
        """Record a heartbeat; False if no worker of that name has registered."""
        record = self._workers.get(worker_id)
        if record is None:
            return False
        record.heard_at = monotonic
        return record.slots > 0

    def hold(self, worker_id: str, job_id: str, attempt: int) -> None:
        """The worker, known or not, holds this attempt."""
        held = self._held.get(worker_id)
        if held is None:
            self.worker(worker_id)
            held = self._held[worker_id]
        held[job_id] = attempt
        self.changed[worker_id] = None

    def release(self, worker_id: str | None, job_id: str, attempt: int) -> None:
        """The worker no longer holds this attempt."""
        held = self._held.get(worker_id or "")
        if held is not None and held.get(job_id) == attempt:
            del held[job_id]
            self.changed[worker_id or ""] = None
            if self._workers[worker_id or ""].waiting:
                self.set_waiting(worker_id, job_id, waits=False)

    def set_waiting(self, worker_id: str | None, job_id: str, *, waits: bool) -> None:
        """A job that the worker holds waits for others, or goes on."""
        record = self._workers.get(worker_id or "")
        if record is None:
            return
        if waits and job_id in record.held:
            record.waiting.add(job_id)
        else:
            record.waiting.discard(job_id)
        most = MAX_WAITING // 2 if record.is_crowded else MAX_WAITING
        record.is_crowded = len(record.waiting) >= most
        self.changed[record.worker_id] = None

    def set_limit(self, worker_id: str, limit: int) -> None:
        """How many jobs the worker may hold from now on."""
        if (record := self._workers.get(worker_id)) is not None:
            record.limit = limit
            self.changed[worker_id] = None

    def has_capacity(self, worker_id: str | None) -> bool:
        """Whether the pool of a worker may hold one job more."""
        record = self._workers.get(worker_id or "")
        return record is None or not _is_full(self.pool(record.pool), self._workers.values())

    def set_facts(self, worker_id: str, session: str, facts: Mapping[str, Any]) -> None:
        """What the worker's executors report, if it is still the same process."""
        record = self._workers.get(worker_id)
        if record is not None and record.session == session:
            record.facts = facts
            paused = facts.get(PAUSED)
            record.paused_topics = paused if isinstance(paused, Mapping) else {}
            found = facts.get(REATTACHABLE)
            record.reattachable = found if isinstance(found, Mapping) else {}
            self.changed[worker_id] = None

    def set_missing(self, record: WorkerRecord, since: float) -> None:
        """The worker's connection dropped: it is given nothing until it comes back."""
        record.missing_since = since
        self.changed[record.worker_id] = None

    def drain(self, record: WorkerRecord) -> None:
        """The worker is given nothing more until it introduces itself again."""
        record.draining = True
        self.changed[record.worker_id] = None

    def ask_to_leave(self, record: WorkerRecord) -> None:
        """The worker's process is given nothing more, however often it introduces itself."""
        record.leaving_session = record.session
        self.drain(record)

    def who_reattaches(self, job_id: str, attempt: int) -> WorkerRecord | None:
        """A worker that can reattach to the work of a lost job."""
        for record in self._workers.values():
            if record.ready and record.reattachable.get(job_id) == attempt:
                return record
        return None

    def forget(self, record: WorkerRecord) -> None:
        """The worker is gone; not another one that has its name by now."""
        if self._workers.get(record.worker_id) is record:
            del self._workers[record.worker_id], self._held[record.worker_id]
            self.changed[record.worker_id] = None


# -- placement --------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def matches(topic: str, glob: str) -> bool:
    """Whether a topic matches a glob; a star crosses dots."""
    return fnmatchcase(topic, glob)


def serves(pool: Pool, worker: WorkerRecord | _Profile, key: QueueKey) -> bool:
    """Whether the worker could ever run jobs with this key."""
    if not _pool_serves(pool, key.topic):
        return False
    if not any(matches(key.topic, glob) for glob in worker.topics):
        return False
    return all(worker.labels.get(name, pool.labels.get(name)) == value for name, value in key.needs)


def _pool_serves(pool: Pool, topic: str) -> bool:
    return not pool.topics or any(matches(topic, glob) for glob in pool.topics)


class _PoolRoom:
    """How much of one pool is used."""

    __slots__ = ("candidates", "capacity", "closed", "free", "held", "name", "paused")

    def __init__(self, pool: Pool, *, paused: bool) -> None:
        self.name, self.paused, self.capacity = pool.name, paused, pool.capacity
        self.held = self.free = 0
        """What its workers hold; and the room of those that are ready, whatever the capacity."""
        self.closed = False
        """Whether it is given nothing: it is paused, or at its capacity."""
        self.candidates: list[_Candidates] = []
        """Those that contain workers of this pool."""

    def check(self) -> bool:
        """Find out whether it is closed; True if it was and is no more."""
        was_closed = self.closed
        self.closed = self.paused or (self.capacity is not None and self.held >= self.capacity)
        return was_closed and not self.closed


@dataclass(slots=True, eq=False)
class _Profile:
    """Workers that can run the same jobs."""

    pool: _PoolRoom
    topics: tuple[str, ...]
    labels: Mapping[str, str]
    paused_topics: frozenset[str]
    is_crowded: bool
    members: dict[_Member, None] = field(default_factory=dict)
    heaps: list[_WorkerHeap] = field(default_factory=list)

    def is_of(self, worker: WorkerRecord) -> bool:
        return (
            worker.pool == self.pool.name
            and worker.topics == self.topics
            and worker.labels == self.labels
            and worker.paused_topics.keys() == self.paused_topics
            and worker.is_crowded == self.is_crowded
        )


@dataclass(slots=True, eq=False)
class _Member:
    """What the placement counts for one worker."""

    worker: WorkerRecord
    worker_id: str
    profile: _Profile
    number: int
    """Decides between workers that are equally busy."""
    held: int = 0
    """Jobs that it holds or was given in this turn."""
    limit: int = 0
    free: int = 0
    share: float = 0.0
    """Minus the share of its limit that is free."""


_Entry = tuple[float, int, _Member]
"""(minus the share of the worker's slots that is free, its number, the worker)"""


class _WorkerHeap:
    """Workers of one pool with free room, the least busy first.

    An entry may promise too much, as the worker got jobs since: it is corrected when it
    comes first. It never promises too little: a worker that has more room is offered anew.
    """

    __slots__ = ("current", "heap", "owner", "pool")

    def __init__(self, owner: _Candidates, pool: _PoolRoom) -> None:
        self.owner, self.pool = owner, pool
        self.heap: list[_Entry] = []
        self.current: dict[_Member, _Entry] = {}
        """The one entry of each worker that counts."""

    def offer(self, member: _Member) -> None:
        old = self.current.get(member)
        if old is None or member.share < old[0]:
            entry = self.current[member] = (member.share, member.number, member)
            heappush(self.heap, entry)
            if len(self.heap) > 2 * len(self.current) + 64:
                self.heap = list(self.current.values())
                heapify(self.heap)

    def first(self) -> _Entry | None:
        """The entry of the least busy worker that has room."""
        heap, current = self.heap, self.current
        while heap:
            entry = heap[0]
            member = entry[2]
            if current.get(member) is not entry:
                heappop(heap)
            elif entry[0] == member.share:
                return entry
            elif member.free:
                current[member] = entry = (member.share, entry[1], member)
                heapreplace(heap, entry)
            else:
                heappop(heap)
                del current[member]
        return None


class _Candidates:
    """The workers of a set of profiles, by pool."""

    __slots__ = ("heaps", "refused")

    def __init__(self, profiles: Iterable[_Profile]) -> None:
        self.refused: dict[QueueKey, None] = {}
        """Queue keys without a free worker, since a worker last may have become free."""
        by_pool: dict[_PoolRoom, _WorkerHeap] = {}
        for profile in profiles:
            heap = by_pool.get(profile.pool)
            if heap is None:
                heap = by_pool[profile.pool] = _WorkerHeap(self, profile.pool)
                profile.pool.candidates.append(self)
            profile.heaps.append(heap)
            for member in profile.members:
                if member.free > 0:
                    heap.offer(member)
        self.heaps = list(by_pool.values())


class Placement:
    """Finds the least busy worker for a job.

    What it gives out in a turn is counted until the next `refresh`, which counts what the
    workers really hold: what was not committed is free again.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._members: dict[str, _Member] = {}
        self._pools: dict[str, _PoolRoom] = {}
        self._profiles: dict[tuple[object, ...], _Profile] = {}
        self._candidates: dict[QueueKey, _Candidates] = {}
        """By key without buckets."""
        self._shared: dict[frozenset[_Profile], _Candidates] = {}
        self._given: dict[str, None] = {}
        """Workers that were given something since the last refresh."""
        self._freed: dict[QueueKey, None] = {}
        self._numbers = count()
        self._last_key: QueueKey | None = None
        self._last = _Candidates(())

    # -- changes ------------------------------------------------------------------

    def refresh(self) -> None:
        """Begin a turn: take in what changed since the last one."""
        roster = self._roster
        if roster.changed_pools:
            for name in roster.changed_pools:
                if (pool := self._pools.get(name)) is not None:
                    pool.paused = name in roster.paused
                    if pool.check():
                        self._reopen(pool)
            roster.changed_pools.clear()
        if roster.changed or self._given:
            changed = self._given | roster.changed
            self._given.clear()
            roster.changed.clear()
            for worker_id in changed:
                self._update(worker_id)

    def freed(self) -> list[QueueKey]:
        """Keys (without buckets) that found no room, and may find some now."""
        freed = list(self._freed)
        self._freed.clear()
        return freed

    def _update(self, worker_id: str) -> None:
        worker, member = self._roster.workers.get(worker_id), self._members.get(worker_id)
        if member is not None and (worker is not member.worker or not member.profile.is_of(worker)):
            self._remove(member)
            member = None
        if worker is None:
            return
        if member is None:
            profile = self._profile(worker)
            member = _Member(worker, worker_id, profile, next(self._numbers))
            self._members[worker_id] = member
            profile.members[member] = None
        pool, held = member.profile.pool, worker.busy
        free = max(0, worker.limit - held) if worker.ready else 0
        pool.held += held - member.held
        pool.free += free - member.free
        if pool.check():
            self._reopen(pool)
        member.held, member.free, member.limit = held, free, worker.limit
        member.share = -free / worker.limit if free else 0.0
        if free:
            for heap in member.profile.heaps:
                heap.offer(member)
                if heap.owner.refused and not pool.closed:
                    self._free(heap.owner)

    def _remove(self, member: _Member) -> None:
        del self._members[member.worker_id]
        del member.profile.members[member]
        member.share = _GONE
        for heap in member.profile.heaps:
            heap.current.pop(member, None)
        pool = member.profile.pool
        pool.held -= member.held
        pool.free -= member.free
        if pool.check():
            self._reopen(pool)

    def _profile(self, worker: WorkerRecord) -> _Profile:
        labels, paused = frozenset(worker.labels.items()), frozenset(worker.paused_topics)
        identity = (worker.pool, worker.topics, labels, paused, worker.is_crowded)
        profile = self._profiles.get(identity)
        if profile is None:
            self._forget_candidates()
            pool = self._pool(worker.pool)
            crowded = worker.is_crowded
            profile = _Profile(pool, worker.topics, worker.labels, paused, crowded)
            self._profiles[identity] = profile
        return profile

    def _pool(self, name: str) -> _PoolRoom:
        pool = self._pools.get(name)
        if pool is None:
            paused = name in self._roster.paused
            pool = self._pools[name] = _PoolRoom(self._roster.pool(name), paused=paused)
            pool.check()
        return pool

    def _forget_candidates(self) -> None:
        """Workers of a new kind are here: who can run what is found out again when asked."""
        for candidates in self._candidates.values():
            self._free(candidates)
        self._candidates.clear()
        self._shared.clear()
        self._last_key = None
        for pool in self._pools.values():
            pool.candidates.clear()
        self._profiles = {name: each for name, each in self._profiles.items() if each.members}
        for profile in self._profiles.values():
            profile.heaps.clear()

    def _reopen(self, pool: _PoolRoom) -> None:
        for candidates in pool.candidates:
            self._free(candidates)

    def _free(self, candidates: _Candidates) -> None:
        self._freed.update(candidates.refused)
        candidates.refused.clear()

    # -- questions ----------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether any worker has room for anything."""
        return any(pool.free > 0 and not pool.closed for pool in self._pools.values())

    def find(self, key: QueueKey) -> str | None:
        """The least busy worker that can run a job with this key; it is counted as given."""
        if key is not self._last_key:
            self._last_key, self._last = key, self._candidates_for(key)
        best: _WorkerHeap | None = None
        found: _Entry | None = None
        for heap in self._last.heaps:
            if heap.heap and not heap.pool.closed:
                entry: _Entry | None = heap.heap[0]
                if entry is None or entry[0] != entry[2].share:
                    entry = heap.first()
                if entry is not None and (found is None or entry < found):
                    found, best = entry, heap
        if found is None or best is None:
            self._last.refused[key.without_buckets] = None
            return None
        _, number, member = found
        member.free = free = member.free - 1
        member.share = share = -free / member.limit
        if free:
            found = best.current[member] = (share, number, member)
            heapreplace(best.heap, found)
        pool = best.pool
        pool.free -= 1
        if pool.capacity is not None:
            member.held += 1
            pool.held += 1
            pool.check()
        worker_id = member.worker_id
        self._given[worker_id] = None
        return worker_id

    def _candidates_for(self, key: QueueKey) -> _Candidates:
        key = key.without_buckets
        candidates = self._candidates.get(key)
        if candidates is None:
            if len(self._candidates) >= _MAX_KEYS:
                self._forget_candidates()
            profiles = [each for each in self._profiles.values() if self._can_run(each, key)]
            together = frozenset(profiles)
            candidates = self._shared.get(together)
            if candidates is None:
                candidates = self._shared[together] = _Candidates(profiles)
            self._candidates[key] = candidates
        return candidates

    def _can_run(self, profile: _Profile, key: QueueKey) -> bool:
        pool = self._roster.pools[profile.pool.name]
        if profile.is_crowded and not key.is_child:
            return False
        return key.topic not in profile.paused_topics and serves(pool, profile, key)


# -- views --------------------------------------------------------------------------


def worker_view(worker: WorkerRecord, monotonic: float) -> WorkerView:
    return WorkerView(
        worker_id=worker.worker_id,
        pool=worker.pool,
        topics=worker.topics,
        slots=worker.slots,
        limit=worker.limit,
        held=len(worker.held),
        labels=worker.labels,
        host=worker.host,
        pid=worker.pid,
        local=worker.local,
        status=worker.status,
        silent_for=0.0 if worker.local else max(0.0, monotonic - worker.heard_at),
        facts=worker.facts,
    )


def pool_view(roster: Roster, name: str) -> PoolView:
    pool = roster.pool(name)
    members = [worker for worker in roster.workers.values() if worker.pool == name]
    return PoolView(
        name=name,
        topics=pool.topics or tuple(sorted({t for worker in members for t in worker.topics})),
        capacity=pool.capacity,
        held=sum(len(worker.held) for worker in members),
        workers=len(members),
        labels=pool.labels,
        paused=name in roster.paused,
    )


# -- in words ---------------------------------------------------------------------


def paused_everywhere(workers: Iterable[WorkerRecord]) -> dict[str, str]:
    """Topics that none of the workers that serve them can run at present, and why."""
    present = [w for w in workers if w.ready]
    paused = {topic: why for w in present for topic, why in w.paused_topics.items()}
    return {topic: why for topic, why in paused.items() if not any(_can(w, topic) for w in present)}


def models_of(workers: Iterable[WorkerRecord]) -> dict[str, Mapping[str, Any]]:
    """What the workers report of their language models, by topic."""
    found: dict[str, Mapping[str, Any]] = {}
    for worker in workers:
        models = worker.facts.get(MODELS) if worker.ready else None
        if isinstance(models, Mapping):
            found |= {topic: facts for topic, facts in models.items() if isinstance(facts, Mapping)}
    return found


def describe_topics(workers: Iterable[WorkerRecord]) -> list[TopicView]:
    """The topics that callers may use, and what their workers announced about them."""
    known = list(workers)
    announced = {name: fact for w in known for name, fact in w.facts.items() if _is_schema(name)}
    paused, views = paused_everywhere(known), []
    for topic in sorted({topic for w in known for topic in w.topics}):
        facts = announced.get(SCHEMA + topic, {})
        if isinstance(facts, Mapping) and not _GLOB.search(topic):
            views.append(
                TopicView(
                    topic=topic,
                    description=str(facts.get("description", "")),
                    input_schema=facts.get("input"),
                    output_schema=facts.get("output"),
                    paused=paused.get(topic, ""),
                )
            )
    return views


def _is_schema(name: str) -> bool:
    return name.startswith(SCHEMA)


def _can(worker: WorkerRecord, topic: str) -> bool:
    served = any(matches(topic, glob) for glob in worker.topics)
    return served and topic not in worker.paused_topics


def why_waiting(
    key: QueueKey,
    workers: Iterable[WorkerRecord],
    pools: Mapping[str, Pool],
    paused: Collection[str] = (),
) -> str:
    """The reason, in a sentence, why no job with this key is dispatched right now."""
    everyone = list(workers)
    if not any(_pool_serves(pool, key.topic) for pool in pools.values()):
        return f"no pool serves the topic {key.topic}"
    known = [w for w in everyone if any(matches(key.topic, glob) for glob in w.topics)]
    if not known:
        return f"no worker is here that serves the topic {key.topic}"
    able = [w for w in known if serves(pools[w.pool], w, key)]
    if not able:
        wanted = ", ".join(f"{name}={value}" for name, value in sorted(key.needs))
        return f"no worker that serves {key.topic} has the labels {wanted}"
    present = [w for w in able if w.ready]
    if not present:
        return "every worker that could run it is missing or draining"
    if all(w.pool in paused for w in present):
        return _paused(sorted({w.pool for w in present}))
    present = [w for w in present if w.pool not in paused]
    reasons = {why for w in present if (why := w.paused_topics.get(key.topic))}
    present = [w for w in present if key.topic not in w.paused_topics]
    if not present:
        return f"the topic {key.topic} is paused: {'; '.join(sorted(reasons))}"
    full = {w.pool for w in present if _is_full(pools[w.pool], everyone)}
    if full >= {w.pool for w in present}:
        return f"the pool {', '.join(sorted(full))} is at its capacity"
    if not key.is_child and all(w.is_crowded for w in present):
        waiting = sum(len(w.waiting) for w in present)
        return (
            f"{waiting} jobs on {len(present)} workers wait for their children: until fewer than"
            f" {MAX_WAITING // 2} do, a worker is given only children"
        )
    if all(w.busy >= w.limit for w in present):
        busy = sum(w.busy for w in present)
        return f"all workers that could run it are busy ({busy} jobs on {len(present)})"
    return "it is about to be dispatched"


def _is_full(pool: Pool, workers: Iterable[WorkerRecord]) -> bool:
    if pool.capacity is None:
        return False
    return sum(w.busy for w in workers if w.pool == pool.name) >= pool.capacity


def _paused(names: list[str]) -> str:
    if len(names) == 1:
        return f"the pool {names[0]} is paused"
    return f"the pools {', '.join(names)} are paused"
