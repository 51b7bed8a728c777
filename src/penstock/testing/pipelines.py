"""What every `PipelineStore` must do, as tests. Subclass, make the store, and run pytest:

class TestMyStore(PipelineStoreContract):
    def make(self, folder):
        return MyPipelineStore(folder / "runs")
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import (
    NotFound,
    PipelineBusy,
    StoreFailed,
    Superseded,
    Unavailable,
)
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobEvent, PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.testing.pipeline_items import ItemsContract
from penstock.testing.pipeline_samples import (
    a_run,
    a_stage,
    begun,
    bring_to,
    record_of,
    save_of,
)
from penstock.testing.pipeline_saves import SavesContract
from penstock.testing.pipeline_shelves import ShelvesContract
from penstock.testing.pipeline_stops import StopsContract
from penstock.testing.samples import T0
from penstock.workloads.pipeline.records import (
    PipelineEventKind,
    PipelineRecord,
)
from penstock.workloads.pipeline.store import Claim, Happening, PipelineStore, RunQuery

_S, _E = PipelineJobStatus, PipelineJobEvent


async def names(store: PipelineStore, **conditions: Any) -> str:
    return "".join(run.id for run in await store.find(RunQuery(**conditions)))


class PipelineStoreContract(SavesContract, StopsContract, ItemsContract, ShelvesContract, ABC):
    """The promises of `penstock.workloads.pipeline.store.PipelineStore`."""

    @abstractmethod
    def make(self, folder: Path) -> PipelineStore:
        """A new, empty store; `folder` is a place of its own to keep it in."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[PipelineStore]:
        store = self.make(tmp_path)
        yield store
        asyncio.run(store.close())

    # -- creating -----------------------------------------------------------------

    @run_async
    async def test_every_field_of_a_run_is_kept(self, store: PipelineStore) -> None:
        full = a_run(
            "full",
            trace_id="trace",
            pipeline="news",
            fingerprint="f1",
            config={"n": 1, "deep": {"ü": [1.5, None, True]}, "long": "x" * 5000},
            stages=(a_stage("b", 1), a_stage("a", 0)),
            retry_of="before",
            tenant="acme",
            trigger="schedule",
        )
        created = await store.create(full)
        assert created == await store.get("full")
        assert [stage.name for stage in created.stages] == ["a", "b"]
        kept = (await store.find(RunQuery()))[0]
        assert kept == created == (await store.unfinished())[0]
        for name in ("trace_id", "pipeline", "fingerprint", "config", "retry_of", "tenant"):
            assert getattr(kept, name) == getattr(full, name)
        assert (kept.status, kept.version, kept.fence) == (_S.PENDING, 1, 0)

    @run_async
    async def test_an_id_that_is_taken_is_answered_with_its_run(self, store: PipelineStore) -> None:
        first = await store.create(a_run("a", trace_id="first"))
        again = await store.create(a_run("a", trace_id="second"), single_flight=True)
        assert again == first == await store.get("a")

    @run_async
    async def test_what_is_not_there_is_none_or_not_found(self, store: PipelineStore) -> None:
        assert await store.get("nobody") is None
        assert await store.fail_stale("nobody", T0, "gone", 1) is False
        with pytest.raises(NotFound):
            await store.save(save_of("nobody"))
        with pytest.raises(NotFound):
            await store.request_cancel("nobody", T0)
        with pytest.raises(NotFound):
            await store.claim(Claim(job_id="nobody", owner="me", now=T0))
        with pytest.raises(NotFound):
            await store.forget_stages("nobody", 1, ["s"])

    @run_async
    async def test_a_single_flight_names_the_run_that_is_there(self, store: PipelineStore) -> None:
        await store.create(a_run("a"), single_flight=True)
        with pytest.raises(PipelineBusy) as refused:
            await store.create(a_run("b"), single_flight=True)
        assert refused.value.facts == {"running": "a"}
        assert await store.get("b") is None

    @run_async
    async def test_a_single_flight_is_one_of_a_pipeline_and_tenant(
        self, store: PipelineStore
    ) -> None:
        await store.create(a_run("a"), single_flight=True)
        await store.create(a_run("b", pipeline="other"), single_flight=True)
        await store.create(a_run("c", tenant="t2"), single_flight=True)
        await store.create(a_run("d"))
        assert await names(store) == "dcba"

    @run_async
    async def test_an_ended_run_keeps_no_other_out(self, store: PipelineStore) -> None:
        await bring_to(store, "a", _S.PARTIAL)
        await store.create(a_run("b"), single_flight=True)
        with pytest.raises(PipelineBusy):
            await store.create(a_run("c"), single_flight=True)

    @run_async
    async def test_of_many_that_come_at_once_one_flies(self, store: PipelineStore) -> None:
        runs = [store.create(a_run(f"r{i}"), single_flight=True) for i in range(20)]
        ends = await asyncio.gather(*runs, return_exceptions=True)
        assert sum(isinstance(end, PipelineRecord) for end in ends) == 1
        assert sum(isinstance(end, PipelineBusy) for end in ends) == 19

    # -- claiming -----------------------------------------------------------------

    @run_async
    async def test_a_run_that_nobody_ran_can_be_claimed_once(self, store: PipelineStore) -> None:
        await store.create(a_run("a"))
        claim = Claim(job_id="a", owner="me", now=T0 + 1, lease_until=T0 + 30)
        mine = await store.claim(claim)
        assert mine is not None
        assert mine == await store.get("a")
        assert (mine.fence, mine.owner, mine.lease_until) == (1, "me", T0 + 30)
        assert (mine.status, mine.resumes, mine.version) == (_S.PENDING, 0, 2)
        assert await store.claim(Claim(job_id="a", owner="you", now=T0 + 2)) is None
        assert await store.get("a") == mine

    @pytest.mark.parametrize(("now", "gets_it"), [(29.9, False), (30.0, True), (31.0, True)])
    @run_async
    async def test_a_run_can_be_claimed_again_when_its_lease_is_over(
        self, store: PipelineStore, now: float, gets_it: bool
    ) -> None:
        await begun(store, "a", lease_until=T0 + 30)
        taken = await store.claim(Claim(job_id="a", owner="you", now=T0 + now))
        assert (taken is not None) is gets_it
        if taken is not None:
            assert (taken.fence, taken.owner, taken.resumes) == (2, "you", 1)
            assert (taken.status, taken.lease_until) == (_S.RUNNING, None)

    @run_async
    async def test_a_run_that_others_watch_is_claimed_with_a_higher_fence_only(
        self, store: PipelineStore
    ) -> None:
        await begun(store, "a", lease_until=None)
        assert await store.claim(Claim(job_id="a", owner="x", now=T0 + 1e9)) is None
        for fence in (0, 1):
            assert await store.claim(Claim(job_id="a", owner="x", now=T0, fence=fence)) is None
        taken = await store.claim(Claim(job_id="a", owner="x", now=T0, fence=7))
        assert taken is not None
        assert (taken.fence, taken.resumes) == (7, 1)

    @run_async
    async def test_a_higher_fence_takes_a_run_away_from_a_live_lease(
        self, store: PipelineStore
    ) -> None:
        await begun(store, "a", lease_until=T0 + 1e9)
        taken = await store.claim(Claim(job_id="a", owner="x", now=T0, fence=2))
        assert taken is not None
        with pytest.raises(Superseded):
            await store.save(save_of("a", fence=1))

    @pytest.mark.parametrize("status", sorted(PIPELINE.final))
    @run_async
    async def test_an_ended_run_cannot_be_claimed(
        self, store: PipelineStore, status: PipelineJobStatus
    ) -> None:
        await bring_to(store, "a", status)
        before = await store.get("a")
        assert await store.claim(Claim(job_id="a", owner="x", now=T0 + 1e9)) is None
        assert await store.claim(Claim(job_id="a", owner="x", now=T0, fence=99)) is None
        assert await store.get("a") == before

    @run_async
    async def test_of_many_claimers_one_gets_it(self, store: PipelineStore) -> None:
        await store.create(a_run("a"))
        claims = [Claim(job_id="a", owner=str(i), now=T0, lease_until=T0 + 9) for i in range(20)]
        taken = await asyncio.gather(*map(store.claim, claims))
        assert [run.fence for run in taken if run is not None] == [1]

    # -- finding ------------------------------------------------------------------

    @run_async
    async def test_runs_are_found_by_any_of_their_marks_newest_first(
        self, store: PipelineStore
    ) -> None:
        await store.create(a_run("a", pipeline="p1", tenant="t1", created_at=T0 + 3))
        await store.create(a_run("b", pipeline="p2", tenant="t1", created_at=T0 + 2))
        await store.create(a_run("c", pipeline="p1", tenant="t2", created_at=T0 + 3, retry_of="a"))
        await begun(store, "d", pipeline="p1", tenant="t1", created_at=T0 + 1)
        await bring_to(store, "e", _S.FAILED, pipeline="p1", tenant="t2", created_at=T0)
        await bring_to(store, "f", _S.COMPLETED, pipeline="p2", tenant="t2", created_at=T0 + 9)
        assert await names(store) == "fcabde"
        assert await names(store, pipeline="p1") == "cade"
        assert await names(store, tenant="t1") == "abd"
        assert await names(store, pipeline="p1", tenant="t2") == "ce"
        assert await names(store, statuses=(_S.PENDING, _S.RUNNING)) == "cabd"
        assert await names(store, statuses=(_S.FAILED,)) == "e"
        assert await names(store, statuses=(_S.FAILED, _S.PARTIAL), tenant="t1") == ""
        assert await names(store, statuses=(_S.COMPLETED, _S.RUNNING)) == "fd"
        assert await names(store, statuses=(_S.FAILED,), pipeline="p1", tenant="t2") == "e"
        assert await names(store, retry_of="a") == "c"
        assert await names(store, retry_of="b") == await names(store, pipeline="p3") == ""
        assert await names(store, limit=2) == "fc"
        assert await names(store, limit=0) == ""
        assert await names(store, before=(T0 + 3, "c")) == "abde"
        assert await names(store, before=(T0 + 2, "b"), pipeline="p1", tenant="t1") == "d"
        assert await names(store, before=(T0 + 1, "d"), statuses=tuple(PIPELINE.final)) == "e"

    @run_async
    async def test_pages_together_are_everything(self, store: PipelineStore) -> None:
        for n in range(25):
            await store.create(a_run(f"{n:02}", created_at=T0 + n // 4, pipeline=f"p{n % 2}"))
        found: list[PipelineRecord] = []
        while page := await store.find(
            RunQuery(
                pipeline="p1",
                limit=4,
                before=(found[-1].created_at, found[-1].id) if found else None,
            )
        ):
            found.extend(page)
        assert [run.id for run in found] == [f"{n:02}" for n in range(23, 0, -2)]

    @run_async
    async def test_unfinished_runs_come_oldest_first(self, store: PipelineStore) -> None:
        await store.create(a_run("b", created_at=T0 + 5))
        await begun(store, "c", created_at=T0 + 4)
        await bring_to(store, "d", _S.CANCELLED, created_at=T0)
        await store.create(a_run("a", created_at=T0 + 5))
        assert [run.id for run in await store.unfinished()] == ["c", "a", "b"]

    # -- telling ------------------------------------------------------------------

    @run_async
    async def test_listeners_hear_of_each_write_after_it_is_true(
        self, store: PipelineStore
    ) -> None:
        heard: list[str] = []
        stop = store.listen(heard.extend)
        await store.create(a_run("a"))
        await store.create(a_run("a"))
        claimed = await store.claim(Claim(job_id="a", owner="me", now=T0))
        assert claimed is not None
        await store.claim(Claim(job_id="a", owner="you", now=T0))
        await store.save(save_of("a", event=_E.EXECUTE))
        await store.request_cancel("a", T0)
        await store.request_cancel("a", T0)
        await store.forget_stages("a", 1, ["s"])
        assert heard == ["a"] * 5
        version = (await record_of(store, "a")).version
        await store.fail_stale("a", T0, "gone", version)
        await store.fail_stale("a", T0, "gone", version)
        assert heard == ["a"] * 6
        stop()
        await store.create(a_run("b"))
        assert heard == ["a"] * 6

    @run_async
    async def test_a_closed_store_takes_nothing_more(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        await store.create(a_run("a"))
        await store.close()
        await store.close()
        with pytest.raises(Unavailable):
            await store.create(a_run("b"))
        with pytest.raises(Unavailable):
            await store.save(save_of("a"))

    @run_async
    async def test_closing_waits_for_what_is_under_way(self, tmp_path: Path) -> None:
        store = self.make(tmp_path)
        under_way = asyncio.ensure_future(store.create(a_run("a")))
        await asyncio.sleep(0)
        await store.close()
        (end,) = await asyncio.gather(under_way, return_exceptions=True)
        assert isinstance(end, Unavailable | PipelineRecord)


class FalliblePipelineContract(PipelineStoreContract):
    """The same, for a store that can be made to fail."""

    @abstractmethod
    def failing(self, store: PipelineStore) -> AbstractContextManager[None]:
        """Within this context, commits that add something fail."""

    @run_async
    async def test_a_failed_commit_leaves_nothing_and_the_store_goes_on(
        self, store: PipelineStore
    ) -> None:
        before = await begun(store, "a")
        heard: list[str] = []
        store.listen(heard.extend)
        with self.failing(store):
            big = Happening(PipelineEventKind.CUSTOM, {"x": "x" * 90_000})
            saves = [save_of("a", happened=(big,)) for _ in range(3)]
            ends = await asyncio.gather(*map(store.save, saves), return_exceptions=True)
            assert [type(end) for end in ends if not isinstance(end, StoreFailed)] == []
            assert heard == []
            assert await store.get("a") == before
            assert await store.events("a") == []
        assert (await store.save(save_of("a", event=_E.COMPLETE))).status is _S.COMPLETED
        assert heard == ["a"]
