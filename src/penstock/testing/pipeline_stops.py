"""What a `PipelineStore` must do with runs that are to stop, as tests."""

from __future__ import annotations

import asyncio

import pytest

from penstock.core.errors import Superseded
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobEvent, PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.testing.pipeline_samples import (
    a_run,
    a_stage,
    begun,
    bring_to,
    record_of,
    save_of,
)
from penstock.testing.samples import T0
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    PipelineEventKind,
    StageError,
    StageStatus,
)
from penstock.workloads.pipeline.store import PipelineStore, Saved

_S, _E = PipelineJobStatus, PipelineJobEvent


class StopsContract:
    """Cancelling, and the end of what nobody works on any more."""

    # -- cancelling ---------------------------------------------------------------

    @run_async
    async def test_a_run_that_waits_is_cancelled_at_once(self, store: PipelineStore) -> None:
        await store.create(a_run("a"))
        answer = await store.request_cancel("a", T0 + 5)
        assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
        record = await record_of(store, "a")
        assert (record.status, record.finished_at) == (_S.CANCELLED, T0 + 5)
        assert (record.cancel_requested, record.cancel_effective) == (True, True)
        assert [error.code for error in record.errors] == ["CANCELLED"]
        assert record.summary is not None
        assert record.summary.status is _S.CANCELLED
        (event,) = await store.events("a")
        assert (event.kind, event.data["status"]) == (PipelineEventKind.JOB_COMPLETE, "CANCELLED")

    @run_async
    async def test_a_running_run_is_marked_and_told_with_its_next_save(
        self, store: PipelineStore
    ) -> None:
        before = await begun(store, "a")
        assert not (await store.save(save_of("a"))).cancel_requested
        answer = await store.request_cancel("a", T0 + 5)
        assert (answer.accepted, answer.status) == (True, _S.RUNNING)
        record = await record_of(store, "a")
        assert (record.cancel_requested, record.finished_at) == (True, None)
        assert record.version == before.version + 2
        assert (await store.request_cancel("a", T0 + 6)).accepted
        assert await store.get("a") == record, "a second wish changes nothing"
        assert await store.save(save_of("a")) == Saved(_S.RUNNING, True)

    @run_async
    async def test_a_glance_tells_the_status_and_the_wish(self, store: PipelineStore) -> None:
        assert await store.glance("a") is None
        await store.create(a_run("a"))
        assert await store.glance("a") == Saved(_S.PENDING, False)
        await begun(store, "b")
        await store.request_cancel("b", T0 + 5)
        assert await store.glance("b") == Saved(_S.RUNNING, True)

    @pytest.mark.parametrize("status", sorted(PIPELINE.final))
    @run_async
    async def test_an_ended_run_is_not_cancelled(
        self, store: PipelineStore, status: PipelineJobStatus
    ) -> None:
        before = await bring_to(store, "a", status)
        answer = await store.request_cancel("a", T0 + 99)
        assert (answer.accepted, answer.status) == (False, status)
        assert status in answer.reason
        assert await store.get("a") == before

    @pytest.mark.parametrize(
        ("event", "won"), [(_E.COMPLETE, False), (_E.FAIL, False), (_E.CANCEL, True)]
    )
    @run_async
    async def test_the_record_says_whether_cancel_or_finish_won(
        self, store: PipelineStore, event: PipelineJobEvent, won: bool
    ) -> None:
        await begun(store, "a")
        finish = save_of("a", event=event)
        await asyncio.gather(store.request_cancel("a", T0 + 5), store.save(finish))
        record = await record_of(store, "a")
        assert (record.cancel_requested, record.cancel_effective) == (True, won)

    @run_async
    async def test_a_run_without_a_wish_says_nothing_of_cancelling(
        self, store: PipelineStore
    ) -> None:
        record = await bring_to(store, "a", _S.COMPLETED)
        assert (record.cancel_requested, record.cancel_effective) == (False, None)

    # -- stale runs ---------------------------------------------------------------

    @pytest.mark.parametrize("running", [False, True])
    @run_async
    async def test_a_stale_run_fails_with_the_words_given(
        self, store: PipelineStore, running: bool
    ) -> None:
        before = await (begun(store, "a") if running else store.create(a_run("a")))
        if running:
            stages = (
                a_stage("done", 0, status=StageStatus.COMPLETED),
                a_stage("s", 1, status=StageStatus.RUNNING, rate=1.0, eta=2.0),
                a_stage("later", 2),
            )
            error = (StageError("done", "old"),)
            await store.save(save_of("a", stages=stages, errors=error, current_stage="s"))
            before = await record_of(store, "a")
        assert await store.fail_stale("a", T0 + 99, STALE_MESSAGE, before.version)
        record = await record_of(store, "a")
        assert (record.status, record.finished_at) == (_S.FAILED, T0 + 99)
        assert record.errors[-1] == StageError("s" if running else "", STALE_MESSAGE, "STALE")
        assert len(record.errors) == (2 if running else 1)
        expected = ["completed", "failed", "skipped"] if running else []
        assert [stage.status for stage in record.stages] == expected
        assert record.summary is not None
        assert record.summary.status is _S.FAILED
        event = (await store.events("a"))[-1]
        assert (event.kind, event.data["status"]) == (PipelineEventKind.JOB_COMPLETE, "FAILED")
        assert await store.unfinished() == []

    @run_async
    async def test_a_run_that_moved_meanwhile_is_not_stale(self, store: PipelineStore) -> None:
        seen = await begun(store, "a")
        await store.save(save_of("a", lease_until=T0 + 99))
        before = await store.get("a")
        assert not await store.fail_stale("a", T0 + 99, STALE_MESSAGE, seen.version)
        assert await store.get("a") == before

    @run_async
    async def test_an_ended_run_is_not_stale(self, store: PipelineStore) -> None:
        before = await bring_to(store, "a", _S.COMPLETED)
        assert not await store.fail_stale("a", T0 + 99, STALE_MESSAGE, before.version)
        assert await store.get("a") == before

    @run_async
    async def test_a_runner_that_comes_back_after_its_run_failed_is_refused(
        self, store: PipelineStore
    ) -> None:
        seen = await begun(store, "a")
        await store.fail_stale("a", T0 + 99, STALE_MESSAGE, seen.version)
        before = await store.get("a")
        for event in (None, _E.COMPLETE, _E.FAIL):
            with pytest.raises(Superseded):
                await store.save(save_of("a", event=event))
        assert await store.get("a") == before
