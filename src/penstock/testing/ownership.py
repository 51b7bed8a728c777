"""What a ledger must do over every backend when many jobs move at once, rows lag behind the
journal, and another engine takes over."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from pathlib import Path

import pytest

from penstock.control.ledger import Ledger
from penstock.core.errors import StoreFailed, Unstorable
from penstock.core.ledger import BulkMove, ChangeOutcome, Checkpoint, Step
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.store import Backend, JobQuery
from penstock.testing.aio import run_async
from penstock.testing.samples import T0, accept, found, line, move, names, one, succeeded, verdicts

_S, _E = JobState, JobEvent


def dispatched(names: list[str], **fields: object) -> BulkMove:
    return BulkMove(
        job_ids=names,
        events=(_E.SCHEDULE, _E.DISPATCH),
        actor="scheduler",
        at=T0 + 1,
        worker_id="w1",
        pool="default",
        **fields,  # type: ignore[arg-type]
    )


async def held(store: Ledger) -> None:
    """Jobs with a worker, in every way in which a row can lag behind the journal."""
    await store.apply([accept(name) for name in "abcdefgh"])
    await store.commit([], [dispatched(list("abcdefg"))])
    await store.apply([move(name, _E.START, at=T0 + 2) for name in "bcd"])
    await store.apply([move("c", _E.REDISPATCH, at=T0 + 3, worker_id="w2", pool="other")])
    await store.apply([move("d", _E.REQUEST_CANCEL, at=T0 + 3)])
    await store.apply([move("e", _E.REDISPATCH, at=T0 + 3, worker_id="w3")])
    await store.apply([move("f", _E.NOTE, at=T0 + 3, reason="looked at")])
    await store.apply([move("g", _E.SUCCEED, at=T0 + 4, result=succeeded("g"))])
    await store.apply([move("d", _E.NOTE, at=T0 + 4), move("d", _E.NOTE, at=T0 + 4)])


class OwnershipContract:
    """The promises about bulk moves, lagging rows and the epoch."""

    @abstractmethod
    def successor(self, store: Ledger, folder: Path) -> Backend:
        """A backend on the same storage, for another engine, though the first was not closed."""

    # -- many at once -------------------------------------------------------------

    @run_async
    async def test_a_bulk_move_moves_each_job_under_its_own_guard(self, store: Ledger) -> None:
        await store.apply([accept(name) for name in "abcd"])
        await store.apply([move("b", _E.SCHEDULE), move("d", _E.CANCEL)])
        bulk = dispatched(list("abcdx"), versions=[1, 1, 1, 1, 1])
        _, (answer,) = await store.commit([], [bulk])
        assert [job.job_id for job in answer.moved] == ["a", "c"]
        assert [(place, other.verdict) for place, other in answer.others] == [
            (1, ChangeOutcome.REFUSED),
            (3, ChangeOutcome.REFUSED),
            (4, ChangeOutcome.REFUSED),
        ]
        ended = BulkMove(
            job_ids=["a", "c"],
            events=(_E.SUCCEED,),
            actor="worker:w1",
            at=T0 + 2,
            attempts=[1, 2],
            results=[succeeded("a"), succeeded("c")],
        )
        _, (answer,) = await store.commit([], [ended])
        assert [job.job_id for job in answer.moved] == ["a"]
        assert (await one(store, "a")).result == succeeded("a")
        assert (await one(store, "c")).state is _S.DISPATCHED
        events = [entry.event for entry in await store.history("a")]
        assert events == [_E.ACCEPT, _E.SCHEDULE, _E.DISPATCH, _E.START, _E.SUCCEED]
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_a_commit_of_many_events_is_read_without_gap_or_repeat(
        self, store: Ledger
    ) -> None:
        names = [f"j{i:05}" for i in range(5000)]
        await store.apply([accept(name) for name in names])
        _, (answer,) = await store.commit([], [dispatched(names)])
        assert len(answer.moved) == 5000
        at, seen = 0, []
        while page := await store.events(at, 3333):
            assert len(page) <= 3334
            seen.extend(page)
            at = page[-1].cursor
        assert at == await store.last_event()
        assert [event.cursor for event in seen] == sorted({event.cursor for event in seen})
        steps = [(event.transition.job_id, event.transition.n) for event in seen]
        assert sorted(steps) == [(name, n) for name in names for n in (1, 2, 3)]
        for name in (names[0], names[2500], names[-1]):
            assert [entry.n for entry in await store.history(name)] == [1, 2, 3]
        assert (await store.verify()).mismatches == ()

    @run_async
    async def test_checkpoints_keep_their_blobs_and_go_with_their_job(self, store: Ledger) -> None:
        await store.apply([accept("a", tenant="t1"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        row = Step("x", 1, input="blob:sha256-in", output="blob:sha256-out;text/plain")
        await store.apply([Checkpoint("a", 1, (row, Step("x", 2, input="data:,x")))])
        assert await store.pointers() == {"blob:sha256-in", "blob:sha256-out;text/plain"}
        assert await store.refers("t1", "blob:sha256-in")
        assert await store.refers("t1", "blob:sha256-out")
        assert not await store.refers("t2", "blob:sha256-in")
        await store.apply([move("a", _E.SUCCEED, result=succeeded("a"))])
        await store.prune(T0 + 1, limit=10)
        assert await store.pointers() == set()
        await store.apply([accept("a")])
        assert (await store.read_steps("a")).steps == []

    @run_async
    async def test_a_reason_that_cannot_be_written_costs_its_own_move_only(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("a"), accept("b")])
        ends = await asyncio.gather(
            store.apply([move("a", _E.CANCEL, reason="\ud800")]),
            store.apply([move("b", _E.CANCEL)]),
            return_exceptions=True,
        )
        assert [type(end) for end in ends] == [Unstorable, list]
        assert await store.tally() == {_S.PENDING: 1, _S.CANCELLED: 1}
        assert (await store.verify()).mismatches == ()

    # -- another engine -----------------------------------------------------------

    @run_async
    async def test_what_only_the_journal_told_is_known_after_a_crash(
        self, store: Ledger, tmp_path: Path
    ) -> None:
        await held(store)
        assert len(store.lagging) == 6
        jobs, counts = await found(store), await store.tally()
        logs = {job.job_id: await store.history(job.job_id) for job in jobs}
        after = Ledger(self.successor(store, tmp_path))
        assert await found(after) == jobs
        assert [job for job in jobs if not job.is_final][::-1] == await after.unfinished()
        assert await after.tally() == counts
        assert {job.job_id: await after.history(job.job_id) for job in jobs} == logs
        assert await names(after, states=(_S.RUNNING,)) == "dcb"
        assert await names(after, states=(_S.PENDING,)) == "h"
        assert (await after.verify()).mismatches == ()
        answers = await after.apply(
            [
                move("c", _E.SUCCEED, attempt=1, result=succeeded("c")),
                move("c", _E.SUCCEED, attempt=2, at=T0 + 9, result=succeeded("c")),
                move("a", _E.START, attempt=1, at=T0 + 9),
            ]
        )
        assert verdicts(answers) == "XMM"
        await after.close()
        third = Ledger(self.successor(after, tmp_path))
        assert (await one(third, "a")).state is _S.RUNNING
        assert third.lagging == {}, "it was closed in order"
        assert await names(third, states=(_S.RUNNING,)) == "dba"
        assert (await third.verify()).mismatches == ()
        await third.close()

    @run_async
    async def test_a_job_that_is_scheduled_as_it_is_accepted_is_the_same_after_a_crash(
        self, store: Ledger, tmp_path: Path
    ) -> None:
        await store.apply(
            [
                *(accept("a"), move("a", _E.SCHEDULE)),
                *(accept("b"), move("b", _E.SCHEDULE, at=T0 + 1)),
                *(accept("c", idempotency_key="k"), move("c", _E.SCHEDULE)),
            ]
        )
        jobs = await found(store)
        assert {(job.state, job.version) for job in jobs} == {(_S.SCHEDULED, 2)}
        after = Ledger(self.successor(store, tmp_path))
        assert await found(after) == jobs
        assert (await after.verify()).mismatches == ()
        assert await names(after, states=(_S.SCHEDULED,)) == "cba"
        answers = await after.apply([move(name, _E.DISPATCH, at=T0 + 2) for name in "abc"])
        assert verdicts(answers) == "MMM"
        await after.close()

    @run_async
    async def test_an_engine_that_was_replaced_can_write_no_more(
        self, store: Ledger, tmp_path: Path
    ) -> None:
        await store.apply([accept("a"), accept("b"), move("b", _E.CANCEL)])
        after = Ledger(self.successor(store, tmp_path))
        await after.open()
        with pytest.raises(StoreFailed, match="another engine"):
            await store.apply([move("a", _E.CANCEL)])
        with pytest.raises(StoreFailed, match="another engine"):
            await store.prune(T0 + 1, limit=10)
        with pytest.raises(StoreFailed, match="another engine"):
            await store.remember("x", b"1")
        assert await names(after) == "ba"
        assert (await one(after, "a")).state is _S.PENDING
        (answer,) = await after.apply([accept("c")])
        assert answer.job is not None
        assert answer.job.seq == 3
        assert (await after.verify()).mismatches == ()
        await after.close()

    @run_async
    async def test_rows_are_brought_up_to_date_from_time_to_time(
        self, store: Ledger, tmp_path: Path
    ) -> None:
        await store.apply([accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH)])
        store.write_log([line("a", "x")])
        for n in range(1100):
            await store.apply([move("a", _E.NOTE, at=T0 + n)])
        assert (await store.backend.find(JobQuery()))[0].version > 500, "the row itself"
        after = Ledger(self.successor(store, tmp_path))
        assert (await one(after, "a")).version == 1103
        assert len(await after.history("a")) == 1103
        assert (await after.verify()).mismatches == ()
        await after.close()
