"""The placement, kept over many turns, against one that looks at every worker each time."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from penstock.control.backlog import Backlog, QueueKey
from penstock.control.limits import Bucket
from penstock.control.workers import DEFAULT_POOL, Placement, Pool, Roster, WorkerRecord, serves
from penstock.ports.bus import Handshake
from penstock.ports.executor import PAUSED
from penstock.testing.samples import T0, a_job

WORKERS = [f"w{n}" for n in range(5)]
TOPICS = ["job.a", "job.b"]
GPU = frozenset({("gpu", "yes")})
KEYS = [QueueKey(topic, needs) for topic in TOPICS for needs in (frozenset(), GPU)]
POOLS = {"small": Pool("small", capacity=3), "b": Pool("b", topics=("job.b",))}
some_worker = st.sampled_from(WORKERS)
some_pool = st.sampled_from([DEFAULT_POOL, *POOLS])


class PlainPlacement:
    """Looks at every worker for every job."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.given: dict[str, int] = {}

    def busy(self, worker: WorkerRecord) -> int:
        return len(worker.held) + self.given.get(worker.worker_id, 0)

    def candidates(self, key: QueueKey) -> dict[str, float]:
        """The share of each worker that is free, if it can take a job."""
        everyone = self.roster.workers.values()
        found = {}
        for worker in everyone:
            pool = self.roster.pools[worker.pool]
            in_pool = sum(self.busy(other) for other in everyone if other.pool == pool.name)
            if (
                worker.ready
                and pool.name not in self.roster.paused
                and (pool.capacity is None or in_pool < pool.capacity)
                and self.busy(worker) < worker.limit
                and key.topic not in worker.paused_topics
                and serves(pool, worker, key)
            ):
                found[worker.worker_id] = 1 - self.busy(worker) / worker.limit
        return found


class PlacementMachine(RuleBasedStateMachine):
    """Workers come, go, and take jobs; nobody is over a limit, and no job waits for nothing."""

    @initialize()
    def start(self) -> None:
        self.roster = Roster(POOLS)
        self.placement = Placement(self.roster)
        self.backlog = Backlog()
        self.keys: dict[int, QueueKey] = {}
        for worker_id, pool in zip(WORKERS, (DEFAULT_POOL, "small", "small"), strict=False):
            self.join(worker_id, pool, ("job.*",), slots=2, gpu=True, stays=True)

    @rule(
        worker_id=some_worker,
        pool=some_pool,
        topics=st.sampled_from([("job.*",), ("job.a",), ("job.b",)]),
        slots=st.integers(1, 4),
        gpu=st.booleans(),
        stays=st.booleans(),
    )
    def join(
        self,
        worker_id: str,
        pool: str,
        topics: tuple[str, ...],
        slots: int,
        gpu: bool,
        stays: bool,
    ) -> None:
        held: tuple[tuple[str, int], ...] = ()
        if stays and (record := self.roster.workers.get(worker_id)) is not None:
            held = tuple(record.held.items())
        labels = {"gpu": "yes"} if gpu else {}
        self.roster.greet(Handshake(worker_id, pool, topics, slots, labels, held), 0.0)

    @rule(worker_id=some_worker, how=st.sampled_from(["missing", "draining", "forgotten"]))
    def leave(self, worker_id: str, how: str) -> None:
        if (record := self.roster.workers.get(worker_id)) is None:
            return
        if how == "missing":
            self.roster.set_missing(record, 1.0)
        elif how == "draining":
            self.roster.drain(record)
        else:
            self.roster.forget(record)

    @rule(worker_id=some_worker, limit=st.integers(0, 5))
    def set_limit(self, worker_id: str, limit: int) -> None:
        self.roster.set_limit(worker_id, limit)

    @rule(worker_id=some_worker, topics=st.sets(st.sampled_from(TOPICS)))
    def pause_topics(self, worker_id: str, topics: set[str]) -> None:
        self.roster.set_facts(worker_id, "", {PAUSED: dict.fromkeys(topics, "why")})

    @rule(pool=some_pool, pause=st.booleans())
    def pause_pool(self, pool: str, pause: bool) -> None:
        (self.roster.pause if pause else self.roster.resume)(pool)

    @rule(worker_id=some_worker, which=st.integers(0, 100))
    def release(self, worker_id: str, which: int) -> None:
        record = self.roster.workers.get(worker_id)
        if record is not None and record.held:
            job_id, attempt = list(record.held.items())[which % len(record.held)]
            self.roster.release(worker_id, job_id, attempt)

    def add(self, key: QueueKey, tenant: str, seq: int) -> None:
        labels = {f"place.{name}": value for name, value in key.needs}
        self.keys[seq] = key
        job = a_job(f"j{seq}", seq=seq, topic=key.topic, tenant=tenant, labels=labels)
        self.backlog.add(job, T0)

    @rule(which=st.integers(0, 100))
    def discard(self, which: int) -> None:
        self.backlog.discard(which)

    @rule(
        jobs=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from("ABC")), max_size=6),
        most=st.integers(1, 8),
        commits=st.booleans(),
    )
    def turn(self, jobs: list[tuple[QueueKey, str]], most: int, commits: bool) -> None:
        """What is given out goes to the least busy; what is not committed waits again."""
        for key, tenant in jobs:
            self.add(key, tenant, len(self.keys) + 1)
        plain, placement = PlainPlacement(self.roster), self.placement
        placement.refresh()

        def place(key: QueueKey) -> str | Bucket | None:
            able = plain.candidates(key)
            found = placement.find(key)
            if found is None:
                assert not able
            else:
                assert abs(able[found] - max(able.values())) < 1e-9
                plain.given[found] = plain.given.get(found, 0) + 1
            return found

        given = []
        picks = self.backlog.pick(place, placement.has_room, placement.freed)
        for seq, worker_id in picks:
            given.append((seq, worker_id))
            if len(given) == most:
                break
        else:
            # Nobody waits for room that is there.
            left = {key for seq, key in self.keys.items() if seq in self.backlog}
            assert not any(plain.candidates(key) for key in left)
        for seq, worker_id in given:
            if commits:
                self.roster.hold(worker_id, f"j{seq}", 1)
            else:
                self.add(self.keys[seq], "A", seq)


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=300)
