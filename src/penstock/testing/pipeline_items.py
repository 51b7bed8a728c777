"""What a `PipelineStore` must do with the items of its runs, as tests."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.core.errors import Superseded
from penstock.testing.aio import run_async
from penstock.testing.pipeline_samples import begun, ended_items, listed_items, record_of, save_of
from penstock.testing.samples import T0
from penstock.workloads.pipeline.records import ErrorClass, ItemOutcome, ItemRecord
from penstock.workloads.pipeline.store import PipelineStore, StageItems

_O = ItemOutcome


async def seqs(store: PipelineStore, job_id: str, stage: str, *outcomes: ItemOutcome) -> list[int]:
    return [item.seq for item in await store.items(job_id, stage, outcomes=outcomes)]


class ItemsContract:
    """Listing, ending, paging, counting and forgetting of items."""

    @run_async
    async def test_every_field_of_an_item_is_kept(self, store: PipelineStore) -> None:
        full = ItemRecord(
            seq=3,
            key="ü/0",
            input="data:,in",
            outcome=_O.FAILED,
            output="data:,out",
            fan=2,
            attempts=4,
            error_class=ErrorClass.TIMEOUT,
            error_code="SLOW",
            error="too slow\n",
            duration_ms=12.5,
            finished_at=T0 + 1,
            reused=True,
        )
        await begun(store, "a")
        await store.save(save_of("a", listed=(StageItems("s", (full,)),)))
        assert await store.items("a", "s") == [full]
        assert await store.items_by_key("a", "s", ["ü/0"]) == [full]
        later = replace(full, outcome=_O.OK, error_class=None, error_code="", error="", fan=0)
        await store.save(save_of("a", ended=(StageItems("s", (later,)),)))
        assert await store.items("a", "s") == [later]

    @run_async
    async def test_a_key_that_the_stage_has_is_left_out(self, store: PipelineStore) -> None:
        await begun(store, "a")
        first = await store.save(save_of("a", listed=listed_items("s", 3, keys="xyx")))
        assert first.listed == 2
        again = await store.save(save_of("a", listed=listed_items("s", 3, start=3, keys="yzy")))
        assert again.listed == 1
        items = await store.items("a", "s")
        assert [(item.seq, item.key) for item in items] == [(0, "x"), (1, "y"), (4, "z")]

    @run_async
    async def test_listing_again_changes_nothing(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await store.save(save_of("a", listed=listed_items("s", 4), ended=ended_items("s", 1)))
        before = await store.items("a", "s")
        assert (await store.save(save_of("a", listed=listed_items("s", 4)))).listed == 0
        assert await store.items("a", "s") == before

    @run_async
    async def test_items_of_one_stage_listed_in_two_parts_share_their_keys(
        self, store: PipelineStore
    ) -> None:
        await begun(store, "a")
        parts = listed_items("s", 2, keys="xy") + listed_items("s", 2, start=2, keys="yz")
        assert (await store.save(save_of("a", listed=parts))).listed == 3

    @run_async
    async def test_stages_and_runs_have_keys_of_their_own(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await begun(store, "b")
        groups = listed_items("s", 2) + listed_items("t", 2)
        for job in "ab":
            assert (await store.save(save_of(job, listed=groups))).listed == 4
        await store.save(save_of("a", ended=ended_items("s", 0)))
        assert await seqs(store, "a", "s", _O.OK) == [0]
        assert await seqs(store, "a", "t", _O.OK) == await seqs(store, "b", "s", _O.OK) == []

    @run_async
    async def test_an_end_replaces_the_outcome_and_not_the_item(self, store: PipelineStore) -> None:
        await begun(store, "a")
        both = listed_items("s", 2)
        await store.save(save_of("a", listed=both, ended=ended_items("s", 1, fan=5)))
        first, second = await store.items("a", "s")
        assert first == both[0].items[0]
        assert (second.key, second.input) == ("k1", "data:,1")
        assert (second.outcome, second.fan, second.output) == (_O.OK, 5, "data:,out")
        await store.save(save_of("a", ended=ended_items("s", 1, outcome=_O.FAILED, output="")))
        (failed,) = await store.items("a", "s", outcomes=(_O.FAILED,))
        assert (failed.error_class, failed.error_code) == (ErrorClass.PERMANENT, "E")
        assert (failed.fan, failed.output) == (0, "")

    @run_async
    async def test_items_come_in_pages_and_in_order(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await store.save(save_of("a", listed=listed_items("s", 40, start=30)))
        await store.save(save_of("a", listed=listed_items("s", 30)))
        found: list[ItemRecord] = []
        while page := await store.items("a", "s", after=found[-1].seq if found else -1, limit=16):
            assert len(page) <= 16
            found.extend(page)
        assert [item.seq for item in found] == list(range(70))
        assert await store.items("a", "s", after=69) == []
        assert await store.items("a", "s", limit=0) == []
        assert await store.items("a", "other") == await store.items("nobody", "s") == []

    @run_async
    async def test_items_are_told_apart_by_their_outcomes(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await store.save(save_of("a", listed=listed_items("s", 8)))
        ends = (
            ended_items("s", 1, 4)
            + ended_items("s", 2, 5, outcome=_O.FAILED)
            + ended_items("s", 6, outcome=_O.SKIPPED)
        )
        await store.save(save_of("a", ended=ends))
        assert await seqs(store, "a", "s", _O.OK) == [1, 4]
        assert await seqs(store, "a", "s", _O.FAILED) == [2, 5]
        assert await seqs(store, "a", "s", _O.FAILED, _O.SKIPPED) == [2, 5, 6]
        assert await seqs(store, "a", "s", _O.PENDING) == [0, 3, 7]
        assert await seqs(store, "a", "s", _O.SKIPPED, _O.OK) == [1, 4, 6]
        after = await store.items("a", "s", after=2, limit=1, outcomes=(_O.FAILED, _O.OK))
        assert [item.seq for item in after] == [4]
        late = await store.items("a", "s", after=2, limit=9, outcomes=(_O.FAILED,))
        assert [item.seq for item in late] == [5]

    @run_async
    async def test_outcomes_are_found_among_many_items(self, store: PipelineStore) -> None:
        await begun(store, "a")
        for start in range(0, 5000, 500):
            await store.save(save_of("a", listed=listed_items("s", 500, start=start)))
        await store.save(save_of("a", ended=ended_items("s", 7, 4321, fan=3)))
        assert await seqs(store, "a", "s", _O.OK) == [7, 4321]
        assert await store.fan("a", "s") == 6
        (last,) = await store.items("a", "s", after=4998, outcomes=(_O.PENDING,))
        assert last.seq == 4999

    @run_async
    async def test_items_are_found_by_their_keys(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await store.save(save_of("a", listed=listed_items("s", 5)))
        found = await store.items_by_key("a", "s", ["k4", "nobody", "k1", "k4"])
        assert [item.seq for item in found] == [1, 4]
        assert await store.items_by_key("a", "s", []) == []
        assert await store.items_by_key("a", "t", ["k1"]) == []
        assert await store.items_by_key("nobody", "s", ["k1"]) == []

    @run_async
    async def test_a_fan_is_the_sum_over_ok_items(self, store: PipelineStore) -> None:
        await begun(store, "a")
        assert await store.fan("a", "s") == await store.fan("nobody", "s") == 0
        ends = ended_items("s", 0, 2, fan=3) + ended_items("s", 1, outcome=_O.FAILED, fan=100)
        await store.save(save_of("a", listed=listed_items("s", 4), ended=ends))
        assert await store.fan("a", "s") == 6

    @run_async
    async def test_a_restart_forgets_the_items_of_some_stages(self, store: PipelineStore) -> None:
        before = await begun(store, "a")
        groups = listed_items("s", 2) + listed_items("t", 2) + listed_items("u", 2)
        await store.save(save_of("a", listed=groups))
        await store.forget_stages("a", before.fence, ["s", "u", "unknown"])
        assert await store.items("a", "s") == await store.items("a", "u") == []
        assert len(await store.items("a", "t")) == 2
        assert (await store.save(save_of("a", listed=listed_items("s", 3)))).listed == 3

    @pytest.mark.parametrize("fence", [0, 2])
    @run_async
    async def test_only_the_live_run_may_forget(self, store: PipelineStore, fence: int) -> None:
        await begun(store, "a")
        await store.save(save_of("a", listed=listed_items("s", 2)))
        with pytest.raises(Superseded):
            await store.forget_stages("a", fence, ["s"])
        assert len(await store.items("a", "s")) == 2

    @run_async
    async def test_pointers_are_the_blobs_and_nothing_else(self, store: PipelineStore) -> None:
        await begun(store, "a")
        await begun(store, "b")
        blobs = [f"blob:sha256-{digit * 64}" for digit in "123"]
        items = (
            ItemRecord(seq=0, key="0", input=blobs[0]),
            ItemRecord(seq=1, key="1", input="data:,x", output=blobs[1] + ";type=image/png"),
            ItemRecord(seq=2, key="2"),
        )
        await store.save(save_of("a", listed=(StageItems("s", items),)))
        await store.save(save_of("b", listed=(StageItems("t", items[:1]),)))
        assert sorted(await store.pointers()) == [blobs[0], blobs[1] + ";type=image/png"]
        await store.save(save_of("a", ended=ended_items("s", 2, output=blobs[2])))
        await store.save(save_of("a", ended=ended_items("s", 1, output="data:,small")))
        assert sorted(await store.pointers()) == [blobs[0], blobs[2]]

    @run_async
    async def test_a_blob_is_a_tenant_s_if_an_item_of_its_runs_points_to_it(
        self, store: PipelineStore
    ) -> None:
        await begun(store, "a")
        taken, given, other = (f"blob:sha256-{digit * 64}" for digit in "123")
        items = (
            ItemRecord(seq=0, key="0", input=taken),
            ItemRecord(seq=1, key="1", input="data:,x", output=given),
        )
        await store.save(save_of("a", listed=(StageItems("s", items),)))
        tenant = (await record_of(store, "a")).tenant
        found = [await store.refers(tenant, blob) for blob in (taken, given, other, "data:,x")]
        assert found[:3] == [True, True, False]
        assert not await store.refers("somebody else", taken)
