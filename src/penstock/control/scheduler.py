"""Moves jobs PENDING -> SCHEDULED -> DISPATCHED, and commits what workers say of them.

The scheduler works in turns. A turn takes everything that has happened since the last one,
decides, and makes one commit of it: results free slots, and the slots are filled again in
the same commit. Dispatches go out after the commit and never before.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter

import msgspec
from msgspec import Struct, field

from penstock.control.backlog import QueueKey
from penstock.control.intake import Intake, Losses, Orders
from penstock.control.ledger import Ledger
from penstock.control.limits import Bucket, Gate
from penstock.control.open_jobs import OpenJobs
from penstock.control.safety import Judge, Judged, SafetyKernel, WaitingJobs
from penstock.control.store_retry import RetryingStore, apply_storable
from penstock.control.workers import Placement
from penstock.core.errors import StoreFailed, Unavailable
from penstock.core.job import IdSource, Job, JobResult, Timeouts, TopicDefaults
from penstock.core.journal import BIRTH, Stride
from penstock.core.ledger import Answer, BulkAnswer, BulkMove, Change, ChangeOutcome, Move
from penstock.core.verdict import Decision
from penstock.lifecycles.canonical import HELD, WAITING, JobEvent, JobState, Role
from penstock.ports.bus import (
    HANDSHAKE,
    HEARTBEAT,
    RESULT,
    AnyMessage,
    Bus,
    Finished,
    Handshake,
    NoStartLogs,
    Started,
    StartLogs,
    WorkerFacts,
)
from penstock.ports.clock import Clock, wait_at_most
from penstock.ports.process import failpoint

log = logging.getLogger(__name__)

_SCHEDULER = Role.SCHEDULER.value
_SERVED = "served"
_MOST_A_TURN = 500
"""Messages taken in, and jobs dispatched, in one commit at most: while the engine is busy
with some, its workers are busy with others."""
_NOT_STORABLE = "RESULT_NOT_STORABLE"
_GATHER = 0.002
"""Seconds that new jobs are gathered, to be scheduled in one commit, after a turn in which no
worker had room for one."""
_WAITING = frozenset({JobEvent.ACCEPT, JobEvent.SCHEDULE})
"""Events after which a job waits for a worker."""
_KERNEL_RETRY = 1.0
"""Seconds between tries while the safety kernel can't answer."""


class _Served(msgspec.Struct):
    topics: list[str]
    topic_defaults: dict[str, TopicDefaults] = {}


class Scheduler:
    """A service: `run` until cancelled."""

    def __init__(
        self,
        store: Ledger,
        bus: Bus,
        open_jobs: OpenJobs,
        kernel: SafetyKernel,
        clock: Clock,
        limits: Timeouts,
        *,
        starts: StartLogs | None = None,
        ids: IdSource | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.store, self.bus, self.open_jobs, self.kernel = store, bus, open_jobs, kernel
        self.clock = clock
        self._retrying = RetryingStore(store, clock)
        starts = starts or NoStartLogs()
        self.orders = Orders(bus, limits, starts.folder)
        ids = ids or IdSource()
        losses = Losses(open_jobs, starts, limits, ids, chance)
        self.intake = Intake(open_jobs, self.orders, losses, ids, chance)
        self._inbox: list[AnyMessage] = []
        self._in_hand: list[AnyMessage] = []
        """What the turn that is under way took in."""
        self._met: set[str] = set()
        """Workers whose introduction is in the inbox."""
        self._wake = asyncio.Event()
        self._next_ready: float | None = None
        self._judge = Judge(open_jobs, kernel)
        self._placement = Placement(open_jobs.roster)
        self._waiting_jobs = WaitingJobs(open_jobs, self._retrying)
        self._rules_changed = False
        self._gather_until = 0.0
        """Until then new jobs wait for more of them: those before found no worker."""
        self._gathered: asyncio.TimerHandle | None = None
        self._turning = False
        self._dispatch_pending: _Given | None = None
        """What the commit under way gives to workers as it accepts it."""
        open_jobs.limiter.monotonic = clock.monotonic
        open_jobs.limiter.on_change = self.rejudge

    @property
    def trouble(self) -> str:
        """Why nothing can be read or committed at the moment."""
        return self._retrying.retry.trouble

    async def run(self) -> None:
        """Listen, then take turns for ever."""
        stop_listening = self.store.listen(self.hear)
        readers = [
            self.bus.subscribe(RESULT, self.receive),
            self.bus.subscribe(HANDSHAKE, self.meet),
            self.bus.subscribe(HEARTBEAT, self.beat),
        ]
        try:
            await self._recall_served()
            self.store.dispatcher = self
            while True:
                await self.turn()
                await self._until_needed()
        finally:
            self.store.dispatcher = None
            stop_listening()
            for reader in readers:
                await reader.close()

    async def _recall_served(self) -> None:
        """What was ever served here is known again before its workers are back."""
        known = await self._retrying.recall(_SERVED)
        if known is not None:
            served = msgspec.json.decode(known, type=_Served)
            self.open_jobs.recall(served.topics, served.topic_defaults)

    async def _remember_served(self) -> None:
        served = _Served(sorted(self.open_jobs.topics), self.open_jobs.topic_defaults)
        self.open_jobs.served_is_new = False
        try:
            await self.store.remember(_SERVED, msgspec.json.encode(served))
        except StoreFailed as error:
            self.open_jobs.served_is_new = True
            log.error("can't remember what is served here: %s", error)

    async def beat(self, messages: list[AnyMessage]) -> None:
        """Heartbeats count when they come, however long the turn that is under way."""
        for message in messages:
            self.intake.take_in(message, self.clock.now(), self.clock.monotonic())
            if isinstance(message, WorkerFacts):
                self._wake.set()  # it may have resumed a topic

    async def meet(self, messages: list[AnyMessage]) -> None:
        """A worker that registers is subscribed already: it receives what is sent from now on."""
        self._met.update(m.worker_id for m in messages if isinstance(m, Handshake))
        await self.receive(messages)

    async def receive(self, messages: list[AnyMessage]) -> None:
        self._inbox.extend(messages)
        self._wake.set()

    def hear(self, strides: Sequence[Stride]) -> None:
        """After a commit: pass on cancels, and wake for new work."""
        unjudged = self.open_jobs.unjudged
        for stride in strides:
            if stride.path.after in HELD:
                if any(event is JobEvent.REQUEST_CANCEL for _, event, _ in stride.path.steps):
                    for job in stride.jobs:
                        self.orders.end(job.worker_id, (job.job_id, job.attempt), stride.reason)
            elif stride.path.steps[-1][1] in _WAITING:
                if stride.path is not BIRTH or any(job.seq in unjudged for job in stride.jobs):
                    self._gather()  # else all were given to workers in the same commit
            else:
                self._wake.set()

    def _gather(self) -> None:
        """Wake for new jobs; a little later, if those before them found no worker just now."""
        if self.clock.monotonic() >= self._gather_until:
            self._wake.set()
        elif self._gathered is None:
            loop = asyncio.get_running_loop()
            self._gathered = loop.call_later(_GATHER, self._wake.set)

    def has_word_from(self, worker_id: str) -> bool:
        """Whether a worker has reported something that is not committed yet."""
        return any(_sender(message) == worker_id for message in self._in_hand + self._inbox)

    def has_word_of(self, job_id: str) -> bool:
        """Whether a report about a job is not committed yet."""
        return any(_subject(message) == job_id for message in self._in_hand + self._inbox)

    def nudge(self) -> None:
        """Something changed that is not a commit: take a turn."""
        self._wake.set()

    def rejudge(self) -> None:
        """Rules or limits are others now: whatever waits is judged again, from the next turn."""
        self._rules_changed = True
        self._wake.set()

    async def _until_needed(self) -> None:
        pauses = [] if self._next_ready is None else [self._next_ready - self.clock.now()]
        if self.open_jobs.doubtful:
            pauses.append(_KERNEL_RETRY)
        if (expires := self.open_jobs.next_expiry()) is not None:
            pauses.append(expires - self.clock.now())
        if (opens_in := self.open_jobs.limiter.opens_in()) is not None:
            pauses.append(opens_in)
        if not pauses:
            await self._wake.wait()
        else:
            pause = min(max(0.0, min(pauses)), self.clock.recheck)
            await wait_at_most(self.clock, pause, self._wake)

    # -- a turn -------------------------------------------------------------------

    async def turn(self) -> None:
        """Take in what came, decide, commit, and send what the commit allows."""
        self._turning = True
        try:
            await self._turn()
        finally:
            self._turning = False

    async def _turn(self) -> None:
        self._wake.clear()
        if self._gathered is not None:
            self._gathered.cancel()
            self._gathered = None
        now = self.clock.now()
        reported = self._take_in(now)
        if self.open_jobs.resuming:
            self._resume()
        if self.open_jobs.served_is_new:
            await self._remember_served()
        if self._rules_changed and not self._dispatch_pending:
            self._rules_changed = False
            self.open_jobs.judge_all_again()
        changes = reported.changes
        decided = _Range(len(changes))
        changes.extend(await self._waiting_jobs.call_up(now))
        judged = self._judge.sit(now)
        changes.extend(judged.moves)
        await self._waiting_jobs.ask_for_parents(judged)
        if self._waiting_jobs.is_not_done:
            self._wake.set()
        self._next_ready = self.open_jobs.backlog.wake(now)
        picked, taken = await self._pick()
        picked += self._reattach()
        if judged.passed and not picked:
            self._gather_until = self.clock.monotonic() + _GATHER
        given = self._dispatch(picked, judged, now)
        moves, admitted = judged.admissions({job.seq for job, _ in picked}, now)
        changes.extend(moves)
        decided.end = len(changes)
        changes.extend(given.moves)
        gifts = [*given.bulk.values(), *given.starts.values()]
        bulk = [*reported.bulk(now), *admitted, *gifts]
        if not (changes or bulk):
            self._in_hand = []
            return
        answers, bulk_answers = await self._commit(changes, bulk)
        ended = bulk_answers[: len(reported.succeeded)]
        await self._end_unstorable(reported, answers, ended, now)
        self._in_hand = []
        self._confirm([(message, answers[index]) for index, message in reported.asked])
        self._settle(reported.results())
        if not self._send(answers[decided.end :], bulk_answers[len(bulk) - len(gifts) :], given):
            self.open_jobs.limiter.retract(taken)
        self._begin_anew(answers[decided.start : decided.end])
        for told in bulk_answers[len(ended) : len(ended) + len(admitted)]:
            self._begin_anew([answer for _, answer in told.others])
        await self._note_refused(reported, answers, ended)

    def _take_in(self, now: float) -> _Reported:
        """What workers have said since the last turn."""
        inbox = self._in_hand = self._inbox[:_MOST_A_TURN]
        self._inbox = self._inbox[_MOST_A_TURN:]
        if self._inbox:
            self._wake.set()
        self._met.clear()
        reported = _Reported()
        monotonic = self.clock.monotonic()
        for message in inbox:
            try:
                if type(message) is Finished and _is_plain_success(message.result):
                    self.intake.release(message.result, monotonic)
                    reported.succeeded[message.result.worker_id or ""].append(message.result)
                    continue
                moves = self.intake.take_in(message, now, monotonic)
            except Exception:  # a worker's mistake must not end the engine
                log.exception("dropping a message that can't be handled: %r", message)
                continue
            if type(message) is Started and message.confirm:
                reported.asked.append((len(reported.changes), message))
            reported.changes.extend(moves)
            reported.single = len(reported.changes)
        self.intake.on_their_way.clear()
        return reported

    def _resume(self) -> None:
        """Let jobs go on that have what they waited for, before others take the room."""
        open_jobs = self.open_jobs
        for job_id in list(open_jobs.resuming):
            job = open_jobs.held[job_id]
            if open_jobs.may_go_on(job):
                open_jobs.go_on(job)
                self.orders.resume(job)

    def _reattach(self) -> list[tuple[Job, str]]:
        """Lost jobs, each with a worker that can reattach to its work."""
        open_jobs = self.open_jobs
        lost = (open_jobs.held[job_id] for job_id in open_jobs.reattaching)
        return [
            (job, worker.worker_id)
            for job in lost
            if (worker := open_jobs.roster.who_reattaches(job.job_id, job.attempt)) is not None
        ]

    async def _commit(
        self, changes: Sequence[Change], bulk: Sequence[BulkMove] = ()
    ) -> tuple[list[Answer], list[BulkAnswer]]:
        """Commit, however long the storage refuses: what workers reported must not be lost."""
        try:
            return await self._retrying.commit(changes, bulk)
        except Unavailable:
            raise
        except Exception:  # something can't be stored: it must not keep back the rest
            singles = [move.one(n) for move in bulk for n in range(len(move.job_ids))]
            answers = await apply_storable(self._retrying.apply, [*changes, *singles])
        told = iter(answers[len(changes) :])
        bulk_answers = []
        for move in bulk:
            each = list(enumerate(islice(told, len(move.job_ids))))
            moved = [answer.job for _, answer in each if answer.moved and answer.job is not None]
            bulk_answers.append(BulkAnswer(moved, [(n, a) for n, a in each if not a.moved]))
        return answers[: len(changes)], bulk_answers

    async def _end_unstorable(
        self,
        reported: _Reported,
        answers: Sequence[Answer],
        ended: Sequence[BulkAnswer],
        now: float,
    ) -> None:
        """Let a job fail whose result can't be stored as it is."""
        failures: list[Change] = []
        for result, answer in reported.refused(answers, ended):
            if answer.job is None:
                failed = JobResult(
                    job_id=result.job_id,
                    status=JobState.FAILED,
                    worker_id=result.worker_id,
                    attempt=result.attempt,
                    error_code=_NOT_STORABLE,
                    error_message="its result or error holds a value that can't be stored",
                )
                failures += self.intake.take_in(Finished(failed), now, self.clock.monotonic())
        if failures:
            await self._commit(failures)

    def _begin_anew(self, answers: Sequence[Answer]) -> None:
        """What was decided about a waiting job was overtaken by something else."""
        for answer in answers:
            if answer.verdict is ChangeOutcome.REFUSED and answer.job is not None:
                self.open_jobs.judge_again(answer.job)
                self._wake.set()

    # -- dispatch -----------------------------------------------------------------

    def dispatch_accepted(self, jobs: Sequence[Job]) -> Sequence[BulkMove]:
        """Move jobs on in the commit that accepts them: see `control.ledger.Dispatcher`.

        Where nothing is to be weighed (no limit is set, nothing else waits, workers have room for
        all), they go to workers. Otherwise those that no rule can hold back become SCHEDULED, and
        the next turn finds them a place.
        """
        if self._rules_changed or not self.kernel.built_in:
            return ()
        now, allowed = self.clock.now(), list(filter(self._is_allowed, jobs))
        if len(allowed) == len(jobs) and (picked := self._place_at_once(jobs, now)):
            given = self._dispatch_pending = self._dispatch(picked, Judged(), now, follows=True)
            return [*given.bulk.values(), *given.starts.values()]
        return [
            BulkMove(
                job_ids=[job.request.job_id for job in together],
                events=_SCHEDULE,
                actor=_SCHEDULER,
                at=at,
                follows=True,
            )
            for at, together in groupby(allowed, _ACCEPTED_AT)
        ]

    def _is_allowed(self, job: Job) -> bool:
        """Whether the kernel lets a job pass that waits for no other."""
        if job.request.after:
            return False
        try:
            return self.kernel.decide(job.request).decision is Decision.ALLOW
        except Exception:  # the turn says so
            return False

    def _place_at_once(self, jobs: Sequence[Job], now: float) -> list[tuple[Job, str]]:
        """Workers for all of these jobs, if none of them has to wait for anything; else nothing."""
        open_jobs = self.open_jobs
        if (
            len(jobs) > _MOST_A_TURN
            or len(open_jobs.backlog)
            or open_jobs.unread
            or open_jobs.unjudged
            or open_jobs.orphaned
            or open_jobs.limiter.in_use
            or any(job.request.run_at is not None for job in jobs)
            or any(job.request.deadline is not None for job in jobs)
        ):
            return []
        if not self._turning:
            self._placement.refresh()
        picked: list[tuple[Job, str]] = []
        for job in jobs:
            worker_id = self._placement.find(QueueKey.of(job))
            if worker_id is None or (
                self._turning and not self._is_still_available(worker_id, job)
            ):
                return []
            picked.append((job, worker_id))
        return picked

    def _is_still_available(self, worker_id: str, job: Job) -> bool:
        """Whether a worker did not go or pause since the turn that is under way began."""
        worker = self.open_jobs.roster.workers.get(worker_id)
        return (
            worker is not None
            and worker.ready
            and worker.pool not in self.open_jobs.roster.paused
            and job.request.topic not in worker.paused_topics
        )

    def dispatch_committed(self, answers: Sequence[BulkAnswer]) -> None:
        given, self._dispatch_pending = self._dispatch_pending, None
        if self._rules_changed:  # the turn that was to take notice waits for this
            self._wake.set()
        if given is not None:
            self._send((), answers, given)

    async def _pick(self) -> tuple[list[tuple[Job, str]], Collection[Bucket]]:
        """Who goes where, and the buckets of limits that they fill."""
        if self._rules_changed:
            return [], ()  # what waits was let pass by others
        roster, backlog, limiter = (
            self.open_jobs.roster,
            self.open_jobs.backlog,
            self.open_jobs.limiter,
        )
        for bucket in limiter.freed():
            backlog.open(bucket)
        placement = self._placement
        placement.refresh()
        gate = Gate(limiter, placement.find)
        place = gate.place if limiter.in_use else placement.find
        picks = backlog.pick(place, placement.has_room, placement.freed)
        chosen = dict(islice(picks, _MOST_A_TURN))
        if not chosen:
            return [], ()
        if len(chosen) == _MOST_A_TURN:
            self._wake.set()
        picked: list[tuple[Job, str]] = []
        for job in await self._retrying.fetch(list(chosen)):
            worker_id = chosen[job.seq]
            if worker_id not in roster.workers:  # it was lost while the records were read
                self._put_back(job)
            elif self.open_jobs.may_go_out(job):
                picked.append((job, worker_id))
        if len(picked) < len(chosen):
            limiter.retract(gate.taken)
            self._wake.set()
        return picked, gate.taken.keys()

    def _dispatch(
        self,
        picked: Sequence[tuple[Job, str]],
        judged: Judged,
        now: float,
        *,
        follows: bool = False,
    ) -> _Given:
        """The moves that give these jobs to their workers; alike ones together.

        A worker that reports no starts may have begun whatever it was sent. So a job that may run
        only once counts as started in the same commit, before it is sent.
        """
        given = _Given()
        workers, orphaned, news = (
            self.open_jobs.roster.workers,
            self.open_jobs.orphaned,
            judged.news,
        )
        for job, worker_id in picked:
            if not (workers[worker_id].reports_starts or job.request.idempotent):
                given.start(job, worker_id, now)
            if orphaned or job.seq in news:
                given.moves.append(self._dispatch_one(job, worker_id, judged, now))
                continue
            key = (worker_id, job.state)
            move = given.bulk.get(key)
            if move is None:
                move = given.bulk[key] = BulkMove(
                    job_ids=[],
                    events=_DISPATCHING[job.state],
                    actor=_SCHEDULER,
                    at=now,
                    versions=[],
                    worker_id=worker_id,
                    pool=workers[worker_id].pool,
                    follows=follows,
                )
            assert move.versions is not None
            move.job_ids.append(job.request.job_id)
            move.versions.append(job.version)
        return given

    def _dispatch_one(self, job: Job, worker_id: str, judged: Judged, now: float) -> Move:
        job_id = job.job_id
        news = judged.news.get(job.seq)
        return Move(
            job_id,
            _DISPATCHING.get(job.state, (JobEvent.REDISPATCH,)),
            _SCHEDULER,
            now,
            self.open_jobs.orphaned.get(job_id, ""),
            version=job.version,
            worker_id=worker_id,
            pool=self.open_jobs.roster.workers[worker_id].pool,
            verdict=None if news is None else news.verdict,
            hold=None if news is None else news.hold,
            uncharged=job_id in self.open_jobs.uncharged,
        )

    def _send(
        self, answers: Sequence[Answer], bulk: Sequence[BulkAnswer], given_out: _Given
    ) -> bool:
        """Give out what was committed; False if some of it was not."""
        moved = [answer.job for answer in answers if answer.moved and answer.job is not None]
        others = [answer for answer in answers if not answer.moved]
        for one in bulk[: len(given_out.bulk)]:
            moved += one.moved
            others += [answer for _, answer in one.others]
        if given_out.starts:
            started = {job.seq: job for one in bulk[len(given_out.bulk) :] for job in one.moved}
            moved = [started.get(job.seq, job) for job in moved]
        open_jobs, met = self.open_jobs, self._met
        given = [job for job in moved if open_jobs.is_live(job.request.job_id, job.attempt)]
        if met:
            for job in given:
                if job.worker_id in met:
                    self.intake.on_their_way.add((job.job_id, job.attempt))
        for answer in others:
            self._wake.set()
            if answer.job is not None:
                self._put_back(answer.job)
        if given:
            self.orders.dispatch(given)
            failpoint("after-dispatch")
        for job in given:
            if open_jobs.held[job.request.job_id].cancel_requested:
                # The order to end it was given before there was anything to end.
                attempt = (job.job_id, job.attempt)
                self.orders.end(job.worker_id, attempt, "cancelled while it was dispatched")
        return not others

    def _put_back(self, job: Job) -> None:
        """A job that came up and was not given out waits again."""
        if job.state in WAITING:
            self.open_jobs.judge_again(job)
        elif self.open_jobs.may_go_out(job) and job.job_id not in self.open_jobs.reattaching:
            self.open_jobs.orphan(job, self.open_jobs.orphaned[job.job_id])

    def _settle(self, results: Iterable[JobResult]) -> None:
        """Tell workers elsewhere which of their results are safe, or known to be late."""
        workers = self.open_jobs.roster.workers
        settled: list[tuple[str, tuple[str, int]]] = []
        for result in results:
            worker_id = result.worker_id
            if worker_id:
                record = workers.get(worker_id)
                if record is None or not record.local:
                    settled.append((worker_id, (result.job_id, result.attempt)))
        self.orders.settle(settled)

    def _confirm(self, asked: Sequence[tuple[Started, Answer]]) -> None:
        """Let workers begin whose start is durable; the others must drop the job."""
        durable: list[tuple[str, tuple[str, int]]] = []
        for message, answer in asked:
            attempt = (message.job_id, message.attempt)
            if answer.verdict is ChangeOutcome.REFUSED:
                self.orders.end(message.worker_id, attempt, answer.why)
            elif not self.intake.still_has(message, self.clock.monotonic()):
                self.orders.end(message.worker_id, attempt, "the job has ended meanwhile")
            else:
                durable.append((message.worker_id, attempt))
        self.orders.confirm(durable)

    async def _note_refused(
        self, reported: _Reported, answers: Sequence[Answer], ended: Sequence[BulkAnswer]
    ) -> None:
        """A result that came too late, or for a dead attempt, is logged and changes nothing."""
        notes: list[Change] = []
        for result, answer in reported.refused(answers, ended):
            if answer.job is not None and answer.why:
                said = f"{result.status} of attempt {result.attempt} ignored: {answer.why}"
                actor = f"{Role.WORKER}:{result.worker_id}"
                now = self.clock.now()
                notes.append(Move(result.job_id, (JobEvent.NOTE,), actor, now, said))
        if notes:
            await self._commit(notes)


class _Reported(Struct):
    """What workers said, as changes."""

    changes: list[Change] = field(default_factory=list)
    single: int = 0
    """How many of the changes come from here."""
    succeeded: defaultdict[str, list[JobResult]] = field(default_factory=lambda: defaultdict(list))
    """Plain successes, by worker."""
    asked: list[tuple[int, Started]] = field(default_factory=list)
    """StartLogs that must be confirmed, each with the place of its change."""

    def bulk(self, now: float) -> list[BulkMove]:
        return [
            BulkMove(
                job_ids=[result.job_id for result in results],
                events=_SUCCEED,
                actor=f"{Role.WORKER}:{worker_id}",
                at=now,
                attempts=[result.attempt for result in results],
                results=results,
            )
            for worker_id, results in self.succeeded.items()
        ]

    def results(self) -> Iterator[JobResult]:
        """Every result that was reported."""
        for change in self.changes[: self.single]:
            if type(change) is Move and change.result is not None:
                yield change.result
        for results in self.succeeded.values():
            yield from results

    def refused(
        self, answers: Sequence[Answer], ended: Sequence[BulkAnswer]
    ) -> Iterator[tuple[JobResult, Answer]]:
        """The results that did not end their job, and why."""
        for change, answer in zip(self.changes[: self.single], answers, strict=False):
            if not answer.moved and type(change) is Move and change.result is not None:
                yield change.result, answer
        for results, told in zip(self.succeeded.values(), ended, strict=True):
            for index, answer in told.others:
                yield results[index], answer


class _Given(Struct):
    """The moves that give jobs to workers."""

    moves: list[Change] = field(default_factory=list)
    bulk: dict[tuple[str, JobState], BulkMove] = field(default_factory=dict)
    starts: dict[str, BulkMove] = field(default_factory=dict)
    """Starts of workers that report none, by worker."""

    def start(self, job: Job, worker_id: str, now: float) -> None:
        move = self.starts.get(worker_id)
        if move is None:
            move = self.starts[worker_id] = BulkMove(
                job_ids=[],
                events=(JobEvent.START,),
                actor=f"{Role.WORKER}:{worker_id}",
                at=now,
                attempts=[],
                follows=True,
            )
        assert move.attempts is not None
        move.job_ids.append(job.request.job_id)
        move.attempts.append(job.attempt + 1)


class _Range(Struct):
    start: int
    end: int = 0


_SUCCEED = (JobEvent.SUCCEED,)
_SCHEDULE = (JobEvent.SCHEDULE,)
_ACCEPTED_AT = attrgetter("accepted_at")
_DISPATCHING: dict[JobState, tuple[JobEvent, ...]] = {
    JobState.PENDING: (JobEvent.SCHEDULE, JobEvent.DISPATCH),
    JobState.SCHEDULED: (JobEvent.DISPATCH,),
}


def _is_plain_success(result: JobResult) -> bool:
    return result.status is JobState.SUCCEEDED and result.error_code is None


def _sender(message: AnyMessage) -> str | None:
    if isinstance(message, Finished):
        return message.result.worker_id
    return getattr(message, "worker_id", None)


def _subject(message: AnyMessage) -> str | None:
    if isinstance(message, Finished):
        return message.result.job_id
    return getattr(message, "job_id", None)
