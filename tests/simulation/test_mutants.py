"""The checker can fail: each engine that is broken on purpose is caught."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.simulation.history import Promise
from tests.support.simulation.link import SimStartLogs
from tests.support.simulation.simulator import simulate
from tests.support.simulation.store import FaultyMemoryStore

from penstock.control import approvals, reconciler, safety
from penstock.control.checkpoints import CheckpointService
from penstock.control.dependencies import Dependencies, Families
from penstock.control.feed import Feed
from penstock.control.gateway import Gateway
from penstock.control.intake import Intake, Losses
from penstock.control.ledger import Ledger
from penstock.control.limits import Bucket, Limiter
from penstock.control.open_jobs import OpenJobs, Wait
from penstock.control.reconciler import Reconciler
from penstock.control.safety import SafetyKernel
from penstock.control.scheduler import Scheduler
from penstock.control.store_retry import RetryingStore
from penstock.control.workers import Roster, WorkerRecord
from penstock.core import ledger
from penstock.core.job import Job, JobRequest, JobResult, Timeouts
from penstock.core.journal import BIRTH
from penstock.core.ledger import (
    Accept,
    Answer,
    BulkAnswer,
    BulkMove,
    Change,
    ChangeOutcome,
    Checkpoint,
    Commit,
    Decider,
    Known,
    Move,
    advance,
    followers,
)
from penstock.core.verdict import Hold, SafetyVerdict
from penstock.lifecycles.canonical import TERMINAL, JobEvent, JobState
from penstock.ports.bus import Checkpointed, Dispatch, jobs_of
from penstock.ports.engine_api import Limit
from penstock.worker.waiting import Key, Waits
from penstock.worker.worker import Worker
from penstock.workloads.function.context import ChildKeys

# A limit that ends inside the virtual loop would be taken for an error of a task there.
pytestmark = pytest.mark.timeout(600)

SEEDS = 1000
"""Histories within which a mutant must be caught."""

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def caught(*promises: Promise) -> bool:
    for seed in range(SEEDS):
        broken = {violation.promise for violation in simulate(seed).violations}
        if broken & set(promises):
            return True
    return False


def test_an_acknowledgement_before_the_commit(monkeypatch: Patch) -> None:
    async def submit(self: Gateway, requests: Sequence[JobRequest]) -> list[Job]:
        now = self.clock.now()
        accepts = [self._admissible(request, now, "", all_or_none=False) for request in requests]
        task = asyncio.ensure_future(self.store.apply(accepts))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        decided = Decider({}, Known(), 0, 0).decide(accepts)
        return [answer.job for answer in decided if answer.job is not None]

    monkeypatch.setattr(Gateway, "submit", submit)
    assert caught(Promise.COMMITTED)


def test_a_disk_that_forgets_its_last_commit_in_a_crash(monkeypatch: Patch) -> None:
    crash = FaultyMemoryStore.crash

    def forget(self: FaultyMemoryStore) -> None:
        crash(self)
        rows = self.memory._rows
        if rows:
            del self.memory._ids[rows.pop(max(rows)).job_id]

    monkeypatch.setattr(FaultyMemoryStore, "crash", forget)
    assert caught(Promise.KEPT)


def test_no_fence(monkeypatch: Patch) -> None:
    bulk = Decider.bulk

    def unfenced(job: Job, move: Move, page: int = 0) -> Answer:
        return advance(job, replace(move, attempt=None), page)

    def unfenced_bulk(self: Decider, move: BulkMove) -> BulkAnswer:
        return bulk(self, replace(move, attempts=None))

    monkeypatch.setattr(ledger, "advance", unfenced)
    monkeypatch.setattr(Decider, "bulk", unfenced_bulk)
    assert caught(Promise.LIVE)


def test_checkpoints_without_a_fence(monkeypatch: Patch) -> None:
    def unfenced(self: Decider, change: Checkpoint) -> Answer:
        job = self.find(change.job_id)
        assert job is not None
        self._steps.extend((job.seq, replace(row, attempt=change.attempt)) for row in change.rows)
        return Answer(ChangeOutcome.MOVED, job)

    monkeypatch.setattr(Decider, "_checkpoint", unfenced)
    assert caught(Promise.CHECKPOINT_LIVE)


def test_a_checkpoint_that_is_acknowledged_before_its_commit(monkeypatch: Patch) -> None:
    keep = CheckpointService._keep

    async def hasty(self: CheckpointService, batch: list[tuple[Checkpointed, int]]) -> None:
        for message, _ in batch:
            self._answer(message, None)
        await keep(self, batch)

    monkeypatch.setattr(CheckpointService, "_keep", hasty)
    assert caught(Promise.CHECKPOINT)


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_a_lease_that_is_too_short(monkeypatch: Patch, share: float) -> None:
    why_lost = reconciler._why_lost

    def hasty(worker: WorkerRecord, limits: Timeouts, monotonic: float) -> str | None:
        return why_lost(worker, replace(limits, lease=limits.lease * share), monotonic)

    monkeypatch.setattr(reconciler, "_why_lost", hasty)
    assert caught(Promise.UNTOUCHED)


def test_a_connection_that_is_given_up_at_once(monkeypatch: Patch) -> None:
    why_lost = reconciler._why_lost

    def hasty(worker: WorkerRecord, limits: Timeouts, monotonic: float) -> str | None:
        return why_lost(worker, replace(limits, lost_grace=0.0), monotonic)

    monkeypatch.setattr(reconciler, "_why_lost", hasty)
    assert caught(Promise.UNTOUCHED)


def test_a_lost_job_that_is_repeated_whether_it_may_or_not(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Losses, "_may_go_on", lambda self, job: True)
    assert caught(Promise.ONCE)


def test_a_start_log_that_is_only_read(monkeypatch: Patch) -> None:
    def read(self: SimStartLogs, job_id: str, attempt: int) -> bool:
        return (job_id, attempt) not in self.begun

    monkeypatch.setattr(SimStartLogs, "revoke", read)
    assert caught(Promise.ONCE)


def test_a_worker_that_begins_before_its_start_is_durable(monkeypatch: Patch) -> None:
    take = Worker._take

    def careless(self: Worker, dispatch: Dispatch) -> None:
        take(self, replace(dispatch, request=replace(dispatch.request, idempotent=True)))

    monkeypatch.setattr(Worker, "_take", careless)
    assert caught(Promise.ONCE)


def test_a_worker_that_is_given_a_job_before_the_commit(monkeypatch: Patch) -> None:
    commit = Scheduler._commit

    async def hasty(self: Scheduler, changes: Sequence[Change], bulk: Any = ()) -> Any:
        for move in bulk:
            for job_id in move.job_ids if JobEvent.DISPATCH in move.events else ():
                job = await self.store.get(job_id)
                assert job is not None
                order = Dispatch(job.request, job.attempt + 1, 5.0)
                self.bus.publish(jobs_of(move.worker_id or ""), [order])
        return await commit(self, changes, bulk)

    monkeypatch.setattr(Scheduler, "_commit", hasty)
    assert caught(Promise.COMMITTED)


def test_a_job_that_is_given_away_before_it_is_accepted(monkeypatch: Patch) -> None:
    give = Scheduler.dispatch_accepted

    def hasty(self: Scheduler, jobs: Sequence[Job]) -> Sequence[BulkMove]:
        moves, requests = give(self, jobs), {job.job_id: job.request for job in jobs}
        for move in moves:
            orders = [Dispatch(requests[job_id], 1, 5.0) for job_id in move.job_ids]
            self.bus.publish(jobs_of(move.worker_id or ""), orders)
        return moves

    monkeypatch.setattr(Scheduler, "dispatch_accepted", hasty)
    assert caught(Promise.COMMITTED)


def test_a_job_that_is_given_away_whatever_the_rules_say(monkeypatch: Patch) -> None:
    monkeypatch.setattr(SafetyKernel, "built_in", True)
    monkeypatch.setattr(Scheduler, "_is_allowed", lambda self, job: True)
    assert caught(Promise.JUDGED)


def test_a_waiter_that_is_told_before_the_commit(monkeypatch: Patch) -> None:
    feeds: list[Feed] = []
    init, release = Feed.__init__, Intake.release

    def remember(self: Feed, *args: Any) -> None:
        init(self, *args)
        feeds.append(self)

    def blab(self: Intake, result: JobResult, monotonic: float) -> None:
        job = self._open_jobs.held.get(result.job_id)
        if job is not None:
            ended = replace(job, state=result.status, result=result)
            for tell in feeds[-1]._waiters.pop(job.job_id, ()):
                tell(ended)
        release(self, result, monotonic)

    monkeypatch.setattr(Feed, "__init__", remember)
    monkeypatch.setattr(Intake, "release", blab)
    assert caught(Promise.COMMITTED)


def test_a_retry_that_is_emitted_twice(monkeypatch: Patch) -> None:
    numbers = count()

    def doubled(job: Job, move: Move) -> tuple[Accept, ...]:
        then = followers(job, move)
        twins = [
            replace(each, request=replace(each.request, job_id=f"twin{next(numbers)}"))
            for each in then
        ]
        return (*then, *twins)

    monkeypatch.setattr(ledger, "followers", doubled)
    assert caught(Promise.LINKED)


def test_a_retry_of_what_was_asked_to_end(monkeypatch: Patch) -> None:
    def stubborn(job: Job, move: Move) -> tuple[Accept, ...]:
        return move.then

    monkeypatch.setattr(ledger, "followers", stubborn)
    monkeypatch.setattr("penstock.control.intake.may_retry", lambda request, result: True)
    monkeypatch.setattr("penstock.control.intake.ending", _ending_that_forgets_cancels())
    monkeypatch.setattr("penstock.control.intake.ending", _ending_that_forgets_cancels())
    assert caught(Promise.UNWANTED)


def _ending_that_forgets_cancels() -> Callable[..., Move]:
    from penstock.control.intake import ending

    def forgetful(job: Job | None, *args: Any) -> Move:
        asked = None if job is None else replace(job, cancel_requested=False)
        return ending(asked, *args)

    return forgetful


def test_an_end_that_is_overwritten(monkeypatch: Patch) -> None:
    decide = Decider._one

    def overwriting(self: Decider, change: Change) -> Answer:
        job = self.find(change.job_id) if isinstance(change, Move) else None
        answer = decide(self, change)
        if job is None or not isinstance(change, Move) or not job.is_final:
            return answer
        result = change.result
        if result is not None and result.status is not job.state:
            self.heads[job.job_id] = replace(job, state=result.status, result=result)
            self._rows[job.job_id] = None
            self._begin_page()
            self._stride(BIRTH, "scheduler", change.at, "", None, None)
        return answer

    monkeypatch.setattr(Decider, "_one", overwriting)
    assert caught(Promise.ONE_END, Promise.FOLD)


def test_a_log_that_is_not_written(monkeypatch: Patch) -> None:
    commit = Decider.commit

    def forgetful(self: Decider) -> Commit:
        commit_ = commit(self)
        for page in commit_.pages:
            page.strides[:] = [s for s in page.strides if s.path.after not in TERMINAL]
        return commit_

    monkeypatch.setattr(Decider, "commit", forgetful)
    assert caught(Promise.FOLD)


def test_a_worker_that_runs_what_it_is_sent_twice(monkeypatch: Patch) -> None:
    take = Worker._take

    def forgetful(self: Worker, dispatch: Dispatch) -> None:
        self._received.clear()
        take(self, dispatch)

    monkeypatch.setattr(Worker, "_take", forgetful)
    assert caught(Promise.FENCE)


def test_a_job_that_nobody_looks_after(monkeypatch: Patch) -> None:
    async def idle(self: Reconciler) -> None:
        pass

    monkeypatch.setattr(Reconciler, "sweep", idle)
    assert caught(Promise.ENDED)


def test_a_read_that_fails_and_is_not_tried_again(monkeypatch: Patch) -> None:
    async def once(self: RetryingStore, seqs: Sequence[int]) -> list[Job]:
        return await self._store.fetch(seqs)

    monkeypatch.setattr(RetryingStore, "fetch", once)
    assert any(simulate(seed).failures for seed in range(SEEDS)), "the scheduler should die of it"


def test_a_wait_that_reads_first_and_registers_after(monkeypatch: Patch) -> None:
    async def ended(self: Feed, job_id: str) -> Job:
        job = await self._store.get(job_id)
        assert job is not None
        if job.is_final:
            return job
        waiter: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self.listen((job_id,), (waiter.set_result,))
        return await waiter

    monkeypatch.setattr(Feed, "ended", ended)
    assert caught(Promise.ANSWERED)


def test_a_result_that_cannot_be_stored_and_holds_up_all_others(monkeypatch: Patch) -> None:
    async def together(self: Scheduler, changes: Sequence[Change], bulk: Any = ()) -> Any:
        return await self._retrying.commit(changes, bulk)

    monkeypatch.setattr(Scheduler, "_commit", together)
    assert caught(Promise.ENDED)


# -- the gate -----------------------------------------------------------------------------


def test_a_limit_that_lets_one_too_many_go(monkeypatch: Patch) -> None:
    def off_by_one(self: Limiter, bucket: Bucket, limit: Limit, taken: Counter[Bucket]) -> bool:
        most = limit.concurrency
        return most is not None and self._running[bucket] + taken[bucket] > most

    monkeypatch.setattr(Limiter, "_too_many_run", off_by_one)
    assert caught(Promise.WITHIN)


def test_a_limit_that_forgets_what_one_turn_gave_out(monkeypatch: Patch) -> None:
    def forgetful(self: Limiter, bucket: Bucket, limit: Limit, taken: Counter[Bucket]) -> bool:
        return limit.concurrency is not None and self._running[bucket] >= limit.concurrency

    monkeypatch.setattr(Limiter, "_too_many_run", forgetful)
    assert caught(Promise.WITHIN)


def test_a_limit_that_forgets_what_lost_its_worker(monkeypatch: Patch) -> None:
    orphan = OpenJobs.orphan

    def forgetful(self: OpenJobs, job: Job, why: str) -> None:
        orphan(self, job, why)
        self.limiter.let_go(job.job_id)

    monkeypatch.setattr(OpenJobs, "orphan", forgetful)
    assert caught(Promise.WITHIN)


def test_a_limit_that_forgets_what_was_held_before_a_restart(monkeypatch: Patch) -> None:
    restore = OpenJobs.restore

    def forgetful(self: OpenJobs, jobs: Sequence[Job]) -> None:
        restore(self, jobs)
        self.limiter._running.clear()

    monkeypatch.setattr(OpenJobs, "restore", forgetful)
    assert caught(Promise.WITHIN)


def test_an_approval_that_counts_under_other_rules(monkeypatch: Patch) -> None:
    def lax(hold: Hold, verdict: SafetyVerdict, request: JobRequest) -> bool:
        return approvals.is_current(replace(hold, snapshot=verdict.snapshot), verdict, request)

    monkeypatch.setattr(safety, "is_current", lax)
    assert caught(Promise.APPROVED)


def test_a_vote_that_is_enough_however_many_are_needed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Hold, "approved", property(lambda self: bool(self.votes)))
    assert caught(Promise.APPROVED)


def test_rules_that_change_and_nobody_notices(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OpenJobs, "judge_all_again", lambda self: None)
    assert caught(Promise.JUDGED)


def test_a_parents_failure_that_is_ignored(monkeypatch: Patch) -> None:
    end = Dependencies._end

    def lenient(self: Dependencies, seq: int, parent_id: str, how: str, *, well: bool) -> None:
        end(self, seq, parent_id, how, well=True)

    monkeypatch.setattr(Dependencies, "_end", lenient)
    assert caught(Promise.AFTER)


def test_a_parent_whose_retry_is_not_waited_for(monkeypatch: Patch) -> None:
    hear = Dependencies.hear

    def hasty(self: Dependencies, parent: Job) -> None:
        hear(self, replace(parent, successor=None))

    monkeypatch.setattr(Dependencies, "hear", hasty)
    assert caught(Promise.AFTER)


def test_a_hold_that_nobody_ends(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OpenJobs, "next_expiry", lambda self: None)
    assert caught(Promise.ENDED)


# -- parents and children -----------------------------------------------------------------


def test_children_that_outlive_a_parent_that_failed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Families, "hear", lambda self, job: None)
    assert caught(Promise.FAMILY)


def test_children_whose_parent_failed_just_before_a_restart(monkeypatch: Patch) -> None:
    def forgetful(self: Families, chain: tuple[str, str], last: Job | None) -> None:
        self.unknown.pop(chain, None)

    monkeypatch.setattr(Families, "look_up", forgetful)
    assert caught(Promise.FAMILY)


def test_a_parent_that_waits_and_keeps_its_slot_on_the_worker(monkeypatch: Patch) -> None:
    def greedy(self: Worker) -> int:
        return len(self._active) + len(self._starting) + len(self._ready)

    monkeypatch.setattr(Worker, "_busy", greedy)
    assert caught(Promise.ENDED)


def test_a_parent_that_waits_and_keeps_its_slot_for_the_engine(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Roster, "set_waiting", lambda *args, **given: None)
    assert caught(Promise.ENDED)


def test_a_parent_that_waits_and_keeps_its_limits(monkeypatch: Patch) -> None:
    wait = OpenJobs.wait

    def greedy(self: OpenJobs, job: Job, waits_for: Wait) -> None:
        wait(self, job, waits_for)
        self.limiter.hold_again(job)

    monkeypatch.setattr(OpenJobs, "wait", greedy)
    assert caught(Promise.ENDED)


def test_a_parent_that_goes_on_whether_there_is_a_slot_or_not(monkeypatch: Patch) -> None:
    def hasty(self: Waits, key: Key) -> None:
        wait = self.attempts.get(key)
        if wait is not None and wait.going_on is not None:
            self._go_on(key, wait)

    monkeypatch.setattr(Waits, "resume", hasty)
    assert caught(Promise.SLOTS)


def test_a_parent_that_goes_on_whatever_its_limits_say(monkeypatch: Patch) -> None:
    monkeypatch.setattr(OpenJobs, "may_go_on", lambda self, job: True)
    assert caught(Promise.WITHIN)


def test_child_keys_that_are_others_in_every_attempt(monkeypatch: Patch) -> None:
    numbers, take = count(), ChildKeys.take

    def fickle(self: ChildKeys, chain: str, topic: str, payload: bytes) -> str:
        return take(self, chain, topic, payload + str(next(numbers)).encode())

    monkeypatch.setattr(ChildKeys, "take", fickle)
    assert caught(Promise.SAME)


def test_a_retry_that_is_given_the_children_that_failed(monkeypatch: Patch) -> None:
    async def lazy(self: Gateway, accept: Accept, answer: Answer) -> Answer:
        return answer

    monkeypatch.setattr(Gateway, "_run_again", lazy)
    assert caught(Promise.SAME)


def test_a_retry_that_runs_all_its_children_again(monkeypatch: Patch) -> None:
    async def wasteful(self: Gateway, child: Job | None, parent: Job) -> bool:
        return child is not None and child.request.parent_job_id != parent.job_id

    monkeypatch.setattr(Gateway, "_is_spent", wasteful)
    assert caught(Promise.SAME)


def test_tries_that_are_counted_as_jobs(monkeypatch: Patch) -> None:
    tally = Ledger.tally

    async def unfolded(self: Ledger, tenant: str | None = None) -> dict[JobState, int]:
        counts = Counter(await tally(self, tenant))
        counts[JobState.FAILED] += await self.retried(tenant)
        return {state: number for state, number in counts.items() if number}

    monkeypatch.setattr(Ledger, "tally", unfolded)
    assert caught(Promise.COUNTS)
