"""The checker can fail: each engine that is broken on purpose is caught."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.adapters.memory import store as memory_store
from penstock.adapters.memory.store import MemoryStore
from penstock.control import holds, judge, reconciler
from penstock.control.board import Board
from penstock.control.buckets import Bucket, Terms
from penstock.control.dependencies import Dependencies
from penstock.control.feed import Feed
from penstock.control.gateway import Gateway
from penstock.control.intake import Intake
from penstock.control.limiter import Limiter
from penstock.control.limits import Limits
from penstock.control.losses import Losses
from penstock.control.reconciler import Reconciler
from penstock.control.roster import WorkerRecord
from penstock.control.scheduler import Scheduler
from penstock.control.store_retry import RetryingStore
from penstock.core.job import Job, JobRequest
from penstock.core.transition import Accept, Answer, Change, Move, admit, advance, followers
from penstock.core.verdict import Hold, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.bus import AnyMessage, Dispatch, Finished, jobs_of
from penstock.testing.history import Promise
from penstock.testing.simulation.book import SimStarts
from penstock.testing.simulation.store import FaultyMemoryStore
from penstock.testing.simulator import simulate
from penstock.worker.worker import Worker

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
        return [job for accept in accepts if (job := admit(accept, 0).job) is not None]

    monkeypatch.setattr(Gateway, "submit", submit)
    assert caught(Promise.COMMITTED)


def test_a_disk_that_forgets_its_last_commit_in_a_crash(monkeypatch: Patch) -> None:
    crash = FaultyMemoryStore.crash

    def forget(self: FaultyMemoryStore) -> None:
        crash(self)
        store = self.inner
        newest = max(store._ids, default=None)
        if newest is not None:
            job = store._jobs.pop(store._ids.pop(newest))
            del store._logs[job.job_id]

    monkeypatch.setattr(FaultyMemoryStore, "crash", forget)
    assert caught(Promise.KEPT)


def test_no_fence(monkeypatch: Patch) -> None:
    def unfenced(job: Job, move: Move) -> Answer:
        return advance(job, replace(move, attempt=None))

    monkeypatch.setattr(memory_store, "advance", unfenced)
    assert caught(Promise.LIVE)


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_a_lease_that_is_too_short(monkeypatch: Patch, share: float) -> None:
    why_lost = reconciler._why_lost

    def hasty(worker: WorkerRecord, limits: Limits, monotonic: float) -> str | None:
        return why_lost(worker, replace(limits, lease=limits.lease * share), monotonic)

    monkeypatch.setattr(reconciler, "_why_lost", hasty)
    assert caught(Promise.UNTOUCHED)


def test_a_connection_that_is_given_up_at_once(monkeypatch: Patch) -> None:
    why_lost = reconciler._why_lost

    def hasty(worker: WorkerRecord, limits: Limits, monotonic: float) -> str | None:
        return why_lost(worker, replace(limits, lost_grace=0.0), monotonic)

    monkeypatch.setattr(reconciler, "_why_lost", hasty)
    assert caught(Promise.UNTOUCHED)


def test_a_lost_job_that_is_repeated_whether_it_may_or_not(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Losses, "_may_go_on", lambda self, job: True)
    assert caught(Promise.ONCE)


def test_a_book_that_is_only_read(monkeypatch: Patch) -> None:
    def read(self: SimStarts, job_id: str, attempt: int) -> bool:
        return (job_id, attempt) not in self.begun

    monkeypatch.setattr(SimStarts, "revoke", read)
    assert caught(Promise.ONCE)


def test_a_worker_that_begins_before_its_start_is_durable(monkeypatch: Patch) -> None:
    take = Worker._take

    def careless(self: Worker, dispatch: Dispatch) -> None:
        take(self, replace(dispatch, request=replace(dispatch.request, idempotent=True)))

    monkeypatch.setattr(Worker, "_take", careless)
    assert caught(Promise.ONCE)


def test_a_worker_that_is_given_a_job_before_the_commit(monkeypatch: Patch) -> None:
    commit = Scheduler._commit

    async def hasty(self: Scheduler, changes: list[Change]) -> list[Answer]:
        for change in changes:
            if isinstance(change, Move) and JobEvent.DISPATCH in change.events:
                job = await self.store.get(change.job_id)
                assert job is not None
                order = Dispatch(job.request, job.attempt + 1, 5.0)
                self.bus.publish(jobs_of(change.worker_id or ""), [order])
        return await commit(self, changes)

    monkeypatch.setattr(Scheduler, "_commit", hasty)
    assert caught(Promise.COMMITTED)


def test_a_waiter_that_is_told_before_the_commit(monkeypatch: Patch) -> None:
    feeds: list[Feed] = []
    init, take_in = Feed.__init__, Intake.take_in

    def remember(self: Feed, *args: Any) -> None:
        init(self, *args)
        feeds.append(self)

    def blab(self: Intake, message: AnyMessage, now: float, monotonic: float) -> Any:
        if isinstance(message, Finished):
            job = self._board.held.get(message.result.job_id)
            if job is not None:
                ended = replace(job, state=message.result.status, result=message.result)
                for waiter in feeds[-1]._waiters.pop(job.job_id, ()):
                    waiter.set_result(ended)
        return take_in(self, message, now, monotonic)

    monkeypatch.setattr(Feed, "__init__", remember)
    monkeypatch.setattr(Intake, "take_in", blab)
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

    monkeypatch.setattr(memory_store, "followers", doubled)
    assert caught(Promise.LINKED)


def test_a_retry_of_what_was_asked_to_end(monkeypatch: Patch) -> None:
    def stubborn(job: Job, move: Move) -> tuple[Accept, ...]:
        return move.then

    monkeypatch.setattr(memory_store, "followers", stubborn)
    monkeypatch.setattr("penstock.core.transition.followers", stubborn)
    monkeypatch.setattr("penstock.control.endings.may_retry", lambda request, result: True)
    monkeypatch.setattr("penstock.control.endings.ending", _ending_that_forgets_cancels())
    monkeypatch.setattr("penstock.control.intake.ending", _ending_that_forgets_cancels())
    assert caught(Promise.UNWANTED)


def _ending_that_forgets_cancels() -> Callable[..., Move]:
    from penstock.control.endings import ending

    def forgetful(job: Job | None, *args: Any) -> Move:
        asked = None if job is None else replace(job, cancel_requested=False)
        return ending(asked, *args)

    return forgetful


def test_an_end_that_is_overwritten(monkeypatch: Patch) -> None:
    def overwriting(job: Job, move: Move) -> Answer:
        answer = advance(job, move)
        if job.is_final and move.result is not None and move.result.status is not job.state:
            changed = replace(job, state=move.result.status, result=move.result)
            return replace(answer, job=changed)
        return answer

    decide = MemoryStore._decide

    def deciding(self: MemoryStore, change: Change, moved: list[Answer]) -> Answer:
        answer = decide(self, change, moved)
        if answer.job is not None:
            self._jobs[answer.job.job_id] = answer.job
        return answer

    monkeypatch.setattr(memory_store, "advance", overwriting)
    monkeypatch.setattr(MemoryStore, "_decide", deciding)
    assert caught(Promise.ONE_END, Promise.FOLD)


def test_a_log_that_is_not_written(monkeypatch: Patch) -> None:
    keep = MemoryStore._keep

    def forgetful(self: MemoryStore, answer: Answer, moved: list[Answer]) -> None:
        keep(self, answer, moved)
        assert answer.job is not None
        if answer.job.is_final:
            self._logs[answer.job.job_id].pop()

    monkeypatch.setattr(MemoryStore, "_keep", forgetful)
    assert caught(Promise.FOLD)


def test_a_worker_that_runs_what_it_is_sent_twice(monkeypatch: Patch) -> None:
    take = Worker._take

    def forgetful(self: Worker, dispatch: Dispatch) -> None:
        self._taken.clear()
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
    assert caught(Promise.ENDED)


def test_a_wait_that_reads_first_and_registers_after(monkeypatch: Patch) -> None:
    async def ended(self: Feed, job_id: str) -> Job:
        job = await self._store.get(job_id)
        assert job is not None
        if job.is_final:
            return job
        waiter: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._waiters[job_id].append(waiter)
        return await waiter

    monkeypatch.setattr(Feed, "ended", ended)
    assert caught(Promise.ANSWERED)


def test_a_result_that_cannot_be_stored_and_holds_up_all_others(monkeypatch: Patch) -> None:
    async def together(self: Scheduler, changes: list[Change]) -> list[Answer]:
        return await self._retrying.apply(changes)

    monkeypatch.setattr(Scheduler, "_commit", together)
    assert caught(Promise.ENDED)


# -- the gate -----------------------------------------------------------------------------


def test_a_limit_that_lets_one_too_many_go(monkeypatch: Patch) -> None:
    def off_by_one(self: Limiter, bucket: Bucket, terms: Terms, taken: Counter[Bucket]) -> bool:
        most = terms.concurrency
        return most is not None and self._running[bucket] + taken[bucket] > most

    monkeypatch.setattr(Limiter, "_too_many_run", off_by_one)
    assert caught(Promise.WITHIN)


def test_a_limit_that_forgets_what_one_turn_gave_out(monkeypatch: Patch) -> None:
    def forgetful(self: Limiter, bucket: Bucket, terms: Terms, taken: Counter[Bucket]) -> bool:
        return terms.concurrency is not None and self._running[bucket] >= terms.concurrency

    monkeypatch.setattr(Limiter, "_too_many_run", forgetful)
    assert caught(Promise.WITHIN)


def test_a_limit_that_forgets_what_lost_its_worker(monkeypatch: Patch) -> None:
    set_adrift = Board.set_adrift

    def forgetful(self: Board, job: Job, why: str) -> None:
        set_adrift(self, job, why)
        self.limiter.let_go(job.job_id)

    monkeypatch.setattr(Board, "set_adrift", forgetful)
    assert caught(Promise.WITHIN)


def test_a_limit_that_forgets_what_was_held_before_a_restart(monkeypatch: Patch) -> None:
    restore = Board.restore

    def forgetful(self: Board, jobs: Sequence[Job]) -> None:
        restore(self, jobs)
        self.limiter._running.clear()

    monkeypatch.setattr(Board, "restore", forgetful)
    assert caught(Promise.WITHIN)


def test_an_approval_that_counts_under_other_rules(monkeypatch: Patch) -> None:
    def lax(hold: Hold, verdict: SafetyVerdict, request: JobRequest) -> bool:
        return holds.is_current(replace(hold, snapshot=verdict.snapshot), verdict, request)

    monkeypatch.setattr(judge, "is_current", lax)
    assert caught(Promise.APPROVED)


def test_a_vote_that_is_enough_however_many_are_needed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Hold, "approved", property(lambda self: bool(self.votes)))
    assert caught(Promise.APPROVED)


def test_rules_that_change_and_nobody_notices(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Board, "judge_all_again", lambda self: None)
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
    monkeypatch.setattr(Board, "next_expiry", lambda self: None)
    assert caught(Promise.ENDED)
