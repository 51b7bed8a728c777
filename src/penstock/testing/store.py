"""What every `Backend` must do below a ledger, as tests. Subclass, make one, and run pytest:

class TestMyBackend(BackendContract):
    def backend(self, folder):
        return MyBackend(folder / "jobs")

    def successor(self, store, folder):
        return MyBackend(folder / "jobs")
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.control.ledger import Ledger
from penstock.core.errors import NotFound, StoreFailed, Unavailable
from penstock.core.job import (
    Job,
    JobRequest,
    JobResult,
    ParentPolicy,
    Priority,
    RetryPolicy,
    Unique,
    UniqueScope,
)
from penstock.core.journal import Folded, Stride, fold
from penstock.core.ledger import Accept, Answer, BulkMove, Change, ChangeOutcome, Checkpoint, Step
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    Backend,
    JobQuery,
    LogLine,
    StepPage,
    StepQuery,
)
from penstock.testing.aio import run_async
from penstock.testing.gate import GateContract
from penstock.testing.journal import JournalContract
from penstock.testing.ownership import OwnershipContract
from penstock.testing.samples import (
    T0,
    accept,
    an_artifact,
    failed,
    found,
    ids,
    line,
    move,
    names,
    one,
    state_of,
    succeeded,
    verdicts,
)

_S, _E = JobState, JobEvent


class BackendContract(GateContract, JournalContract, OwnershipContract, ABC):
    """The promises of `penstock.control.ledger.Ledger`, kept over a backend."""

    @abstractmethod
    def backend(self, folder: Path) -> Backend:
        """A backend that keeps what it has in this folder; empty, if the folder is."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Ledger]:
        store = Ledger(self.backend(tmp_path))
        yield store
        asyncio.run(store.close())

    # -- accepting ----------------------------------------------------------------

    @run_async
    async def test_an_accepted_request_is_a_pending_job(self, store: Ledger) -> None:
        (answer,) = await store.apply([accept("a")])
        assert answer.verdict is ChangeOutcome.MOVED
        job = await one(store, "a")
        assert answer.job == job
        assert (job.state, job.version, job.attempt) == (_S.PENDING, 1, 0)
        assert job.accepted_at == job.updated_at == T0
        (entry,) = await store.history("a")
        assert answer.transitions == (entry,)
        assert (entry.n, entry.before, entry.event, entry.after) == (1, None, _E.ACCEPT, _S.PENDING)

    @run_async
    async def test_every_field_is_kept(self, store: Ledger) -> None:
        full = JobRequest(
            job_id="full",
            topic="job.full.of-fields",
            priority=Priority.CRITICAL,
            context_ptr="blob:sha256-" + "0" * 64,
            adapter_id="adapter",
            env={"k": "ü", "empty": ""},
            parent_job_id="parent",
            workflow_id="flow",
            step_index=0,
            tenant="acme",
            labels={"l": "v"},
            idempotency_key="key",
            timeout=1.5,
            dispatch_timeout=2.5,
            deadline=T0 + 9.25,
            run_at=T0 + 0.125,
            retry=RetryPolicy(retries=2, on=("ValueError",), never=("OOM",)),
            idempotent=True,
            retry_number=1,
            principal="alice",
            capability="repo.write",
            risk_tags=("money", "pii"),
            estimated_cost=0.5,
            after=("x", "y"),
            if_parent_fails=ParentPolicy.RUN,
            unique=Unique("only", UniqueScope.WAITING, 60.0),
            schedule="nightly",
        )
        result = JobResult(
            job_id="full",
            status=_S.FAILED,
            result_ptr="data:,x",
            worker_id="w1",
            execution_ms=0.1,
            error_code="E",
            error_message="ümlaut\n",
            attempt=1,
            error_kinds=("ValueError", "Exception"),
            retry_after=3.0,
            traceback='File "a.py", line 1\nümlaut',
            artifacts=(an_artifact("plots/ü.png", "1"), an_artifact("log.txt", "2")),
        )
        await store.apply([Accept(full, T0, "gateway", "why not")])
        await store.apply([move("full", _E.SCHEDULE, _E.DISPATCH, at=T0 + 1)])
        await store.apply([move("full", _E.FAIL, at=T0 + 2, result=result, attempt=1)])
        for job in (await one(store, "full"), *await store.fetch([1]), *await found(store)):
            assert job.request == full
            assert job.result == result
            assert (job.worker_id, job.pool, job.attempt) == ("w1", "default", 1)
            assert job.dispatched_at == T0 + 1
            assert job.started_at == job.finished_at == job.updated_at == T0 + 2
        assert (await store.history("full"))[0].reason == "why not"

    @run_async
    async def test_an_id_that_is_taken_is_answered_with_the_job_that_has_it(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("a", topic="job.first")])
        (answer,) = await store.apply([accept("a", topic="job.second")])
        assert answer.verdict is ChangeOutcome.REPEATED
        assert answer.job == await one(store, "a")
        assert answer.job.request.topic == "job.first"
        assert answer.transitions == ()
        assert len(await store.history("a")) == 1

    @pytest.mark.seed("001", "1.1")
    @run_async
    async def test_the_id_of_an_ended_job_stays_taken(self, store: Ledger) -> None:
        await store.apply([accept("a"), move("a", _E.CANCEL)])
        (answer,) = await store.apply([accept("a")])
        assert (answer.verdict, state_of(answer)) == (ChangeOutcome.REPEATED, _S.CANCELLED)

    @pytest.mark.seed("001", "6.12")
    @run_async
    async def test_a_key_is_taken_within_its_tenant(self, store: Ledger) -> None:
        key: dict[str, Any] = {"idempotency_key": "k"}
        await store.apply([accept("a", tenant="t1", **key), move("a", _E.CANCEL)])
        again, other = await store.apply(
            [accept("b", tenant="t1", **key), accept("c", tenant="t2", **key)]
        )
        assert again.verdict is ChangeOutcome.REPEATED
        assert again.job is not None
        assert again.job.job_id == "a"
        assert other.verdict is ChangeOutcome.MOVED
        assert await store.get("b") is None

    @run_async
    async def test_ids_and_keys_are_taken_within_one_batch_too(self, store: Ledger) -> None:
        answers = await store.apply(
            [
                accept("a", idempotency_key="k"),
                accept("a"),
                accept("b", idempotency_key="k"),
                accept("c"),
            ]
        )
        assert verdicts(answers) == "MRRM"
        assert [a.job.job_id for a in answers if a.job] == ["a", "a", "a", "c"]

    @run_async
    async def test_a_batch_that_goes_all_or_none_is_refused_whole(self, store: Ledger) -> None:
        await store.apply([accept("a"), accept("k", idempotency_key="k")])
        other: dict[str, Any] = {"env": {"k": "v"}}
        for taken in (accept("a", **other), accept("", idempotency_key="k", **other)):
            batch = [replace(one, all_or_none=True) for one in (accept("b"), taken, accept("c"))]
            answers = await store.apply([*batch, move("a", _E.CANCEL)])
            assert {answer.verdict for answer in answers} == {ChangeOutcome.REFUSED}
            assert answers[1].job is not None
            assert answers[1].job.job_id == (taken.request.job_id or "k")
        assert await names(store) == "ka"
        batch = [replace(one, all_or_none=True) for one in (accept("b"), accept("a"))]
        assert [a.job.job_id for a in await store.apply(batch) if a.job] == ["b", "a"]

    @run_async
    async def test_a_very_large_batch_is_committed_beside_others(self, store: Ledger) -> None:
        heard: list[str] = []
        store.listen(lambda strides: heard.extend(ids(strides)))
        large = store.apply([accept(f"large{n}") for n in range(6000)])
        small = (store.apply([accept(f"small{n}")]) for n in range(3))
        answers = await asyncio.gather(large, *small, self._later(store))
        assert [len(one) for one in answers] == [6000, 1, 1, 1, 1]
        assert len(heard) == len(set(heard)) == 6004
        assert (await store.verify()).mismatches == ()
        assert await store.tally() == {_S.PENDING: 6004}

    @run_async
    async def test_jobs_are_numbered_in_the_order_of_acceptance(self, store: Ledger) -> None:
        first = await store.apply([accept("b"), accept("a")])
        second = await store.apply([accept("c")])
        seqs = [answer.job.seq for answer in (*first, *second) if answer.job]
        assert seqs == sorted(set(seqs))

    # -- moving -------------------------------------------------------------------

    @run_async
    async def test_changes_of_one_batch_build_on_each_other(self, store: Ledger) -> None:
        answers = await store.apply(
            [
                accept("a"),
                move("a", _E.SCHEDULE),
                move("a", _E.DISPATCH),
                move("a", _E.START, attempt=1),
                move("a", _E.SUCCEED, attempt=1, result=succeeded("a")),
            ]
        )
        assert verdicts(answers) == "MMMMM"
        assert [state_of(a) for a in answers] == [
            _S.PENDING,
            _S.SCHEDULED,
            _S.DISPATCHED,
            _S.RUNNING,
            _S.SUCCEEDED,
        ]
        assert [t.n for t in await store.history("a")] == [1, 2, 3, 4, 5]

    @pytest.mark.seed("001", "5.2")
    @run_async
    async def test_what_the_table_does_not_have_is_refused_and_leaves_no_trace(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("a")])
        before = await one(store, "a")
        (answer,) = await store.apply([move("a", _E.SUCCEED)])
        assert answer.verdict is ChangeOutcome.REFUSED
        assert "PENDING" in answer.why
        assert answer.job == before == await one(store, "a")
        assert len(await store.history("a")) == 1

    @pytest.mark.seed("001", "4.10")
    @run_async
    async def test_a_move_by_the_wrong_role_is_refused(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        (answer,) = await store.apply([move("a", _E.SCHEDULE, actor="worker:w1")])
        assert (answer.verdict, "worker" in answer.why) == (ChangeOutcome.REFUSED, True)

    @run_async
    async def test_a_move_of_an_unknown_job_is_refused(self, store: Ledger) -> None:
        (answer,) = await store.apply([move("nobody", _E.CANCEL)])
        assert (answer.verdict, answer.job) == (ChangeOutcome.REFUSED, None)
        assert "nobody" in answer.why

    @pytest.mark.seed("001", "3.4")
    @run_async
    async def test_a_repeat_is_accepted_and_changes_nothing(self, store: Ledger) -> None:
        await store.apply([accept("a"), move("a", _E.SCHEDULE)])
        before = await one(store, "a")
        (answer,) = await store.apply([move("a", _E.SCHEDULE, at=T0 + 5)])
        assert answer.verdict is ChangeOutcome.REPEATED
        assert answer.job == before == await one(store, "a")
        assert len(await store.history("a")) == 2

    @pytest.mark.seed("001", "5.4")
    @run_async
    async def test_a_final_state_is_never_overwritten(self, store: Ledger) -> None:
        await store.apply([accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        await store.apply([move("a", _E.SUCCEED, attempt=1, result=succeeded("a"))])
        before = await one(store, "a")
        late = JobResult(job_id="a", status=_S.FAILED)
        answers = await store.apply(
            [
                move("a", _E.FAIL, attempt=1, result=late),
                move("a", _E.CANCEL),
                move("a", _E.EXPIRE),
                move("a", _E.SUCCEED, attempt=1, result=succeeded("a", worker_id="w2")),
            ]
        )
        assert verdicts(answers) == "XXXR"
        assert await one(store, "a") == before

    @run_async
    async def test_a_note_on_an_ended_job_is_logged_and_changes_nothing_else(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("a"), move("a", _E.CANCEL)])
        before = await one(store, "a")
        await store.apply([move("a", _E.NOTE, at=T0 + 3, reason="a late result")])
        after = await one(store, "a")
        assert (after.state, after.finished_at) == (before.state, before.finished_at)
        assert after.version == before.version + 1
        assert (await store.history("a"))[-1].reason == "a late result"

    @run_async
    async def test_the_events_of_a_move_happen_all_or_none(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        (answer,) = await store.apply([move("a", _E.SCHEDULE, _E.START)])
        assert answer.verdict is ChangeOutcome.REFUSED
        assert (await one(store, "a")).state is _S.PENDING
        assert len(await store.history("a")) == 1

    @run_async
    async def test_a_result_that_overtakes_the_start_implies_it(self, store: Ledger) -> None:
        await store.apply([accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        await store.apply([move("a", _E.SUCCEED, attempt=1, result=succeeded("a"))])
        events = [entry.event for entry in await store.history("a")]
        assert events[-2:] == [_E.START, _E.SUCCEED]

    @run_async
    async def test_a_move_for_another_version_is_refused(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        answers = await store.apply(
            [
                move("a", _E.SCHEDULE, version=2),
                move("a", _E.SCHEDULE, version=1),
                move("a", _E.CANCEL, version=1),
            ]
        )
        assert verdicts(answers) == "XMX"
        assert (await one(store, "a")).state is _S.SCHEDULED

    @pytest.mark.seed("001", "6.12")
    @run_async
    async def test_a_move_for_another_attempt_is_refused(self, store: Ledger) -> None:
        await store.apply([accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        await store.apply([move("a", _E.REDISPATCH, worker_id="w2")])
        stale, live = await store.apply(
            [
                move("a", _E.SUCCEED, attempt=1, result=succeeded("a", worker_id="w1")),
                move("a", _E.SUCCEED, attempt=2, result=succeeded("a", worker_id="w2")),
            ]
        )
        assert (stale.verdict, live.verdict) == (ChangeOutcome.REFUSED, ChangeOutcome.MOVED)
        assert "attempt 1" in stale.why
        job = await one(store, "a")
        assert job.result is not None
        assert job.result.worker_id == job.worker_id == "w2"

    @run_async
    async def test_time_never_goes_back_within_a_log(self, store: Ledger) -> None:
        await store.apply([accept("a", at=T0)])
        await store.apply([move("a", _E.SCHEDULE, at=T0 - 100)])
        assert [entry.at for entry in await store.history("a")] == [T0, T0]

    @run_async
    async def test_an_empty_batch_is_answered_with_nothing(self, store: Ledger) -> None:
        assert await store.apply([]) == []

    # -- followers ----------------------------------------------------------------

    @run_async
    async def test_a_follower_is_accepted_with_the_move_that_it_follows(
        self, store: Ledger
    ) -> None:
        heard: list[list[str]] = []
        await store.apply([accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        store.listen(lambda strides: heard.append(ids(strides)))
        again = accept("b", parent_job_id="a", retry_number=1)
        (answer,) = await store.apply([move("a", _E.FAIL, attempt=1, then=(again,))])
        assert answer.job is not None
        assert answer.job.successor == "b"
        assert (await one(store, "a")).successor == "b"
        assert (await one(store, "b")).state is _S.PENDING
        assert heard == [["a", "b"]]

    @pytest.mark.parametrize("unless_cancelled", [False, True])
    @run_async
    async def test_a_follower_may_give_way_to_a_cancel(
        self, store: Ledger, unless_cancelled: bool
    ) -> None:
        await store.apply([accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        again = replace(accept("b", parent_job_id="a"), unless_cancelled=unless_cancelled)
        _, answer = await store.apply(
            [move("a", _E.REQUEST_CANCEL), move("a", _E.FAIL, attempt=1, then=(again,))]
        )
        assert answer.moved
        assert (await store.get("b") is None) is unless_cancelled
        assert (await one(store, "a")).successor == (None if unless_cancelled else "b")

    @pytest.mark.parametrize("attempt", [2, None], ids=["refused", "repeated"])
    @run_async
    async def test_no_move_no_follower(self, store: Ledger, attempt: int | None) -> None:
        await store.apply([accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        await store.apply([move("a", _E.EXPIRE, attempt=1)])
        late = move("a", _E.EXPIRE, attempt=attempt, then=(accept("b"),))
        (answer,) = await store.apply([late])
        assert not answer.moved
        assert await store.get("b") is None
        assert (await one(store, "a")).successor is None

    # -- telling ------------------------------------------------------------------

    @run_async
    async def test_listeners_hear_what_moved_and_nothing_else(self, store: Ledger) -> None:
        heard: list[Stride] = []
        store.listen(heard.extend)
        answers = await store.apply(
            [accept("a"), accept("a"), move("a", _E.START), move("a", _E.SCHEDULE)]
        )
        assert heard == [answers[0].stride, answers[3].stride]
        assert [stride.jobs for stride in heard] == [[answers[0].job], [answers[3].job]]
        await store.apply([move("a", _E.SCHEDULE), move("nobody", _E.CANCEL)])
        await store.apply([])
        assert len(heard) == 2

    @run_async
    async def test_listeners_hear_before_the_caller_does_and_in_commit_order(
        self, store: Ledger
    ) -> None:
        told: list[str] = []

        def listener(strides: Sequence[Stride]) -> None:
            told.extend(f"heard {job_id}" for job_id in ids(strides))

        async def submit(job_id: str) -> None:
            await store.apply([accept(job_id)])
            told.append(f"answered {job_id}")

        store.listen(listener)
        await asyncio.gather(*(submit(f"j{i}") for i in range(20)))
        heard = [line.removeprefix("heard ") for line in told if line.startswith("heard")]
        by_seq = sorted(await found(store), key=lambda job: job.seq)
        assert heard == [job.job_id for job in by_seq]
        for job_id in heard:
            assert told.index(f"heard {job_id}") < told.index(f"answered {job_id}")

    @run_async
    async def test_a_listener_finds_the_change_in_the_store(self, store: Ledger) -> None:
        asked: list[asyncio.Task[Job | None]] = []

        def listener(strides: Sequence[Stride]) -> None:
            asked.extend(asyncio.ensure_future(store.get(job_id)) for job_id in ids(strides))

        store.listen(listener)
        await store.apply([accept("a")])
        await store.apply([move("a", _E.CANCEL)])
        seen = await asyncio.gather(*asked)
        assert [job.state for job in seen if job][-1] is _S.CANCELLED
        assert None not in seen

    @run_async
    async def test_a_listener_that_raises_keeps_nobody_waiting(self, store: Ledger) -> None:
        heard: list[Stride] = []
        errors: list[Exception] = []

        def broken(strides: Sequence[Stride]) -> None:
            raise ZeroDivisionError

        store.listen(broken)
        store.listen(heard.extend)
        store.listeners.on_failure = errors.append
        async with asyncio.timeout(10):
            answers = await store.apply([accept("a")])
            await store.close()
        assert heard == [answer.stride for answer in answers]
        assert [type(error) for error in errors] == [ZeroDivisionError]

    @run_async
    async def test_a_listener_to_topics_hears_of_their_jobs_beginnings_and_ends(
        self, store: Ledger
    ) -> None:
        heard: list[Stride] = []
        stop = store.listen(heard.extend, ("job.b.", "job.c."))
        await store.apply([accept("a", topic="job.a"), accept("b", topic="job.b.x")])
        await store.apply([move("a", _E.CANCEL), move("b", _E.SCHEDULE)])
        await store.apply([move("b", _E.CANCEL)])
        assert [stride.path.after for stride in heard] == [_S.PENDING, _S.CANCELLED]
        assert all("b" in ids([stride]) for stride in heard)
        stop()
        await store.apply([accept("c", topic="job.c.x")])
        assert len(heard) == 2

    @run_async
    async def test_a_listener_can_stop(self, store: Ledger) -> None:
        heard: list[Stride] = []
        stop = store.listen(heard.extend)
        await store.apply([accept("a")])
        stop()
        await store.apply([accept("b")])
        assert len(heard) == 1

    # -- many callers -------------------------------------------------------------

    @run_async
    async def test_concurrent_callers_each_get_their_own_answers(self, store: Ledger) -> None:
        batches = [[accept(f"j{i}-{k}") for k in range(i % 4)] for i in range(50)]
        answers = await asyncio.gather(*map(store.apply, batches))
        for batch, answered in zip(batches, answers, strict=True):
            assert [a.job.job_id for a in answered if a.job] == [b.request.job_id for b in batch]
        seqs = [answer.job.seq for answered in answers for answer in answered if answer.job]
        assert sorted(seqs) == sorted(set(seqs))

    @run_async
    async def test_of_concurrent_moves_from_one_version_one_wins(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        moves = [
            move("a", _E.CANCEL if i % 2 else _E.SCHEDULE, version=1, reason=str(i))
            for i in range(20)
        ]
        answers = await asyncio.gather(*(store.apply([each]) for each in moves))
        assert sum(answer.moved for (answer,) in answers) == 1
        assert len(await store.history("a")) == 2

    @run_async
    async def test_of_concurrent_submissions_with_one_id_one_wins(self, store: Ledger) -> None:
        answers = await asyncio.gather(*(store.apply([accept("a")]) for _ in range(20)))
        assert sum(answer.moved for (answer,) in answers) == 1

    @run_async
    async def test_a_caller_that_gives_up_harms_nobody(self, store: Ledger) -> None:
        impatient = asyncio.ensure_future(store.apply([accept("a")]))
        patient = asyncio.ensure_future(store.apply([accept("b")]))
        await asyncio.sleep(0)
        impatient.cancel()
        assert verdicts(await patient) == "M"
        assert verdicts(await store.apply([accept("c")])) == "M"

    # -- reading ------------------------------------------------------------------

    @run_async
    async def test_an_unknown_job_is_none(self, store: Ledger) -> None:
        assert await store.get("nobody") is None

    @run_async
    async def test_fetch_keeps_the_order_asked_for_and_skips_what_is_not_there(
        self, store: Ledger
    ) -> None:
        await store.apply([accept(name) for name in "abc"])
        await store.apply([move("b", _E.CANCEL)])
        seq = {job.job_id: job.seq for job in await found(store)}
        jobs = await store.fetch([seq["c"], 999, seq["a"], seq["b"]])
        assert [job.job_id for job in jobs] == ["c", "a", "b"]
        assert await store.fetch([]) == []

    @run_async
    async def test_find_answers_the_newest_first(self, store: Ledger) -> None:
        await store.apply([accept(name) for name in "abcd"])
        assert await names(store, limit=3) == "dcb"

    @run_async
    async def test_pages_are_stable_while_jobs_are_added_and_changed(self, store: Ledger) -> None:
        await store.apply([accept(f"j{i:02}") for i in range(10)])
        seen: list[str] = []
        before: int | None = None
        while page := await store.find(JobQuery(limit=3, before=before)):
            seen.extend(job.job_id for job in page)
            before = page[-1].seq
            await store.apply([accept(f"new{before}"), move(page[-1].job_id, _E.CANCEL)])
        assert seen == [f"j{i:02}" for i in reversed(range(10))]

    @run_async
    async def test_find_filters_by_every_condition_at_once(self, store: Ledger) -> None:
        await store.apply(
            [
                accept("a", topic="job.text.shout", tenant="t1", labels={"x": "1", "y": "2"}),
                accept("b", topic="job.text.shout.loud", tenant="t2", labels={"x": "1"}),
                accept("c", topic="job.image", tenant="t1", parent_job_id="a", idempotency_key="k"),
                move("b", _E.CANCEL),
            ]
        )
        assert await names(store, topic="job.text.*") == "ba"
        assert await names(store, topic="job.image") == "c"
        assert await names(store, topic="job.?mage") == "c"
        assert await names(store, topic="job.[a-i]*") == "c"
        assert await names(store, topic="job.[!a-i]*") == "ba"
        assert await names(store, topic="JOB.*") == ""
        assert await names(store, tenant="t1") == "ca"
        assert await names(store, parent_job_id="a") == "c"
        assert await names(store, labels={"x": "1"}) == "ba"
        assert await names(store, idempotency_key="k") == "c"
        assert await names(store, idempotency_key="k", tenant="t2") == ""
        assert await names(store, labels={"x": "1", "y": "2"}) == "a"
        assert await names(store, states=(_S.CANCELLED,)) == "b"
        assert await names(store, states=(_S.CANCELLED, _S.PENDING)) == "cba"
        assert await names(store, tenant="t1", topic="job.text.*", states=(_S.PENDING,)) == "a"
        assert await names(store, tenant="t2", states=(_S.PENDING,)) == ""

    @run_async
    async def test_the_newest_try_of_a_job_stands_for_all_of_them(self, store: Ledger) -> None:
        common: dict[str, Any] = {"tenant": "t1", "topic": "job.x", "child_of": "p"}
        await store.apply([accept("a", idempotency_key="k", **common), accept("c", **common)])
        for job_id, then in (("a", "b"), ("b", "d")):
            again = accept(then, parent_job_id=job_id, first_try="a", **common)
            await store.apply([move(job_id, _E.SCHEDULE, _E.DISPATCH)])
            await store.apply([move(job_id, _E.FAIL, attempt=1, then=(again,))])
        for conditions in ({}, {"tenant": "t1"}, {"topic": "job.*"}, {"child_of": "p"}):
            assert await names(store, **conditions) == "dc", conditions
            assert await names(store, tries=True, **conditions) == "dbca", conditions
        assert await names(store, states=(_S.FAILED,)) == ""
        assert await names(store, states=(_S.FAILED, _S.PENDING), tenant="t1") == "dc"
        assert await names(store, states=(_S.FAILED,), tries=True) == "ba"
        assert await names(store, dead=True, tries=True) == ""
        assert await names(store, first_try="a") == "dba"
        assert await names(store, first_try="a", oldest_first=True) == "abd"
        assert await names(store, parent_job_id="a") == "b"
        assert await names(store, idempotency_key="k") == "a"
        assert await names(store, job_id="[ab]") == "ba"
        assert await names(store, limit=1) == "d"

    @run_async
    async def test_children_are_counted_by_the_state_of_their_newest_try(
        self, store: Ledger
    ) -> None:
        common: dict[str, Any] = {"tenant": "t1", "child_of": "p"}
        await store.apply([accept(name, **common) for name in "abcde"])
        await store.apply([accept("x", child_of="p"), accept("y", tenant="t1", child_of="q")])
        await store.apply([move(name, _E.SCHEDULE, _E.DISPATCH) for name in "abc"])
        await store.apply([move("b", _E.START, attempt=1), move("e", _E.CANCEL)])
        again = accept("a2", first_try="a", parent_job_id="a", **common)
        await store.apply([move("a", _E.FAIL, attempt=1, then=(again,))])
        mine = {_S.PENDING: 2, _S.DISPATCHED: 1, _S.RUNNING: 1, _S.CANCELLED: 1}
        assert await store.count_children("p", "t1") == mine
        assert await store.count_children("p") == {**mine, _S.PENDING: 3}
        assert await store.count_children("nobody") == {}

    @run_async
    async def test_a_label_filter_fills_its_page(self, store: Ledger) -> None:
        await store.apply([accept(f"{i:02}", labels={"odd": str(i % 2)}) for i in range(40)])
        jobs = await store.find(JobQuery(labels={"odd": "1"}, limit=5))
        assert [job.job_id for job in jobs] == ["39", "37", "35", "33", "31"]

    @run_async
    async def test_find_by_text_in_error_codes_and_messages(self, store: Ledger) -> None:
        await store.apply([accept(name, tenant=f"t{name in 'ab'}") for name in "abcdef"])
        await store.apply([move(name, _E.SCHEDULE, _E.DISPATCH) for name in "abcd"])
        said = {"a": "The disk is FULL", "b": "no disk", "c": "Straße gesperrt"}
        for name, message in said.items():
            end = failed(name, error_code="OSError", error_message=message)
            await store.apply([move(name, _E.FAIL, attempt=1, result=end)])
        kept = succeeded("d", error_message="disk of the result")
        await store.apply([move("d", _E.SUCCEED, attempt=1, result=kept), move("e", _E.CANCEL)])
        assert await names(store, error="DISK") == "ba"
        assert await names(store, error="disk is full") == "a"
        assert await names(store, error="oserr") == "cba"
        assert await names(store, error="Straße") == "c"
        assert await names(store, error="ASSE") == ""
        assert await names(store, error="disk", tenant="tTrue", limit=1) == "b"
        assert await names(store, error="disk", states=(_S.SUCCEEDED,)) == ""
        assert await names(store, error="disk", states=(_S.FAILED, _S.PENDING)) == "ba"
        assert await names(store, error="disk", dead=True, oldest_first=True) == "ab"
        assert await names(store, error="100%_\\") == ""

    @run_async
    async def test_a_workflow_comes_in_the_order_of_its_steps(self, store: Ledger) -> None:
        flow: dict[str, Any] = {"workflow_id": "flow"}
        await store.apply(
            [
                accept("c", step_index=10, **flow),
                accept("a", step_index=0, **flow),
                accept("b", step_index=2, **flow),
                accept("x", workflow_id="other", step_index=1),
                accept("B", step_index=2, **flow),
            ]
        )
        assert await names(store, workflow_id="flow") == "abBc"
        last = (await store.find(JobQuery(workflow_id="flow", limit=100)))[-1].seq
        newest = await store.find(JobQuery(workflow_id="flow", before=1 << 40))
        assert [job.seq for job in newest] == sorted((job.seq for job in newest), reverse=True)
        assert last in [job.seq for job in newest]
        oldest = await store.find(JobQuery(workflow_id="flow", since=0, oldest_first=True))
        assert [job.seq for job in oldest] == sorted(job.seq for job in newest)

    @run_async
    async def test_unfinished_are_all_that_are_not_final_in_order(self, store: Ledger) -> None:
        await store.apply([accept(name) for name in "dcba"])
        await store.apply([move("c", _E.CANCEL), move("a", _E.SCHEDULE, _E.DISPATCH)])
        jobs = await store.unfinished()
        assert [job.job_id for job in jobs] == ["d", "b", "a"]
        assert jobs[-1] == await one(store, "a")

    @run_async
    async def test_the_history_of_an_unknown_job_is_not_found(self, store: Ledger) -> None:
        with pytest.raises(NotFound):
            await store.history("nobody")

    @run_async
    async def test_the_tally_counts_jobs_by_state(self, store: Ledger) -> None:
        assert await store.tally() == {}
        await store.apply([accept(name) for name in "abc"])
        await store.apply([move("a", _E.CANCEL)])
        assert await store.tally() == {_S.PENDING: 2, _S.CANCELLED: 1}

    # -- what jobs write ----------------------------------------------------------

    @run_async
    async def test_lines_are_numbered_in_order_for_each_job(self, store: Ledger) -> None:
        await store.apply([accept("a"), accept("b")])
        store.write_log([line("a", "one"), line("b", "other")])
        store.write_log([line("a", "two")])
        await store.apply([])
        store.write_log([line("a", "three")])
        await store.apply([])
        lines = await store.read_log("a")
        assert [(kept.n, kept.text) for kept in lines] == [(1, "one"), (2, "two"), (3, "three")]
        (other,) = await store.read_log("b")
        assert other == LogLine("b", 1, T0, "info", "other", 1)

    @run_async
    async def test_a_reader_resumes_where_it_stopped(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        store.write_log([line("a", str(i)) for i in range(10)])
        await store.apply([])
        first = await store.read_log("a", limit=4)
        rest = await store.read_log("a", after=first[-1].n)
        assert [kept.text for kept in (*first, *rest)] == [str(i) for i in range(10)]
        assert await store.read_log("a", after=10) == []

    @run_async
    async def test_lines_of_an_ended_job_are_kept_and_go_on(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        store.write_log([line("a", "one")])
        await store.apply([move("a", _E.CANCEL)])
        store.write_log([line("a", "two")])
        await store.apply([])
        assert [kept.n for kept in await store.read_log("a")] == [1, 2]

    @run_async
    async def test_lines_of_an_unknown_job_are_dropped(self, store: Ledger) -> None:
        store.write_log([line("nobody", "?")])
        await store.apply([accept("a")])
        assert await store.read_log("nobody") == []
        await store.apply([accept("nobody")])
        assert await store.read_log("nobody") == []

    # -- checkpoints --------------------------------------------------------------

    async def _held(self, store: Ledger, *job_ids: str) -> None:
        await store.apply([accept(job_id) for job_id in job_ids])
        await store.apply([move(job_id, _E.SCHEDULE, _E.DISPATCH) for job_id in job_ids])

    @run_async
    async def test_checkpointed_rows_are_kept_in_order_and_replaced(self, store: Ledger) -> None:
        await self._held(store, "a", "b")
        full = Step("page", 2, "k", "ok", "in", "out", "bad", T0, info='{"tries": 2}')
        rows = (full, Step("page", 10), Step("cursor", 0, output="1"), Step("päge", 0))
        answers = await store.apply([Checkpoint("a", 1, rows), Checkpoint("b", 1, rows[:1])])
        assert [answer.moved for answer in answers] == [True, True]
        await store.apply([Checkpoint("a", 1, (Step("cursor", 0, output="2"),))])
        kept = (await store.read_steps("a")).steps
        assert [(row.name, row.n) for row in kept] == [
            ("cursor", 0),
            ("page", 2),
            ("page", 10),
            ("päge", 0),
        ]
        assert kept[1] == replace(full, attempt=1)
        assert kept[0].output == "2"
        assert len((await store.read_steps("b")).steps) == 1
        assert await store.read_steps("nobody") == StepPage([], more=False)

    @run_async
    async def test_checkpointed_rows_are_read_in_pages(self, store: Ledger) -> None:
        await self._held(store, "a")
        rows = tuple(Step(name, n) for name in ("one", "two") for n in range(5))
        await store.apply([Checkpoint("a", 1, rows)])

        async def places(**query: Any) -> list[tuple[str, int]]:
            page = await store.read_steps("a", StepQuery(**query))
            places = [(row.name, row.n) for row in page.steps]
            assert page.more is (places[-1:] not in ([], [("two", 4)]))
            assert page.last == (places[-1] if page.more else None)
            return places

        assert await places(limit=3) == [("one", 0), ("one", 1), ("one", 2)]
        assert await places(limit=3, after=("one", 3)) == [("one", 4), ("two", 0), ("two", 1)]
        assert await places(name="two", limit=2) == [("two", 0), ("two", 1)]
        assert await places(name="two", after=("two", 2)) == [("two", 3), ("two", 4)]
        assert await places(after=("two", 4)) == []

    @run_async
    async def test_checkpointed_rows_are_found_by_outcome(self, store: Ledger) -> None:
        await self._held(store, "a")
        outcomes = ("ok", "failed", "", 'it\'s "odd"')
        rows = tuple(
            Step(name, n, outcome=outcomes[n % 4]) for name in ("one", "two") for n in range(8)
        )
        await store.apply([Checkpoint("a", 1, rows)])

        async def places(*asked: str, **query: Any) -> tuple[list[tuple[str, int]], bool]:
            page = await store.read_steps("a", StepQuery(outcomes=asked, **query))
            return [(row.name, row.n) for row in page.steps], page.more

        assert await places("failed", name="two") == ([("two", 1), ("two", 5)], False)
        assert await places("ok", "failed", name="one", limit=3) == (
            [("one", 0), ("one", 1), ("one", 4)],
            True,
        )
        assert await places("ok", limit=2, after=("one", 0)) == ([("one", 4), ("two", 0)], True)
        assert await places('it\'s "odd"', name="one") == ([("one", 3), ("one", 7)], False)
        assert await places("", name="one") == ([("one", 2), ("one", 6)], False)
        assert await places("nothing like it") == ([], False)
        assert len((await places())[0]) == 16

    @run_async
    async def test_notes_of_a_checkpoint_are_entries_of_the_history(self, store: Ledger) -> None:
        await self._held(store, "a", "b")
        notes = ("half way", "d\u00e9j\u00e0 vu")
        checkpoint = Checkpoint("a", 1, (Step("page", 1),), notes, "worker:w1", T0 + 5)
        await store.apply([checkpoint, Checkpoint("b", 1, ())])
        entries = await store.history("a")
        assert [(one.event, one.reason) for one in entries[-3:]] == [
            (_E.START, ""),
            (_E.NOTE, "half way"),
            (_E.NOTE, "d\u00e9j\u00e0 vu"),
        ]
        assert {(one.actor, one.at) for one in entries[-3:]} == {("worker:w1", T0 + 5)}
        assert [one.n for one in entries] == list(range(1, len(entries) + 1))
        for job_id in ("a", "b"):
            job = await store.get(job_id)
            assert job is not None
            assert job.state is _S.RUNNING

    @run_async
    async def test_a_page_of_long_rows_has_fewer(self, store: Ledger) -> None:
        await self._held(store, "a")
        rows = tuple(Step("page", n, output="x" * 60_000) for n in range(20))
        await store.apply([Checkpoint("a", 1, rows)])
        page = await store.read_steps("a")
        assert (len(page.steps), page.more) == (17, True)
        rest = await store.read_steps("a", StepQuery(after=page.last))
        assert ([row.n for row in rest.steps], rest.more) == ([17, 18, 19], False)

    @run_async
    async def test_checkpointed_rows_are_counted_by_name_and_outcome(self, store: Ledger) -> None:
        await self._held(store, "a")
        rows = (Step("b", 1, outcome="ok"), Step("b", 2, outcome="bad"), Step("a", 1))
        await store.apply(
            [Checkpoint("a", 1, (*rows, Step("b", 3, outcome="ok", output="x" * 90)))]
        )
        counts = await store.count_steps("a")
        assert [(count.name, count.outcome, count.rows) for count in counts] == [
            ("a", "", 1),
            ("b", "bad", 1),
            ("b", "ok", 2),
        ]
        assert counts[2].size > counts[1].size + 90
        assert await store.count_steps("nobody") == []

    @run_async
    async def test_only_the_live_attempt_checkpoints(self, store: Ledger) -> None:
        await self._held(store, "a", "b")
        await store.apply([accept("waits"), move("a", _E.REDISPATCH), move("b", _E.SUCCEED)])
        rows = (Step("page", 1),)
        stale = [Checkpoint("a", 1, rows), Checkpoint("b", 1, rows), Checkpoint("waits", 0, rows)]
        answers = await store.apply([*stale, Checkpoint("nobody", 1, rows)])
        assert {answer.verdict for answer in answers} == {ChangeOutcome.REFUSED}
        for job_id in ("a", "b", "waits"):
            assert (await store.read_steps(job_id)).steps == []
        await store.apply([Checkpoint("a", 2, rows)])
        assert [row.attempt for row in (await store.read_steps("a")).steps] == [2]

    @run_async
    async def test_checkpointed_rows_are_pruned_with_their_job(self, store: Ledger) -> None:
        await self._held(store, "a")
        pointer = "blob:sha256:" + "0" * 64
        await store.apply([Checkpoint("a", 1, (Step("page", 1, output=pointer),))])
        await store.apply([move("a", _E.SUCCEED, result=succeeded("a"))])
        assert len((await store.read_steps("a")).steps) == 1
        assert pointer in await store.pointers()
        assert (await store.prune(T0 + 1000, limit=10)).jobs == 1
        assert pointer not in await store.pointers()
        await store.apply([accept("a")])
        assert (await store.read_steps("a")).steps == []

    # -- upkeep -------------------------------------------------------------------

    @run_async
    async def test_an_honest_store_verifies(self, store: Ledger) -> None:
        await self._some_lives(store)
        verified = await store.verify()
        assert verified.mismatches == ()
        assert verified.jobs == 4
        counted = [len(await store.history(job.job_id)) for job in await found(store)]
        assert verified.transitions == sum(counted)

    @run_async
    async def test_each_record_is_the_fold_of_its_log(self, store: Ledger) -> None:
        await self._some_lives(store)
        for job in await found(store):
            assert fold(await store.history(job.job_id)) == Folded.of(job)

    async def _later(self, store: Ledger) -> list[Answer]:
        await asyncio.sleep(0.01)
        assert await store.fetch([1 << 40]) == []
        return await store.apply([accept("later")])

    async def _some_lives(self, store: Ledger) -> None:
        await store.apply([accept(name, at=T0) for name in "abcd"])
        await store.apply([move(n, _E.SCHEDULE, _E.DISPATCH, at=T0 + 1) for n in "abc"])
        await store.apply(
            [
                move("a", _E.START, at=T0 + 2),
                move("b", _E.REDISPATCH, at=T0 + 2, worker_id="w2"),
                move("a", _E.REQUEST_CANCEL, at=T0 + 2),
                move("c", _E.EXPIRE, at=T0 + 2),
            ]
        )
        await store.apply(
            [
                move("a", _E.REDISPATCH, at=T0 + 3, worker_id="w3"),
                move("b", _E.SUCCEED, at=T0 + 3, result=succeeded("b")),
                move("b", _E.NOTE, at=T0 + 4),
            ]
        )

    @run_async
    async def test_pruning_forgets_what_ended_before_a_time_and_nothing_else(
        self, store: Ledger
    ) -> None:
        for i, name in enumerate("abc"):
            await store.apply([accept(name, at=T0 + i)])
        await store.apply([accept("open", at=T0), accept("late", at=T0)])
        await store.apply([move(name, _E.CANCEL, at=T0 + i) for i, name in enumerate("abc")])
        await store.apply([move("late", _E.CANCEL, at=T0 + 50)])
        store.write_log([line("a", "x"), line("a", "y"), line("late", "z")])
        await store.apply([])

        pruned = await store.prune(T0 + 10, limit=2)
        assert (pruned.jobs, pruned.transitions, pruned.log_lines) == (2, 4, 2)
        assert await names(store) == "lateopenc"
        assert (await store.prune(T0 + 10, limit=2)).jobs == 1
        assert (await store.prune(T0 + 10, limit=2)).jobs == 0
        assert await store.get("a") is None
        with pytest.raises(NotFound):
            await store.history("a")
        assert await store.read_log("a") == []
        assert len(await store.read_log("late")) == 1
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_pruning_spares_what_is_awaited_and_its_retries(self, store: Ledger) -> None:
        await store.apply([accept("a"), accept("x"), accept("child", parent_job_id="a")])
        for name, retry in ("ab", "bc", "xy"):
            await store.apply([move(name, _E.SCHEDULE, _E.DISPATCH)])
            then = (accept(retry, parent_job_id=name),)
            await store.apply([move(name, _E.FAIL, then=then)])
        await store.apply([move(name, _E.CANCEL) for name in ("c", "y", "child")])
        awaited = {"a"}
        assert (await store.prune(T0 + 1, 10, awaited)).jobs == 3
        assert sorted(await names(store, tries=True)) == list("abc")
        awaited.clear()
        assert (await store.prune(T0 + 1, 10, awaited)).jobs == 3

    @run_async
    async def test_what_was_pruned_frees_its_id_and_key(self, store: Ledger) -> None:
        await store.apply([accept("a", idempotency_key="k"), move("a", _E.CANCEL)])
        await store.prune(T0 + 1, limit=10)
        assert verdicts(await store.apply([accept("a", idempotency_key="k")])) == "M"
        assert (await one(store, "a")).state is _S.PENDING

    @run_async
    async def test_pointers_are_those_that_name_a_stored_blob(self, store: Ledger) -> None:
        await store.apply(
            [
                accept("a", context_ptr="blob:sha256-a"),
                accept("b", context_ptr="data:,x"),
                accept("c"),
                accept("d", context_ptr="blob:sha256-a"),
                move("b", _E.SCHEDULE, _E.DISPATCH),
                move("c", _E.SCHEDULE, _E.DISPATCH),
            ]
        )
        await store.apply(
            [
                move("b", _E.SUCCEED, result=succeeded("b", result_ptr="blob:sha256-b")),
                move("c", _E.SUCCEED, result=succeeded("c", result_ptr="data:,y")),
            ]
        )
        assert sorted(await store.pointers()) == ["blob:sha256-a", "blob:sha256-b"]

    @pytest.mark.parametrize("how", ["alone", "in bulk", "failed"])
    @run_async
    async def test_artifacts_are_kept_with_the_result_and_referred_to_until_it_is_pruned(
        self, store: Ledger, how: str
    ) -> None:
        await store.apply([accept("a", tenant="acme"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        left = (an_artifact("one", "1"), an_artifact("two/" + "x" * 500, "2"))
        if how == "in bulk":
            events, result = (_E.SUCCEED,), succeeded("a", artifacts=left)
            bulk = BulkMove(
                job_ids=["a"], events=events, actor="worker:w1", at=T0, results=[result]
            )
            await store.commit([], [bulk])
        elif how == "alone":
            await store.apply([move("a", _E.SUCCEED, result=succeeded("a", artifacts=left))])
        else:
            await store.apply([move("a", _E.FAIL, result=failed("a", artifacts=left))])
        job = await one(store, "a")
        assert job.result is not None
        assert job.result.artifacts == left
        pointers = {artifact.pointer for artifact in left}
        assert await store.pointers() == pointers
        for pointer in pointers:
            assert await store.refers("acme", pointer)
            assert await store.refers("acme", pointer.partition(";")[0])
            assert not await store.refers("beta", pointer)
        assert (await store.prune(T0 + 1, 10)).jobs == 1
        while (await store.prune(T0 + 1, 10)).steps:
            pass
        assert await store.pointers() == set()

    @run_async
    async def test_facts_are_remembered_and_replaced(self, store: Ledger) -> None:
        assert await store.recall("x") is None
        await store.remember("x", b"one")
        await store.remember("x", b"two\x00")
        await store.remember("y", b"")
        assert await store.recall("x") == b"two\x00"
        assert await store.recall("y") == b""

    # -- trouble ------------------------------------------------------------------

    @run_async
    async def test_a_closed_store_takes_nothing(self, tmp_path: Path) -> None:
        store = Ledger(self.backend(tmp_path))
        await store.apply([accept("a")])
        await store.close()
        await store.close()
        with pytest.raises(Unavailable):
            await store.apply([accept("b")])

    @run_async
    async def test_closing_waits_for_what_is_under_way(self, tmp_path: Path) -> None:
        store = Ledger(self.backend(tmp_path))
        under_way = asyncio.ensure_future(store.apply([accept("a")]))
        await asyncio.sleep(0)
        await store.close()
        (end,) = await asyncio.gather(under_way, return_exceptions=True)
        if isinstance(end, BaseException):
            assert isinstance(end, Unavailable)
        else:
            assert verdicts(end) == "M"


class FallibleContract(BackendContract):
    """The same, for a backend that can be made to fail."""

    @abstractmethod
    def failing(self, store: Ledger) -> AbstractContextManager[None]:
        """Within this context, commits that add something fail."""

    @run_async
    async def test_a_failed_commit_leaves_nothing_and_the_store_goes_on(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("a")])
        before = await one(store, "a")
        heard: list[Stride] = []
        store.listen(heard.extend)
        with self.failing(store):
            doomed: list[list[Change]] = [
                [move("a", _E.SCHEDULE)],
                [accept("b" + "x" * 90_000)],
                [accept("c")],
            ]
            ends = await asyncio.gather(*map(store.apply, doomed), return_exceptions=True)
            assert all(isinstance(end, StoreFailed) for end in ends)
            assert heard == []
            assert await one(store, "a") == before
            assert await store.get("c") is None
            assert await names(store) == "a"
        answers = await store.apply([move("a", _E.SCHEDULE, version=1), accept("c")])
        assert verdicts(answers) == "MM"
        assert sorted(ids(heard)) == ["a", "c"]
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_a_very_large_batch_that_fails_leaves_nothing(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        large = [accept(f"large{n}") for n in range(6000)]
        with self.failing(store), pytest.raises(StoreFailed):
            await store.apply(large)
        assert await names(store) == "a"
        assert set(verdicts(await store.apply(large))) == {"M"}
        assert await store.tally() == {_S.PENDING: 6001}
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_lines_that_met_a_failing_commit_are_kept(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        with self.failing(store):
            store.write_log([line("a", "x" * 90_000)])
            with pytest.raises(StoreFailed):
                await store.apply([accept("b" + "x" * 90_000)])
        store.write_log([line("a", "last")])
        await store.apply([])
        kept = await store.read_log("a")
        assert [(each.n, each.text[:4]) for each in kept] == [(1, "xxxx"), (2, "last")]

    @run_async
    async def test_audit_entries_that_met_a_failing_commit_are_kept(self, store: Ledger) -> None:
        await store.open()
        with self.failing(store):
            store.write_audit([AuditEntry(T0, "alice", "first", detail="x" * 90_000)])
            with pytest.raises(StoreFailed):
                await store.apply([accept("b" + "x" * 90_000)])
        store.write_audit([AuditEntry(T0, "alice", "second")])
        await store.apply([])
        entries = await store.read_audit(AuditQuery())
        assert [(entry.n, entry.action) for entry in entries] == [(2, "second"), (1, "first")]

    @run_async
    async def test_a_failed_commit_counts_nothing_and_gives_no_cursor(self, store: Ledger) -> None:
        await store.apply([accept("a")])
        at = await store.last_event()
        with self.failing(store), pytest.raises(StoreFailed):
            await store.apply([accept("b" + "x" * 90_000), move("a", _E.CANCEL)])
        assert await store.tally() == {_S.PENDING: 1}
        assert (await store.events(at), await store.last_event()) == ([], at)
        await store.apply([move("a", _E.CANCEL)])
        assert [event.transition.event for event in await store.events(at)] == [_E.CANCEL]
        assert await store.tally() == {_S.CANCELLED: 1}
