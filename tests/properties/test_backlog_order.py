"""The backlog against a plain one that looks at every job each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.control.backlog import Backlog, QueueKey
from penstock.control.limits import Bucket
from penstock.core.job import Job, Priority, rank, ready_at
from penstock.testing.samples import T0, a_job

Place = Callable[[QueueKey], str | Bucket | None]


class PlainBacklog:
    """The same promises, kept by looking through everything."""

    def __init__(self) -> None:
        self.jobs: dict[int, tuple[Job, QueueKey]] = {}
        self.times: dict[str, int] = {}
        self.awake: set[int] = set()
        self.clock = 0

    def add(self, job: Job, now: float, buckets: tuple[Bucket, ...]) -> None:
        if job.seq not in self.jobs:
            self.jobs[job.seq] = (job, QueueKey.of(job, buckets))
            self.wake(now)

    def wake(self, now: float) -> None:
        for seq, (job, _) in self.jobs.items():
            if seq not in self.awake and ready_at(job.request, job.accepted_at) <= now:
                tenant = job.request.tenant
                if not self.awake_of(tenant):
                    self.times[tenant] = max(self.times.get(tenant, self.clock), self.clock)
                self.awake.add(seq)

    def discard(self, seq: int) -> None:
        self.jobs.pop(seq, None)
        self.awake.discard(seq)

    def begin_anew(self) -> None:
        """Who comes back has saved up no turns."""
        for tenant in self.times:
            if self.awake_of(tenant):
                self.times[tenant] = max(self.times[tenant], self.clock)

    def awake_of(self, tenant: str) -> list[tuple[float, int, QueueKey]]:
        return sorted(
            (rank(job.request, job.accepted_at), seq, key)
            for seq, (job, key) in self.jobs.items()
            if seq in self.awake and job.request.tenant == tenant
        )

    def pick(self, place: Place) -> Iterator[tuple[int, str]]:
        blocked: set[QueueKey] = set()
        left = {tenant for tenant in self.times if self.awake_of(tenant)}
        while left:
            time, tenant = min((self.times[tenant], tenant) for tenant in left)
            for _, seq, key in self.awake_of(tenant):
                if key in blocked:
                    continue
                found = place(key)
                if isinstance(found, str):
                    self.discard(seq)
                    self.clock = max(self.clock, time)  # nobody has saved up turns
                    self.times[tenant] = self.clock + 1
                    if not self.awake_of(tenant):
                        left.discard(tenant)
                    yield seq, found
                    break
                blocked.add(key)
            else:
                left.discard(tenant)


class Room:
    """So many places by topic, and by bucket."""

    def __init__(self, topics: dict[str, int], buckets: dict[Bucket, int]) -> None:
        self.topics, self.buckets = dict(topics), dict(buckets)

    def place(self, key: QueueKey) -> str | Bucket | None:
        for bucket in key.buckets:
            if not self.buckets.get(bucket, 0):
                return bucket
        if not self.topics.get(key.topic, 0):
            return None
        self.topics[key.topic] -= 1
        for bucket in key.buckets:
            self.buckets[bucket] -= 1
        return "w"

    def has_room(self) -> bool:
        return any(self.topics.values())


TOPICS = ["job.a", "job.b"]
BUCKETS = [Bucket("l", (key,)) for key in "xyz"]
some_buckets = st.lists(st.sampled_from(BUCKETS), max_size=2, unique=True).map(tuple)


class BacklogMachine(RuleBasedStateMachine):
    """Whatever is done to both, both say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.plain = Backlog(), PlainBacklog()
        self.all: list[Job] = []
        self.now = T0

    @rule(
        tenant=st.sampled_from("ABC"),
        topic=st.sampled_from(TOPICS),
        priority=st.sampled_from(Priority),
        delay=st.sampled_from([0.0, 0.0, 2.0, 700.0]),
        buckets=some_buckets,
    )
    def add(
        self,
        tenant: str,
        topic: str,
        priority: Priority,
        delay: float,
        buckets: tuple[Bucket, ...],
    ) -> None:
        seq = len(self.all) + 1
        job = a_job(
            f"j{seq}",
            seq=seq,
            at=self.now,
            tenant=tenant,
            topic=topic,
            priority=priority,
            run_at=self.now + delay if delay else None,
        )
        self.all.append(job)
        self.real.add(job, self.now, buckets)
        self.plain.add(job, self.now, buckets)

    @rule(which=st.integers(0, 100), buckets=some_buckets)
    def add_again(self, which: int, buckets: tuple[Bucket, ...]) -> None:
        """Perhaps under other limits than before."""
        if self.all:
            job = self.all[which % len(self.all)]
            self.real.add(job, self.now, buckets)
            self.plain.add(job, self.now, buckets)

    @rule(which=st.integers(0, 100))
    def discard(self, which: int) -> None:
        if self.all:
            seq = self.all[which % len(self.all)].seq
            self.real.discard(seq)
            self.plain.discard(seq)

    @rule(seconds=st.sampled_from([0.5, 5.0, 400.0]))
    def let_pass(self, seconds: float) -> None:
        self.now += seconds
        self.real.wake(self.now)
        self.plain.wake(self.now)

    @rule(
        topics=st.fixed_dictionaries(dict.fromkeys(TOPICS, st.integers(0, 4))),
        buckets=st.fixed_dictionaries(dict.fromkeys(BUCKETS, st.integers(0, 3))),
        most=st.integers(0, 6),
        says_what_is_free=st.booleans(),
    )
    def pick(
        self,
        topics: dict[str, int],
        buckets: dict[Bucket, int],
        most: int,
        says_what_is_free: bool,
    ) -> None:
        for bucket, places in buckets.items():
            if places:
                self.real.open(bucket)
        room = Room(topics, buckets)
        free = [QueueKey(topic, frozenset()) for topic, places in topics.items() if places]
        freed = (lambda: free) if says_what_is_free else None
        found = list(islice(self.real.pick(room.place, room.has_room, freed), most))
        assert found == list(islice(self.plain.pick(Room(topics, buckets).place), most))

    @rule()
    def begin_anew(self) -> None:
        """Everything is taken out, as when the rules change, and comes back."""
        seqs = self.real.empty()
        assert sorted(seqs) == sorted(self.plain.jobs)
        for seq in seqs:
            job, key = self.plain.jobs[seq]
            self.real.add(job, self.now, key.buckets)
        self.plain.begin_anew()

    @invariant()
    def the_same_jobs_wait(self) -> None:
        assert len(self.real) == len(self.plain.jobs)


TestBacklog = BacklogMachine.TestCase
TestBacklog.settings = settings(max_examples=300)


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 8))
def test_a_key_that_has_room_is_served_within_as_many_picks_as_there_are_tenants(
    tenants: int, keys: int, other_jobs: int
) -> None:
    """However many other keys have a full limit, and however many jobs the others have."""
    backlog, seq = Backlog(), 0
    for tenant in range(tenants):
        for key in range(keys):
            for _ in range(other_jobs):
                seq += 1
                job = a_job(f"j{seq}", seq=seq, tenant=f"t{tenant}", topic="job.other")
                full = Bucket("full", (str(key),)) if key % 2 else Bucket("free", (str(key),))
                backlog.add(job, T0, (full,))
    seq += 1
    backlog.add(a_job("late", seq=seq, tenant="late", at=T0), T0, ())

    def place(key: QueueKey) -> str | Bucket | None:
        return next((b for b in key.buckets if b.limit == "full"), None) or "w"

    served = [picked for picked, _ in islice(backlog.pick(place), tenants + 1)]
    assert seq in served
