"""The ledger: every change of a job goes through here.

Callers hand in changes; those that gather while a commit is under way go into the next one
together: one flush, however many. The ledger reads what `core.ledger` wants to know, lets it
decide, has the backend write the outcome, and then publishes it: first to its own index of
open jobs, then to the listeners, then to the callers.

The index holds the record of every job that is with a worker, and of as many waiting jobs as
fit. Rows of jobs with a worker may lag behind the journal (see `core.ledger`); reads overlay
them with the index, and from time to time a commit brings all rows up to date, so that a
restart has little to replay.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from heapq import merge
from itertools import chain, islice
from typing import ParamSpec, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import NotFound, Unavailable, Unstorable
from penstock.core.job import Job
from penstock.core.journal import (
    BrokenLog,
    Folded,
    LoggedStride,
    Stride,
    Transition,
    fold,
    history_of,
)
from penstock.core.ledger import (
    Answer,
    BulkAnswer,
    BulkMove,
    Change,
    Commit,
    Counts,
    Decider,
    Key,
    Known,
    Wanted,
    wanted,
)
from penstock.core.shards import Shard
from penstock.lifecycles.canonical import HELD, TERMINAL, JobState
from penstock.ports.query import matches, order
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    Backend,
    Extras,
    JobQuery,
    JournalEvent,
    Listeners,
    LogLine,
    Mismatch,
    Opened,
    Pruned,
    StepCount,
    StepPage,
    StepQuery,
    Verified,
)

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Listener = Callable[[Sequence[Stride]], None]

_MOST_RECORDS = 100_000
"""Open jobs whose records are kept; of waiting ones beyond that, the row is read again."""
_FEW = 8
"""Callers up to which a commit does not look whether more are coming."""
_LARGE = 5000
"""Changes beyond which a commit is decided in a thread."""
_EXTRAS_DELAY = 0.01
"""Seconds that log lines and audit entries wait for a commit to go along with."""
_MOST_EXTRAS = 100_000
"""Log lines, and audit entries, kept while the storage refuses them."""
_REPLAY_PAGES = 1000
"""Journal pages after which all rows are brought up to date."""
_VERIFIED_AT_ONCE = 5000
_OPEN = tuple(state for state in JobState if state not in TERMINAL)
_ALL = (1 << 62) - 1
_NOTHING = Known()
Committed = asyncio.Future[tuple[list[Answer], list[BulkAnswer]]]


class _Request(Struct, frozen=True, eq=False):
    """What one caller wants of the next commit."""

    changes: Sequence[Change]
    bulk: Sequence[BulkMove]
    facts: dict[str, bytes | None]
    future: Committed

    def refuse(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _FlushSharing:
    """Whether the scheduler's changes should wait for a caller who submits one job after another,
    to share the flush of the next one. Waits that don't pay are soon given up, for a while."""

    TURNAROUND = 0.001
    """Seconds after a commit within which such a caller is back."""
    SHORTEST, LONGEST = 0.002, 0.006
    """Seconds to wait: as long as a write takes, within these bounds."""
    GAIN, LOSS, BEST = 1, 4, 8
    """What a wait that paid adds to the score, what one in vain takes away, and the limit."""
    PAUSE = 50
    """How many waits long nothing waits after the score is used up."""

    def __init__(self) -> None:
        self.wait = self.SHORTEST
        self._committed_at = self._paused_until = float("-inf")
        self._submits_in_a_loop = False
        self._score = 0

    def hear_caller(self, now: float) -> None:
        self._submits_in_a_loop = now - self._committed_at < self.TURNAROUND

    def hear_commit(self, begin: float, end: float) -> None:
        self._committed_at = end
        self.wait = min(max(end - begin, self.SHORTEST), self.LONGEST)

    def pays(self, now: float) -> bool:
        return self._submits_in_a_loop and now >= self._paused_until

    def succeed(self) -> None:
        self._score = min(self._score + self.GAIN, self.BEST)

    def fail(self, now: float) -> None:
        self._score -= self.LOSS
        if self._score < 0:
            self._score = 0
            self._paused_until = now + self.PAUSE * self.wait


class Dispatcher(Protocol):
    """Gives jobs to workers in the very commit that accepts them."""

    def dispatch_accepted(self, jobs: Sequence[Job]) -> Sequence[BulkMove]:
        """The moves that give some of these jobs, which are about to be accepted, to workers.

        They follow the acceptance in the same commit (`BulkMove.follows`)."""
        ...

    def dispatch_committed(self, answers: Sequence[BulkAnswer]) -> None:
        """What became of them; nothing, if the commit failed."""
        ...


class Facts(Protocol):
    """Small named facts of an engine."""

    async def recall_all(self, prefix: str) -> dict[str, bytes]:
        """Every fact whose name begins so, by name, in order."""

    async def remember(self, name: str, value: bytes) -> None: ...

    async def remember_all(self, facts: Mapping[str, bytes]) -> None:
        """In one commit."""

    async def forget(self, name: str) -> bool:
        """Drop a fact; False if there was none."""


class Ledger:
    """One backend's owner, or with `own=False` a reader of it."""

    def __init__(
        self,
        backend: Backend,
        *,
        own: bool = True,
        max_records: int = _MOST_RECORDS,
        monotonic: Callable[[], float] | None = None,
        shard: Shard | None = None,
        home: Facts | None = None,
    ) -> None:
        """`monotonic` is a clock that is finer than the event loop's. `home` has the facts of all
        tenants, if `shard` does not."""
        self.shard = shard or Shard()
        self.home: Facts = home or self
        self.backend, self.durability = backend, backend.durability
        self._monotonic = monotonic or (lambda: asyncio.get_running_loop().time())
        self._own, self._max_records = own, max_records
        self.listeners: Listeners[Sequence[Stride]] = Listeners()
        self.dispatcher: Dispatcher | None = None
        self.jobs: dict[str, Job] = {}
        """The index: records of open jobs, by id."""
        self.by_seq: dict[int, Job] = {}
        """The same records."""
        self.lagging: dict[int, Job] = {}
        """Those whose rows lag behind the journal, by seq."""
        self._uniques: dict[Key, dict[int, str]] = {}
        """Open jobs by their unique key: seq and id."""
        self._counts: dict[str | None, Counter[JobState | None]] = {None: Counter()}
        self._opened: Opened | None = None
        self._opening = asyncio.Lock()
        self._next_seq = self._next_page = 0
        self._replayed = 0
        self._waiting: list[_Request] = []
        self._patient: list[_Request] = []
        """Requests that wait for another one, to share its flush."""
        self._timer: asyncio.TimerHandle | None = None
        self._sharing = _FlushSharing()
        self._apart: deque[_Request] = deque()
        """Requests that are committed each by itself."""
        self._extras = Extras(lines=[], audit=[])
        self._extras_timer: asyncio.TimerHandle | None = None
        self._extras_due = False
        self._committing: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Own the backend and load its open jobs; callers need not, but it may fail."""
        if self._is_open():
            return
        async with self._opening:
            if self._is_open():
                return
            opened = await self.backend.open(own=self._own)
            self._next_seq, self._next_page = opened.next_seq, opened.next_page
            self._count(opened.counts)
            lagging = set(opened.lagging)
            for job in opened.open_jobs:
                self._count({(job.request.tenant, job.state): 1})
                self._enter(job)
                if job.seq in lagging:
                    self.lagging[job.seq] = job
            self._replayed = opened.next_page - 1 if not lagging else 0
            self._opened = opened

    def _is_open(self) -> bool:
        return self._opened is not None

    @property
    def is_alone(self) -> bool:
        """Whether it is certain that no earlier owner runs any more."""
        return self._opened is None or self._opened.alone

    # -- changing -----------------------------------------------------------------

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        """Make the changes, in order, in one commit; answer each.

        An Accept whose job_id, (tenant, idempotency_key) or unique key is taken is REPEATED,
        with the job that has it. If an Accept with `all_or_none` finds its id or key taken by a
        different request, all changes are REFUSED; its own answer has the job that is there.
        With nothing written, it raises StoreFailed if the commit fails, or Unstorable if a
        value can never be written.
        """
        answers, _ = await self.commit(changes)
        return answers

    async def commit(
        self,
        changes: Sequence[Change],
        bulk: Sequence[BulkMove] = (),
        facts: dict[str, bytes | None] | None = None,
        *,
        patient: bool = False,
    ) -> tuple[list[Answer], list[BulkAnswer]]:
        """The same with bulk moves, which come after the changes; and with named facts.

        While somebody submits one job after another, a `patient` caller waits a moment for the
        next of them, so that both share one flush.
        """
        return await self.begin(changes, bulk, facts, patient=patient)

    def begin(
        self,
        changes: Sequence[Change],
        bulk: Sequence[BulkMove] = (),
        facts: dict[str, bytes | None] | None = None,
        *,
        patient: bool = False,
    ) -> Committed:
        """Have it go with the next commit; the future is done when that is."""
        if self._closed:
            raise Unavailable("the store is closed")
        loop = asyncio.get_running_loop()
        future: Committed = loop.create_future()
        request = _Request(changes, bulk, facts or {}, future)
        if patient and self._sharing.pays(self._monotonic()):
            self._patient.append(request)
            if self._timer is None:
                self._timer = loop.call_later(self._sharing.wait, self._stop_waiting)
        else:
            if not patient:
                self._sharing.hear_caller(self._monotonic())
            self._waiting.append(request)
            self._wake()
        return future

    def _join_patient(self) -> None:
        """Let those who waited for another request go with the next commit."""
        self._waiting += self._patient
        self._patient.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._sharing.succeed()

    def _stop_waiting(self) -> None:
        """No caller submitted in time: commit without."""
        self._timer = None
        self._join_patient()
        self._sharing.fail(self._monotonic())
        if self._waiting:
            self._wake()

    def listen(self, listener: Listener, topics: tuple[str, ...] = ()) -> Callable[[], None]:
        """Call `listener` with what moved, after each commit. Returns the way to stop.

        With `topics`, it hears only of strides in which jobs are accepted or end and a topic
        begins like one of these.
        """
        if not topics:
            return self.listeners.add(listener)

        def concerns(stride: Stride) -> bool:
            if stride.path.before is not None and stride.path.after not in TERMINAL:
                return False
            names = {job.request.topic for job in stride.jobs}
            return any(topic.startswith(topics) for topic in names)

        def hear(strides: Sequence[Stride]) -> None:
            if some := [*filter(concerns, strides)]:
                listener(some)

        return self.listeners.add(hear)

    def write_log(self, lines: Sequence[LogLine]) -> None:
        """Keep these lines; written with the next commit, without waiting for it."""
        self._extras.lines.extend(lines)
        self._wake_for_extras()

    def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        self._extras.audit.extend(entries)
        self._wake_for_extras()

    def _wake_for_extras(self) -> None:
        """Commit them soon, unless another commit takes them along before."""
        if self._extras_timer is None:
            loop = asyncio.get_running_loop()
            self._extras_timer = loop.call_later(_EXTRAS_DELAY, self._commit_extras)

    def _commit_extras(self) -> None:
        self._extras_timer = None
        if self._extras:
            self._extras_due = True
            self._wake()

    async def remember(self, name: str, value: bytes) -> None:
        """Keep a small named fact of the engine itself."""
        await self.commit((), facts={name: value})

    async def remember_all(self, facts: Mapping[str, bytes]) -> None:
        await self.commit((), facts={**facts})

    async def forget(self, name: str) -> bool:
        """Drop a fact; False if there was none."""
        known = await self.recall(name) is not None
        if known:
            await self.commit((), facts={name: None})
        return known

    def _wake(self) -> None:
        if self._committing is None:
            self._committing = asyncio.get_running_loop().create_task(self._commit_all())
            self._committing.add_done_callback(self._commits_ended)

    def _commits_ended(self, task: asyncio.Task[None]) -> None:
        if task is not self._committing:
            return
        self._committing = None  # it was cancelled before it began
        for request in (*self._apart, *self._waiting):
            request.refuse(Unavailable("the engine is going down"))
        self._apart.clear()
        self._waiting.clear()

    async def _commit_all(self) -> None:
        """Commit until nothing waits."""
        crowd = 0
        while self._apart or self._waiting or self._extras_due:
            if _FEW < len(self._waiting) > crowd and not self._apart:
                # Many come at once, and some are still on their way through this very loop.
                crowd = len(self._waiting)
                await asyncio.sleep(0)
                continue
            crowd = 0
            if self._apart:
                requests = [self._apart.popleft()]
            else:
                self._join_patient()
                requests, self._waiting = self._waiting, []
            extras, self._extras = self._extras, Extras(lines=[], audit=[])
            self._extras_due = False
            try:
                await self._commit(requests, extras)
            except Exception as error:
                if self._give_up(requests, extras, error):
                    break
            except BaseException:  # the event loop ends: nothing was written
                for request in requests:
                    request.refuse(Unavailable("the engine is going down"))
                raise
        self._committing = None
        if self._waiting:
            self._wake()

    async def _commit(self, requests: list[_Request], extras: Extras) -> None:
        await self.open()
        for request in requests:
            extras.facts.update(request.facts)
        want = wanted(
            chain.from_iterable(request.changes for request in requests),
            chain.from_iterable(request.bulk for request in requests),
            self.jobs,
        )
        known = await self._load(want) if want else _NOTHING
        decider = Decider(self.jobs, known, self._next_seq, self._next_page)
        size = sum(len(request.changes) for request in requests)
        if size > _LARGE:
            answers = await self._in_thread(_decide, decider, requests)
        else:
            answers = _decide(decider, requests)
        given: list[BulkAnswer] = []
        moves = self._dispatch_accepted(decider)
        try:
            given = [decider.bulk(move) for move in moves]
            await self._write(decider, extras)
            for request, answer in zip(requests, answers, strict=True):
                if not request.future.done():  # callers hear of it before a worker does
                    request.future.set_result(answer)
        except BaseException:
            given.clear()
            raise
        finally:
            if moves and self.dispatcher is not None:
                self.dispatcher.dispatch_committed(given)

    def _dispatch_accepted(self, decider: Decider) -> Sequence[BulkMove]:
        """Let the dispatcher have what is accepted."""
        if self.dispatcher is None or not (accepted := decider.accepted):
            return ()
        return self.dispatcher.dispatch_accepted(accepted)

    async def _write(self, decider: Decider, extras: Extras) -> None:
        """Write what was decided, and publish it."""
        commit = decider.commit()
        if commit.pages or commit.steps or extras:
            if commit.pages and commit.pages[-1].number - self._replayed >= _REPLAY_PAGES:
                extras = self._catch_up(commit, extras)
            begin = self._monotonic()
            await self.backend.write(commit, extras, self._epoch)
            self._sharing.hear_commit(begin, self._monotonic())
        self._next_seq, self._next_page = decider.next_seq, decider.next_page
        self._publish(commit, extras)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(work, *args, **kwargs)

    @property
    def _epoch(self) -> int:
        return 0 if self._opened is None else self._opened.epoch

    async def _load(self, want: Wanted) -> Known:
        """What is wanted, as the rows have it; of open jobs the ids by unique key are known."""
        known = await self.backend.load(want)
        for key in want.uniques:
            open_jobs = self._uniques.get(key)
            if not open_jobs:
                continue
            away = [seq for seq, job_id in open_jobs.items() if job_id not in self.jobs]
            found = {job.seq: job for job in await self.backend.fetch(away)} if away else {}
            sharing = [
                job
                for seq, job_id in reversed(open_jobs.items())
                if (job := self.jobs.get(job_id) or found.get(seq)) is not None
            ]
            known.uniques[key] = sharing + known.uniques.get(key, [])
        return known

    def _catch_up(self, commit: Commit, extras: Extras) -> Extras:
        """Let this commit write every row that lags behind."""
        heads = {job.seq for job in commit.changed}
        behind = self.lagging | {job.seq: job for job in commit.lagging}
        commit.changed.extend(job for seq, job in behind.items() if seq not in heads)
        commit.lagging.clear()
        return replace(extras, replayed=commit.pages[-1].number)

    def _give_up(self, requests: list[_Request], extras: Extras, error: Exception) -> bool:
        """Nothing was written: callers hear why, and what goes along waits for the next commit.

        If it failed for what was to be written and not for the storage, each caller's is tried
        again alone, so that only the one whose change it is hears of it. Says whether there is
        no use in going on.
        """
        self._extras.lines[:0] = extras.lines[-_MOST_EXTRAS:]
        self._extras.audit[:0] = extras.audit[-_MOST_EXTRAS:]
        if self._extras:
            self._wake_for_extras()
        if isinstance(error, Unstorable) and len(requests) > 1:
            self._apart.extend(requests)
            return False
        for request in requests:
            request.refuse(error)
        return not (self._waiting or self._apart)

    # -- publishing ---------------------------------------------------------------

    def _publish(self, commit: Commit, extras: Extras) -> None:
        """What was committed is now true: update the index, tell the listeners."""
        self._count(commit.counts)
        for job in commit.accepted:
            if job.finished_at is None:
                self._enter(job)
        jobs, by_seq, lagging = self.jobs, self.by_seq, self.lagging
        if extras.replayed is not None:
            lagging.clear()
            self._replayed = extras.replayed
        for job in commit.changed:
            if job.finished_at is not None:
                self._leave(job)
            else:
                lagging.pop(job.seq, None)
                if job.state in HELD or job.job_id in jobs:
                    jobs[job.job_id] = by_seq[job.seq] = job
        for job in commit.lagging:
            jobs[job.request.job_id] = by_seq[job.seq] = lagging[job.seq] = job
        if commit.pages:
            self.listeners.tell(commit.strides)

    def _enter(self, job: Job) -> None:
        request = job.request
        if len(self.jobs) < self._max_records or job.state in HELD:
            self.jobs[request.job_id] = self.by_seq[job.seq] = job
        if request.unique is not None:
            key = (request.tenant, request.unique.key)
            self._uniques.setdefault(key, {})[job.seq] = request.job_id

    def _leave(self, job: Job) -> None:
        request, seq = job.request, job.seq
        self.jobs.pop(request.job_id, None)
        self.by_seq.pop(seq, None)
        self.lagging.pop(seq, None)
        if request.unique is not None:
            key = (request.tenant, request.unique.key)
            sharing = self._uniques.get(key)
            if sharing is not None:
                sharing.pop(seq, None)
                if not sharing:
                    del self._uniques[key]

    def _count(self, counts: Counts) -> None:
        everyone = self._counts[None]
        for (tenant, state), count in counts.items():
            everyone[state] += count
            mine = self._counts.get(tenant)
            if mine is None:
                mine = self._counts[tenant] = Counter()
            mine[state] += count

    # -- reading ------------------------------------------------------------------

    async def get(self, job_id: str) -> Job | None:
        job = self.jobs.get(job_id)
        if job is None:
            await self.open()
            known = await self.backend.load(Wanted({job_id}, set(), set()))
            # It may have been given to a worker while the row was read.
            job = self.jobs.get(job_id) or known.jobs.get(job_id)
        return job

    async def get_many(self, job_ids: Sequence[str]) -> dict[str, Job]:
        """Those of these jobs that exist, by id."""
        found = {job_id: job for job_id in job_ids if (job := self.jobs.get(job_id)) is not None}
        if len(found) < len(job_ids):
            await self.open()
            missing = {job_id for job_id in job_ids if job_id not in found}
            known = (await self.backend.load(Wanted(missing, set(), set()))).jobs
            # They may have been given to a worker while the rows were read.
            found |= known | {key: job for key in known if (job := self.jobs.get(key)) is not None}
        return found

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        """The records with these `seq`s that exist, in the order asked for."""
        by_seq = self.by_seq
        missing = [seq for seq in seqs if seq not in by_seq]
        if not missing:
            return [by_seq[seq] for seq in seqs]
        await self.open()
        found = {job.seq: job for job in await self.backend.fetch(missing)}
        at_hand = (by_seq.get(seq) or found.get(seq) for seq in seqs)
        return [job for job in at_hand if job is not None]

    async def find(self, query: JobQuery) -> list[Job]:
        """A page of jobs; rows that lag behind are overlaid with the index."""
        await self.open()
        lagging = dict(self.lagging)
        if not lagging:
            return await self.backend.find(query)
        mine = sorted((job for job in lagging.values() if matches(query, job)), key=order(query))
        found = await self.backend.find(query, lagging.keys())
        return list(islice(merge(mine, found, key=order(query)), max(query.limit, 0)))

    async def unfinished(self) -> list[Job]:
        """Every job that is in no final state, in the order of acceptance."""
        await self.open()
        if len(self.jobs) == sum(self._counts[None][state] for state in _OPEN):
            return sorted(self.jobs.values(), key=lambda job: job.seq)
        return await self.find(JobQuery(states=_OPEN, oldest_first=True, limit=_ALL))

    async def history(self, job_id: str) -> list[Transition]:
        job = await self.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        return history_of(job, await self.backend.journal(job.pages))

    async def had_ended(self, job: Job, page: int) -> bool:
        """Whether a job had ended when this page of the journal was written."""
        pages = [one for one in job.pages if one <= page]
        log = history_of(job, await self.backend.journal(pages))
        return any(entry.after in TERMINAL for entry in log)

    async def events(self, after: int, limit: int = 1000) -> list[JournalEvent]:
        """What was committed after this cursor, in order; a move's steps are never parted."""
        await self.open()
        return await self.backend.events(after, limit)

    async def last_event(self) -> int:
        """The cursor of the newest event; 0 if there is none."""
        await self.open()
        return await self.backend.last_event()

    async def tally(self, tenant: str | None = None) -> dict[JobState, int]:
        """How many jobs are in each state, of one tenant or of all; costs the same always.

        A job and its retries are one, in the state of its newest try.
        """
        await self.open()
        counts = self._counts.get(tenant, Counter())
        return {state: count for state in JobState if (count := counts[state])}

    async def retried(self, tenant: str | None = None) -> int:
        """How many tries there are that were retried since."""
        await self.open()
        return self._counts.get(tenant, Counter())[None]

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        await self.open()
        return await self.backend.read_log(job_id, after, limit)

    async def read_steps(self, job_id: str, query: StepQuery | None = None) -> StepPage:
        """The checkpointed rows of a job, a page."""
        await self.open()
        return await self.backend.read_steps(job_id, query or StepQuery())

    async def count_steps(self, job_id: str) -> list[StepCount]:
        await self.open()
        return await self.backend.count_steps(job_id)

    async def count_children(
        self, first_try: str, tenant: str | None = None
    ) -> dict[JobState, int]:
        """The children of a job by state, each with its retries as one."""
        await self.open()
        query = JobQuery(child_of=first_try, tenant=tenant)
        mine = [job for job in self.lagging.values() if matches(query, job)]
        counts = Counter(job.state for job in mine)
        skip = {job.seq for job in mine}
        counts.update(await self.backend.count_children(first_try, tenant, skip))
        return {state: counts[state] for state in JobState if counts[state]}

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]:
        await self.open()
        return await self.backend.read_audit(query)

    async def recall(self, name: str) -> bytes | None:
        return (await self.recall_all(name)).get(name)

    async def recall_all(self, prefix: str) -> dict[str, bytes]:
        """Every fact whose name begins so, by name, in order."""
        await self.open()
        return await self.backend.facts(prefix)

    async def pointers(self) -> set[str]:
        """Every context_ptr and result_ptr that names a stored blob."""
        await self.open()
        return await self.backend.pointers()

    async def refers(self, tenant: str, pointer: str) -> bool:
        """Whether a job of this tenant has this blob as its input or its result."""
        await self.open()
        return await self.backend.refers(tenant, pointer)

    async def verify(self) -> Verified:
        """Fold every job's log and compare it with its record.

        A record names its version and its journal pages, and pages never change, so the
        store may be in use meanwhile.
        """
        jobs = transitions = seq = 0
        mismatches: list[Mismatch] = []
        while True:
            query = JobQuery(since=seq, tries=True, oldest_first=True, limit=_VERIFIED_AT_ONCE)
            some = await self.find(query)
            if not some:
                break
            seq = some[-1].seq
            numbers = sorted({page for job in some for page in job.pages})
            pages = await self.backend.journal(numbers)
            read, bad = await self._in_thread(_verify, some, pages)
            jobs += len(some)
            transitions += read
            mismatches.extend(bad)
        mismatches.extend(await self.backend.miscounted())
        return Verified(jobs, transitions, tuple(mismatches))

    # -- upkeep -------------------------------------------------------------------

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str] = ()
    ) -> Pruned:
        """Forget up to `limit` jobs that ended before a time, with logs and history.

        Jobs whose ids are `awaited` are kept, and so are their retries.
        """
        await self.open()
        pruned, gone = await self.backend.prune(finished_before, limit, awaited, self._epoch)
        self._count(gone)
        return pruned

    async def close(self) -> None:
        """Finish what is under way, bring the rows up to date, let go of the storage."""
        if self._closed:
            return
        self._closed = True
        self._join_patient()
        if self._extras_timer is not None:
            self._extras_timer.cancel()
        self._extras_due = bool(self._extras)
        if self._waiting or self._extras_due:
            self._wake()
        while (committing := self._committing) is not None:
            await asyncio.wait((committing,))
        if self._own and self._opened is not None and self._next_page - 1 > self._replayed:
            commit = Commit(changed=list(self.lagging.values()))
            try:
                extras = Extras(replayed=self._next_page - 1)
                await self.backend.write(commit, extras, self._epoch)
            except Exception as error:  # the next start replays them
                log.warning("rows stay behind the journal: %s", error)
        await self.backend.close()


def _decide(
    decider: Decider, requests: Iterable[_Request]
) -> list[tuple[list[Answer], list[BulkAnswer]]]:
    return [
        (decider.decide(request.changes), [decider.bulk(move) for move in request.bulk])
        for request in requests
    ]


def _verify(
    jobs: Sequence[Job], pages: Sequence[tuple[int, Sequence[LoggedStride]]]
) -> tuple[int, list[Mismatch]]:
    """How many transitions these jobs have, and where a record is not their fold."""
    logs: dict[int, list[tuple[LoggedStride, int]]] = {job.seq: [] for job in jobs}
    for _, strides in pages:
        for stride in strides:
            for index, seq in enumerate(stride.seqs):
                if seq in logs:
                    logs[seq].append((stride, index))
    mismatches = []
    count = 0
    for job in jobs:
        entries = [
            transition
            for stride, index in logs[job.seq]
            if stride.versions[index] <= job.version
            for transition in stride.transitions(index, job.job_id)
        ]
        count += len(entries)
        try:
            folded = fold(entries)
        except BrokenLog as error:
            mismatches.append(Mismatch(job.job_id, str(error)))
            continue
        if folded != (recorded := Folded.of(job)):
            mismatches.append(Mismatch(job.job_id, _difference(folded, recorded)))
    return count, mismatches


def _difference(folded: Folded, recorded: Folded) -> str:
    parts = [
        f"{name} is {getattr(recorded, name)!r}, its log says {getattr(folded, name)!r}"
        for name in Folded.__struct_fields__
        if getattr(folded, name) != getattr(recorded, name)
    ]
    return "; ".join(parts)
