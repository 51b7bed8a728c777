"""What a `PipelineStore` must do with saves, as tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.core.errors import Conflict, IllegalMove, NotFound, Superseded
from penstock.core.machine import Step
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobEvent, PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.testing.pipeline_samples import (
    a_stage,
    begun,
    bring_to,
    ended_items,
    listed_items,
    progress,
    record_of,
    save_of,
)
from penstock.testing.samples import T0
from penstock.workloads.pipeline.records import (
    Alert,
    ItemOutcome,
    RunSummary,
    StageError,
    StageKind,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.store import PipelineStore, RunQuery, Saved

_S, _E = PipelineJobStatus, PipelineJobEvent
_SOME_EVENTS = tuple(event for event in PipelineJobEvent if event is not _E.CREATE)


class SavesContract:
    """Moves, fences, all or nothing, many at once."""

    @pytest.mark.parametrize("event", _SOME_EVENTS)
    @pytest.mark.parametrize("status", list(PipelineJobStatus))
    @run_async
    async def test_every_move_asks_the_table(
        self, store: PipelineStore, status: PipelineJobStatus, event: PipelineJobEvent
    ) -> None:
        before = await bring_to(store, "a", status)
        save = save_of("a", fence=before.fence, event=event, at=T0 + 50, current_stage="new")
        if PIPELINE.judge(status, event) is Step.ILLEGAL:
            with pytest.raises(IllegalMove):
                await store.save(save)
            assert await store.get("a") == before
            return
        saved = await store.save(save)
        after = await record_of(store, "a")
        assert saved.status is after.status is PIPELINE.after(status, event)
        assert (after.finished_at is not None) is after.is_final
        if before.is_final:
            assert after == before, "a repeat of the end changes nothing"
        else:
            assert (after.version, after.current_stage) == (before.version + 1, "new")
            assert after.finished_at == (T0 + 50 if after.is_final else None)

    @run_async
    async def test_a_run_starts_once_however_often_it_is_executed(
        self, store: PipelineStore
    ) -> None:
        await begun(store, "a")
        again = save_of("a", event=_E.EXECUTE, at=T0 + 9, happened=(progress(1),))
        assert (await store.save(again)).status is _S.RUNNING
        record = await record_of(store, "a")
        assert record.started_at == T0 + 1
        assert len(await store.events("a")) == 1

    @pytest.mark.parametrize("fence", [0, 2, 5])
    @run_async
    async def test_a_write_of_another_run_is_refused_whole(
        self, store: PipelineStore, fence: int
    ) -> None:
        before = await begun(store, "a")
        with pytest.raises(Superseded):
            await store.save(
                save_of(
                    "a",
                    fence=fence,
                    event=_E.COMPLETE,
                    stages=(a_stage("s", 0),),
                    listed=listed_items("s", 3),
                    happened=(progress(1),),
                )
            )
        assert await store.get("a") == before
        assert await store.items("a", "s") == []
        assert await store.events("a") == []

    @pytest.mark.parametrize(
        ("wrong", "refusal"),
        [
            ({"ended": ended_items("s", 7)}, NotFound),
            ({"ended": ended_items("unlisted", 0)}, NotFound),
            ({"listed": listed_items("s", 5, keys="vwxyz")}, Conflict),
            ({"event": _E.CREATE}, IllegalMove),
        ],
        ids=["unknown item", "unknown stage", "taken number", "illegal"],
    )
    @run_async
    async def test_a_save_is_all_or_nothing(
        self, store: PipelineStore, wrong: dict[str, Any], refusal: type[Exception]
    ) -> None:
        await begun(store, "a")
        await store.save(save_of("a", listed=listed_items("s", 3)))
        before, items = await store.get("a"), await store.items("a", "s")
        rest: dict[str, Any] = {
            "stages": (a_stage("s", 0),),
            "happened": (progress(1),),
            "errors": (StageError("s", "no"),),
            "listed": listed_items("t", 2),
            "current_stage": "t",
        }
        heard: list[str] = []
        store.listen(heard.extend)
        with pytest.raises(refusal):
            await store.save(save_of("a", **{**rest, **wrong}))
        assert await store.get("a") == before
        assert await store.items("a", "s") == items
        assert await store.items("a", "t") == []
        assert (await store.events("a"), heard) == ([], [])

    @run_async
    async def test_what_is_not_set_is_left_alone(self, store: PipelineStore) -> None:
        await begun(store, "a", lease_until=T0 + 30)
        everything: dict[str, Any] = {
            "current_stage": "s",
            "errors": (StageError("s", "oh", "CODE"), StageError("t", "no")),
            "summary": _summary(),
            "alerts": (Alert(code="LOW", message="few", value=0.5, threshold="x"),),
            "abandoned_items": ("s/1", "s/ü"),
            "cancel_effective": True,
            "fingerprint": "f2",
            "lease_until": T0 + 60,
        }
        await store.save(save_of("a", **everything))
        first = await record_of(store, "a")
        assert {name: getattr(first, name) for name in everything} == everything
        await store.save(save_of("a"))
        second = await record_of(store, "a")
        assert {name: getattr(second, name) for name in everything} == everything
        assert second.version == first.version + 1
        await store.save(save_of("a", errors=(), alerts=(), abandoned_items=(), lease_until=None))
        third = await record_of(store, "a")
        assert (third.errors, third.alerts, third.abandoned_items) == ((), (), ())
        assert (third.lease_until, third.current_stage) == (None, "s")

    @run_async
    async def test_stages_replace_those_of_their_name(self, store: PipelineStore) -> None:
        await begun(store, "a")
        full = StageRecord(
            name="b",
            index=1,
            kind=StageKind.STEP,
            status=StageStatus.PARTIAL,
            reason="ü: null",
            counted=False,
            critical=True,
            listed=True,
            total=9,
            done=5,
            ok=3,
            failed=1,
            skipped=1,
            reused=2,
            rate=0.25,
            eta=16.0,
            started_at=T0,
            finished_at=T0 + 2,
            duration_ms=2000.5,
            metrics={"n": 1, "share": 0.5, "how": "fast", "on": True},
            errors=("one", "two"),
        )
        await store.save(save_of("a", stages=(a_stage("b", 1), a_stage("c", 2))))
        await store.save(save_of("a", stages=(full, a_stage("a", 0))))
        record = await record_of(store, "a")
        assert [stage.name for stage in record.stages] == ["a", "b", "c"]
        assert record.stage("b") == full
        assert (await store.find(RunQuery()))[0] == (await store.unfinished())[0] == record

    @run_async
    async def test_a_metric_that_is_no_number_does_not_spoil_its_record(
        self, store: PipelineStore
    ) -> None:
        await begun(store, "a")
        odd = {"nan": float("nan"), "inf": float("inf"), "fine": 1.0}
        await store.save(
            save_of(
                "a",
                stages=(a_stage("s", 0, metrics=odd),),
                summary=_summary(stages={"s": odd}),
                alerts=(Alert(code="A", message="m", value=float("nan"), threshold=1),),
            )
        )
        record = await record_of(store, "a")
        assert record.stages[0].metrics["fine"] == 1.0
        assert record.stages[0].metrics.keys() == odd.keys()
        assert str(record.stages[0].metrics["nan"]) == "nan"
        assert record.summary is not None
        assert str(record.summary.stages["s"]["inf"]) == "inf"

    @run_async
    async def test_progress_is_what_gets_further_and_not_a_heartbeat(
        self, store: PipelineStore
    ) -> None:
        await begun(store, "a")
        await store.save(save_of("a", at=T0 + 5, lease_until=T0 + 90))
        assert (await record_of(store, "a")).progress_at == T0 + 1
        steps: list[dict[str, Any]] = [
            {"stages": (a_stage("s", 0),)},
            {"listed": listed_items("s", 2)},
            {"ended": ended_items("s", 1)},
            {"happened": (progress(1),)},
            {"current_stage": "s"},
            {"event": _E.COMPLETE},
        ]
        for n, step in enumerate(steps):
            await store.save(save_of("a", at=T0 + 10 + n, **step))
            assert (await record_of(store, "a")).progress_at == T0 + 10 + n

    @run_async
    async def test_an_end_gives_the_lease_back(self, store: PipelineStore) -> None:
        await begun(store, "a", lease_until=T0 + 30)
        await store.save(save_of("a", event=_E.COMPLETE, lease_until=T0 + 60))
        assert (await record_of(store, "a")).lease_until is None

    @run_async
    async def test_what_is_learnt_after_the_end_can_still_be_written(
        self, store: PipelineStore
    ) -> None:
        before = await bring_to(store, "a", _S.COMPLETED)
        saved = await store.save(save_of("a", at=T0 + 99, summary=_summary()))
        after = await record_of(store, "a")
        assert saved == Saved(_S.COMPLETED, False)
        assert after.summary == _summary()
        assert (after.status, after.finished_at) == (before.status, before.finished_at)

    @run_async
    async def test_fifty_savers_at_once_and_one_of_them_refused(self, store: PipelineStore) -> None:
        for n in range(50):
            await begun(store, f"r{n:02}", pipeline=f"p{n}")
        heard: list[str] = []
        store.listen(heard.extend)
        saves = [
            save_of(
                f"r{n:02}",
                fence=0 if n == 20 else 1,
                listed=listed_items("s", 4),
                ended=ended_items("s", 9) if n == 30 else ended_items("s", 1),
                event=_E.CANCEL if n == 40 else None,
                happened=(progress(n),),
            )
            for n in range(50)
        ]
        ends = await asyncio.gather(*map(store.save, saves), return_exceptions=True)
        assert isinstance(ends[20], Superseded)
        assert isinstance(ends[30], NotFound)
        fine = [n for n in range(50) if n not in (20, 30)]
        for n in fine:
            assert ends[n] == Saved(_S.CANCELLED if n == 40 else _S.RUNNING, False, 4)
            assert len(await store.items(f"r{n:02}", "s", outcomes=(ItemOutcome.OK,))) == 1
        for n in (20, 30):
            assert await store.items(f"r{n:02}", "s") == []
            assert await store.events(f"r{n:02}") == []
        assert sorted(heard) == [f"r{n:02}" for n in fine]

    @run_async
    async def test_many_savers_of_one_run_lose_nothing(self, store: PipelineStore) -> None:
        before = await begun(store, "a")
        saves = [save_of("a", happened=(progress(n),)) for n in range(40)]
        await asyncio.gather(*map(store.save, saves))
        assert (await record_of(store, "a")).version == before.version + 40
        assert [event.data["n"] for event in await store.events("a")] == list(range(40))


def _summary(**fields: Any) -> RunSummary:
    defaults: dict[str, Any] = {
        "trace_id": "t",
        "started_at": T0,
        "finished_at": None,
        "duration_ms": 1.5,
        "stages_ms": 1.0,
        "status": _S.PARTIAL,
        "stages": {"s": {"n": 1, "how": "ü"}},
        "alerts": ("LOW",),
    }
    return RunSummary(**{**defaults, **fields})
