"""What a `PipelineStore` keeps beside records and items, as tests."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.testing.pipeline_samples import a_run, begun, bring_to, listed_items, save_of
from penstock.testing.samples import T0
from penstock.workloads.pipeline.records import (
    AlertRule,
    Breaker,
    BreakerState,
    ItemRecord,
    PipelineEventKind,
    PipelineInfo,
    StageInfo,
    StageKind,
)
from penstock.workloads.pipeline.store import Happening, PipelineStore, StageItems

_S, _K = PipelineJobStatus, PipelineEventKind


def _happened(kind: PipelineEventKind, **data: Any) -> Happening:
    return Happening(kind, data)


class ShelvesContract:
    """Events, breakers, declarations, facts; and the removal of what is old."""

    # -- events -------------------------------------------------------------------

    @run_async
    async def test_events_are_numbered_in_order_over_all_runs(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await begun(store, "b")
        start = _happened(_K.STAGE_START, stage="s", deep={"ü": [1, None]})
        await store.save(save_of("a", at=T0 + 5, happened=(start, _happened(_K.CUSTOM))))
        await store.save(save_of("b", happened=(_happened(_K.JOB_START),)))
        await store.save(save_of("a", at=T0 + 6, happened=(_happened(_K.JOB_COMPLETE),)))
        mine, others = await store.events("a"), await store.events("b")
        assert [event.kind for event in mine] == [_K.STAGE_START, _K.CUSTOM, _K.JOB_COMPLETE]
        assert [event.at for event in mine] == [T0 + 5, T0 + 5, T0 + 6]
        assert mine[0].data == {"stage": "s", "deep": {"ü": [1, None]}}
        assert {event.job_id for event in mine} == {"a"}
        ids = [event.id for event in (mine[0], mine[1], others[0], mine[2])]
        assert ids == sorted(set(ids))
        assert ids[0] > 0

    @run_async
    async def test_events_are_read_on_from_an_id(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await store.save(save_of("a", happened=tuple(_happened(_K.CUSTOM, n=n) for n in range(9))))
        everything = await store.events("a")
        assert await store.events("a", limit=4) == everything[:4]
        assert await store.events("a", everything[3].id, 3) == everything[4:7]
        assert await store.events("a", everything[-1].id) == []
        assert await store.events("a", limit=0) == await store.events("nobody") == []

    # -- breakers -----------------------------------------------------------------

    @run_async
    async def test_a_breaker_is_stored_by_who_saw_it_last(self, store: PipelineStore) -> None:
        assert await store.breaker("feeds") is None
        late = Breaker(name="feeds", version=1)
        assert not await store.put_breaker(late)
        first = Breaker(name="feeds", threshold=3, cooldown=1.5)
        assert await store.put_breaker(first)
        assert not await store.put_breaker(first)
        second = Breaker(
            name="feeds",
            state=BreakerState.HALF_OPEN,
            failures=2,
            trials=2,
            opened_at=T0,
            trial_until=(T0 + 1, T0 + 2.5),
            version=1,
        )
        assert await store.put_breaker(second)
        assert not await store.put_breaker(Breaker(name="feeds", version=1))
        assert not await store.put_breaker(Breaker(name="feeds", version=3))
        assert await store.breaker("feeds") == second
        await store.put_breaker(Breaker(name="api"))
        assert await store.breakers() == [Breaker(name="api"), second]

    @run_async
    async def test_of_many_who_change_a_breaker_at_once_one_does(
        self, store: PipelineStore
    ) -> None:
        for version in range(3):
            puts = [Breaker(name="b", failures=n, version=version) for n in range(10)]
            assert sum(await asyncio.gather(*map(store.put_breaker, puts))) == 1

    # -- declarations and facts ---------------------------------------------------

    @run_async
    async def test_what_was_declared_last_is_what_can_be_started(
        self, store: PipelineStore
    ) -> None:
        full = PipelineInfo(
            name="news",
            topic="pipeline.news",
            stages=(
                StageInfo(name="a", kind=StageKind.MAP, over="config:feeds", concurrency=5),
                StageInfo(name="b", kind=StageKind.STEP, of="a", needs=("a",), rate=2.5),
            ),
            fingerprint="f",
            config_schema={"type": "object"},
            alerts=(AlertRule(code="LOW", metric="a.ok", below=0.5),),
            stale_after=None,
            doc="ü",
        )
        other = PipelineInfo(name="b", topic="t", stages=(), fingerprint="1")
        await store.declare([full, other])
        newer = PipelineInfo(name="b", topic="t", stages=(), fingerprint="2")
        await store.declare([newer])
        await store.declare([])
        assert await store.declared() == [newer, full]

    @run_async
    async def test_a_fact_is_what_was_remembered_last(self, store: PipelineStore) -> None:
        assert await store.recall("news/prompt") is None
        await store.remember("news/prompt", b"one")
        await store.remember("news/other", b"")
        await store.remember("news/prompt", b"\x00two")
        assert await store.recall("news/prompt") == b"\x00two"
        assert await store.recall("news/other") == b""

    # -- removing -----------------------------------------------------------------

    @run_async
    async def test_old_runs_are_forgotten_with_all_that_is_theirs(
        self, store: PipelineStore
    ) -> None:
        blob = "blob:sha256-" + "0" * 64
        for job in ("old", "kept"):
            await begun(store, job, config={"long": "x" * 5000})
            item = ItemRecord(seq=0, key="k", input=blob if job == "old" else "")
            await store.save(
                save_of(job, listed=(StageItems("s", (item,)),), happened=(_happened(_K.CUSTOM),))
            )
        at = T0 + 10
        await store.save(save_of("old", at=at, event=PipelineJobEvent.COMPLETE))
        await store.save(save_of("kept", at=at + 1, event=PipelineJobEvent.COMPLETE))
        assert await store.prune(at) == 0
        assert await store.prune(at + 1) == 1
        assert await store.get("old") is None
        assert await store.items("old", "s") == []
        assert await store.events("old") == []
        assert await store.pointers() == []
        kept = await store.get("kept")
        assert kept is not None
        assert len(await store.items("kept", "s")) == len(await store.events("kept")) == 1
        await store.create(a_run("old"))
        assert await store.items("old", "s") == []
        assert await store.events("old") == []

    @run_async
    async def test_runs_that_are_open_are_never_old(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await store.create(a_run("b"))
        assert await store.prune(T0 + 1e9) == 0
        assert len(await store.unfinished()) == 2

    @run_async
    async def test_no_more_runs_are_forgotten_at_once_than_wished(
        self, store: PipelineStore
    ) -> None:
        for n in range(7):
            await bring_to(store, f"r{n}", _S.COMPLETED, created_at=T0 + n / 10)
        assert [await store.prune(T0 + 99, limit=3) for _ in range(4)] == [3, 3, 1, 0]

    @run_async
    async def test_many_items_of_an_old_run_are_forgotten(self, store: PipelineStore) -> None:
        await begun(store, "a")
        for start in range(0, 4500, 500):
            await store.save(
                save_of(
                    "a",
                    listed=listed_items("s", 500, start=start),
                    happened=(_happened(_K.CUSTOM),) * 300,
                )
            )
        await store.save(save_of("a", listed=listed_items("t", 3)))
        await store.save(save_of("a", event=PipelineJobEvent.COMPLETE))
        assert await store.prune(T0 + 99) == 1
        await store.create(a_run("a"))
        assert await store.items("a", "s") == await store.items("a", "t") == []

    @run_async
    async def test_no_event_number_is_given_twice(self, store: PipelineStore) -> None:
        given: list[int] = []
        for job in "abc":
            await begun(store, job)
            await store.save(save_of(job, happened=(_happened(_K.CUSTOM),) * 2))
            await store.save(save_of(job, event=PipelineJobEvent.COMPLETE))
            given.extend(event.id for event in await store.events(job))
            assert await store.prune(T0 + 99) == 1
        assert given == sorted(set(given))
        assert len(given) == 6
