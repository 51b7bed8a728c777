"""Jobs whose process is gone, stuck or only slow: who takes them up, and who ends them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.support.rows import every
from tests.unit.pipeline_jobs import Process, on_virtual_time, record_of

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.orphans import Fate, Patience, fate_of
from penstock.workloads.pipeline.records import (
    STALE_AFTER,
    ItemOutcome,
    OnOrphan,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    StageInfo,
    StageKind,
)
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.store import Claim, Save
from penstock.workloads.pipeline.upkeep import Upkeep

_S = PipelineJobStatus
HOUR = 3600.0
LEASE = 30.0
NOW = 1_000_000.0
WORDS = "Job timed out or was orphaned"
"""The seed's; written out here, so that nobody changes them by the way."""


# -- the rule ---------------------------------------------------------------------


def _record(**fields: Any) -> PipelineRecord:
    base: dict[str, Any] = {"status": _S.RUNNING, "fence": 1, "lease_until": NOW - 1}
    return PipelineRecord(
        id="a", trace_id="t", pipeline="p", **{"created_at": NOW - 60, **base, **fields}
    )


def _info(**fields: Any) -> PipelineInfo:
    fields = {"stages": (), **fields}
    return PipelineInfo(name="p", topic="job.pipeline.p", fingerprint="f", **fields)


LONG = StageInfo(name="long", kind=StageKind.STEP, timeout=5 * HOUR)


OLD = {"created_at": NOW - 9 * HOUR, "progress_at": NOW - 3 * HOUR}
ALIVE = {"lease_until": NOW + 1}
PENDING = {"status": _S.PENDING, "fence": 0}
FAIL = {"on_orphan": OnOrphan.FAIL}


@every(
    "record, info, runnable, fate",
    [
        # Nobody has it.
        ({}, {}, True, Fate.RESUME),
        ({"lease_until": NOW}, {}, True, Fate.RESUME),
        (PENDING, {}, True, Fate.RESUME),
        ({**PENDING, "lease_until": None}, {}, True, Fate.RESUME),
        (OLD, {}, True, Fate.RESUME),
        ({"resumes": 19}, {}, True, Fate.RESUME),
        ({"resumes": 20}, {}, True, Fate.GIVE_UP),
        ({}, FAIL, True, Fate.STALE),
        (PENDING, FAIL, True, Fate.STALE),
        ({"cancel_requested": True}, FAIL, True, Fate.RESUME),
        ({"cancel_requested": True, "resumes": 20}, {}, True, Fate.RESUME),
        # ... and its code is not here.
        ({}, {}, False, Fate.LEAVE),
        ({}, None, False, Fate.LEAVE),
        ({}, FAIL, False, Fate.STALE),
        (OLD, {}, False, Fate.STALE),
        (OLD, None, False, Fate.STALE),
        (OLD, {"stale_after": None}, False, Fate.LEAVE),
        ({**OLD, "cancel_requested": True}, None, False, Fate.STALE),
        ({"progress_at": NOW - STALE_AFTER}, None, False, Fate.LEAVE),
        ({**OLD, "started_at": NOW - HOUR}, None, False, Fate.LEAVE),
        # Somebody has it.
        (ALIVE, {}, True, Fate.LEAVE),
        (ALIVE, FAIL, True, Fate.LEAVE),
        ({**ALIVE, **PENDING}, {}, True, Fate.LEAVE),
        ({**ALIVE, "resumes": 99}, {}, True, Fate.LEAVE),
        ({**ALIVE, "cancel_requested": True}, {}, True, Fate.LEAVE),
        ({**ALIVE, **OLD}, {}, True, Fate.STALE),
        ({**ALIVE, **OLD}, None, False, Fate.STALE),
        ({**ALIVE, **OLD}, {"stale_after": None}, True, Fate.LEAVE),
        ({**ALIVE, "created_at": NOW - 99 * HOUR, "progress_at": NOW - 60}, {}, True, Fate.LEAVE),
        ({**ALIVE, **OLD, "current_stage": "long"}, {"stages": (LONG,)}, True, Fate.LEAVE),
        ({**ALIVE, **OLD, "current_stage": "next"}, {"stages": (LONG,)}, True, Fate.STALE),
        # The control plane has it.
        ({"lease_until": None}, {}, True, Fate.LEAVE),
        ({"lease_until": None, **OLD}, FAIL, True, Fate.LEAVE),
    ],
)
def test_the_fate_of_a_run_follows_from_its_record(
    record: dict[str, Any], info: dict[str, Any] | None, runnable: bool, fate: Fate
) -> None:
    created = {"created_at": NOW - 9 * HOUR} if "progress_at" in record else {}
    declared = None if info is None else _info(**info)
    patience = Patience(max_resumes=20, slack=90.0)
    judged = fate_of(_record(**{**created, **record}), declared, NOW, patience, runnable=runnable)
    assert judged is fate


def test_the_holder_of_a_lease_has_some_time_more_to_end_a_stuck_run_itself() -> None:
    patience = Patience(max_resumes=20, slack=90.0)
    old = {"created_at": NOW - 9 * HOUR}
    for idle, fate in ((STALE_AFTER + 89, Fate.LEAVE), (STALE_AFTER + 91, Fate.STALE)):
        record = _record(**ALIVE, **old, progress_at=NOW - idle)
        assert fate_of(record, _info(), NOW, patience, runnable=True) is fate


# -- orphans ----------------------------------------------------------------------


@on_virtual_time
async def test_an_orphan_is_taken_up_when_its_lease_is_over_and_not_before() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(2.5)
        lost.freeze()
        done = {
            (stage, item.key)
            for stage in lost.news.stages
            for item in await store.items(job.id, stage, outcomes=(ItemOutcome.OK,))
        }
        lease_until = (await record_of(store, job.id)).lease_until
        assert lease_until is not None
        async with Process(store, "next") as there:
            await asyncio.sleep(lease_until - there.clock.now() - 0.1)
            assert there.journal.begun == []
            await asyncio.sleep(0.3)
            assert (await record_of(store, job.id)).owner == "next"
            ended = await there.manager.wait(job.id)
            assert ended.status is _S.COMPLETED
            assert done
            assert not done & set(there.journal.begun)


@on_virtual_time
async def test_a_manager_that_starts_takes_up_what_is_orphaned_at_once() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(0.5)
        lost.freeze()
        await asyncio.sleep(LEASE + 1)
        async with Process(store, "next") as there:
            assert list(there.manager._runs) == [job.id]


class SlowToTell(MemoryPipelineStore):
    """A sweep takes some time."""

    async def declared(self) -> list[PipelineInfo]:
        await asyncio.sleep(1)
        return await super().declared()


@on_virtual_time
async def test_a_lease_that_runs_out_in_the_midst_of_a_sweep_is_seen_by_the_next() -> None:
    store = SlowToTell()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(0.5)
        lost.freeze()
        lease_until = (await record_of(store, job.id)).lease_until
        assert lease_until is not None
        await asyncio.sleep(lease_until - lost.clock.now() - 0.5)
        async with Process(store, "next") as there:
            assert there.manager._runs == {}
            await asyncio.sleep(1)
            assert list(there.manager._runs) == [job.id]


@on_virtual_time
async def test_one_of_many_managers_takes_an_orphan_up() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(0.5)
        lost.freeze()
        others = [Process(store, f"next-{n}") for n in range(5)]
        for other in others:
            await other.manager.__aenter__()
        ended = await others[0].manager.wait(job.id)
        assert (ended.status, ended.resumes) == (_S.COMPLETED, 1)
        assert sum(bool(other.journal.begun) for other in others) == 1
        for other in others:
            await other.manager.shutdown()


@on_virtual_time
async def test_a_process_that_comes_back_finds_its_job_taken_and_writes_nothing_more() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost, Process(store, "next") as there:
        lost.journal.seconds = {"classify": 99 * HOUR}
        job = await lost.manager.start_job("news")
        await asyncio.sleep(1.5)
        lost.freeze()
        before, begun = len(lost.line.saves), len(lost.journal.begun)
        ended = await there.manager.wait(job.id)
        assert ended.status is _S.COMPLETED
        lost.line.mend()
        await asyncio.sleep(LEASE / 3 + 1)
        assert len(lost.line.saves) == before
        assert len(lost.journal.begun) == begun
        assert lost.journal.running == set()
        assert lost.manager._runs == {}
        assert await record_of(store, job.id) == ended


@on_virtual_time
async def test_a_job_that_was_recorded_and_never_run_is_run() -> None:
    store = MemoryPipelineStore()
    await store.create(
        PipelineRecord(
            id="one", trace_id="t", pipeline="news", created_at=NOW, config={"sources": ["a"]}
        )
    )
    async with Process(store) as here:
        ended = await here.manager.wait("one")
    assert (ended.status, ended.resumes) == (_S.COMPLETED, 0)


@on_virtual_time
async def test_a_job_that_another_manager_is_about_to_run_is_left_to_it() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "slow") as slow:
        job = await slow.manager.start_job("news")
        slow.freeze()
        async with Process(store, "next") as there:
            assert there.manager._runs == {}
            await asyncio.sleep(LEASE - 1)
            assert there.manager._runs == {}
            assert (await there.manager.wait(job.id)).status is _S.COMPLETED


@on_virtual_time
async def test_a_job_is_not_taken_up_for_ever() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "first", max_resumes=3) as first:
        first.journal.seconds = {"ingest": HOUR}
        job = await first.manager.start_job("news")
        await asyncio.sleep(1)
    for n in range(3):
        async with Process(store, f"next-{n}", max_resumes=3) as there:
            there.journal.seconds = {"ingest": HOUR}
            await asyncio.sleep(1)
            assert there.journal.begun
    assert (await record_of(store, job.id)).resumes == 3
    async with Process(store, "last", max_resumes=3) as last:
        assert last.journal.begun == []
    ended = await record_of(store, job.id)
    assert ended.status is _S.FAILED
    assert ended.errors[-1].message == "it was taken up 3 times, and never got to an end"


@on_virtual_time
async def test_an_orphan_of_a_pipeline_that_says_so_fails_in_the_seeds_words() -> None:
    store = MemoryPipelineStore()
    fails = {"on_orphan": "fail"}
    async with Process(store, "lost", definition=fails) as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(0.5)
        lost.freeze()
        async with Process(store, "next", definition=fails) as there:
            ended = await there.manager.wait(job.id)
            assert ended.status is _S.FAILED
            assert [error.message for error in ended.errors] == [WORDS]
            assert ended.finished_at is not None
            assert there.journal.begun == []
            last = (await store.events(job.id))[-1]
            assert last.kind is PipelineEventKind.JOB_COMPLETE


class LateToAnswer(MemoryPipelineStore):
    """Others see a job before its creator knows that it is recorded."""

    async def create(self, record: PipelineRecord, *, single_flight: bool = False) -> Any:
        made = await super().create(record, single_flight=single_flight)
        await asyncio.sleep(1)
        return made


@pytest.mark.parametrize("on_orphan", ["fail", "resume"])
@on_virtual_time
async def test_a_sweep_in_the_midst_of_a_start_does_no_harm(on_orphan: str) -> None:
    async with Process(LateToAnswer(), definition={"on_orphan": on_orphan}) as here:
        starting = asyncio.create_task(here.manager.start_job("news"))
        await asyncio.sleep(0.5)
        assert len(await here.manager.list_jobs()) == 1
        assert await here.manager.recover() == []
        assert await here.manager.cleanup_stale_jobs() == []
        job = await starting
        assert (await here.manager.wait(job.id)).status is _S.COMPLETED
        assert here.journal.begun.count(("brief", "")) == 1


@on_virtual_time
async def test_a_manager_that_comes_back_under_its_name_takes_its_jobs_up_at_once() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "same") as before:
        job = await before.manager.start_job("news")
        await asyncio.sleep(0.5)
        before.freeze()
        async with Process(store, "same") as again:
            await asyncio.sleep(0.1)
            assert again.journal.stages() == ["ingest"]
            assert (await again.manager.wait(job.id)).status is _S.COMPLETED


class MovesOn(MemoryPipelineStore):
    """A job gets on between the look at it and the verdict."""

    async def unfinished(self) -> list[PipelineRecord]:
        seen = await super().unfinished()
        for one in seen:
            await self.save(
                Save(job_id=one.id, fence=one.fence, at=one.created_at, current_stage="next")
            )
        return seen


@on_virtual_time
async def test_a_job_that_gets_on_just_before_it_is_ended_is_not_ended() -> None:
    store = MovesOn()
    async with Process(store) as here:
        begun = here.clock.now()
        await store.create(
            PipelineRecord(id="a", trace_id="a", pipeline="olds", created_at=begun - 9 * HOUR)
        )
        assert await here.manager.cleanup_stale_jobs() == []
        assert (await record_of(store, "a")).status is _S.PENDING


@on_virtual_time
async def test_a_sweep_that_goes_wrong_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:

        async def broken() -> list[str]:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(here.manager, "recover", broken)
            await asyncio.sleep(100)
        assert "a sweep failed" in caplog.text
        await store.create(
            PipelineRecord(
                id="a", trace_id="a", pipeline="news", config={"sources": ["a"]}, created_at=NOW
            )
        )
        assert (await here.manager.wait("a")).status is _S.COMPLETED


@on_virtual_time
async def test_a_cancelled_orphan_ends_cancelled_and_no_stage_of_it_runs() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(0.5)
        lost.freeze()
        async with Process(store, "next") as there:
            answer = await there.manager.cancel_job(job.id)
            assert (answer.accepted, answer.status) == (True, _S.RUNNING)
            ended = await there.manager.wait(job.id)
            assert (ended.status, ended.cancel_effective) == (_S.CANCELLED, True)
            assert there.journal.begun == []


@on_virtual_time
async def test_cancelling_a_job_that_nobody_runs_ends_it_at_once() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(0.5)
        lost.freeze()
        async with Process(store, "next") as there:
            there.manager._sweeping.cancel()  # type: ignore[union-attr]
            await asyncio.sleep(2 * LEASE)
            answer = await there.manager.cancel_job(job.id)
            assert (answer.accepted, answer.status) == (True, _S.CANCELLED)


# -- stale jobs -------------------------------------------------------------------


@on_virtual_time
async def test_an_orphan_whose_code_is_nowhere_fails_after_two_hours_without_progress() -> None:
    store = MemoryPipelineStore()
    clock = Process(store).clock
    begun = clock.now()
    for job_id in ("pending", "running"):
        await store.create(
            PipelineRecord(id=job_id, trace_id=job_id, pipeline="olds", created_at=begun)
        )
    await store.claim(Claim(job_id="running", owner="gone", now=begun + 60, lease_until=begun + 90))
    async with Process(store) as here:
        await asyncio.sleep(2 * HOUR - 1)
        for job_id in ("pending", "running"):
            assert not (await record_of(store, job_id)).is_final
        ended = {job_id: await here.manager.wait(job_id) for job_id in ("pending", "running")}
    for job_id, record in ended.items():
        assert record.status is _S.FAILED, job_id
        assert [error.message for error in record.errors] == [WORDS]
    assert ended["pending"].finished_at - begun == pytest.approx(2 * HOUR, abs=61)  # type: ignore[operator]
    assert ended["running"].finished_at - begun == pytest.approx(2 * HOUR + 60, abs=61)  # type: ignore[operator]


@on_virtual_time
async def test_cleanup_stale_jobs_names_what_it_ended_and_ends_it_once() -> None:
    store = MemoryPipelineStore()
    async with Process(store, sweep_every=99 * HOUR) as here:
        await store.create(
            PipelineRecord(id="a", trace_id="a", pipeline="olds", created_at=here.clock.now())
        )
        assert await here.manager.cleanup_stale_jobs() == []
        await asyncio.sleep(2 * HOUR + 1)
        assert await here.manager.cleanup_stale_jobs() == ["a"]
        assert await here.manager.cleanup_stale_jobs() == []


@on_virtual_time
async def test_a_healthy_long_job_is_never_touched() -> None:
    store = MemoryPipelineStore()
    async with (
        Process(store, lease=120.0) as here,
        Process(store, "another", lease=120.0) as other,
    ):
        here.journal.seconds = {"ingest": 1.5 * HOUR, "classify": 1.9 * HOUR, "brief": 1.9 * HOUR}
        job = await here.manager.start_job("news")
        ended = await other.manager.wait(job.id)
        assert ended.status is _S.COMPLETED
        assert ended.resumes == 0
        assert ended.finished_at - ended.created_at > 5 * HOUR  # type: ignore[operator]
        assert other.journal.begun == []
        assert len(here.journal.begun) == len(set(here.journal.begun))


@on_virtual_time
async def test_a_call_that_tells_of_its_progress_may_take_longer_than_two_hours() -> None:
    store, long = MemoryPipelineStore(), Definition("long")

    @long.step()
    async def one(ctx: Any) -> int:
        for part in range(50):
            await asyncio.sleep(600)
            ctx.progress(part / 50)
        return 1

    async with Process(store, pipelines=[long], lease=120.0) as here, Process(store, "another"):
        job = await here.manager.start_job("long")
        assert (await here.manager.wait(job.id)).status is _S.COMPLETED


@on_virtual_time
async def test_a_job_that_gets_nowhere_for_two_hours_is_stopped_and_then_fails() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        here.journal.seconds = {"classify": 99 * HOUR}
        job = await here.manager.start_job("news")
        ended = await here.manager.wait(job.id)
        assert ended.status is _S.FAILED
        assert WORDS in [error.message for error in ended.errors]
        assert here.journal.running == set()
        await asyncio.sleep(1)
        assert here.manager._runs == {}
        assert ended.finished_at - ended.created_at == pytest.approx(2 * HOUR, abs=90)  # type: ignore[operator]


@on_virtual_time
async def test_a_stale_limit_of_its_own_counts_and_none_means_never() -> None:
    for limit, status in ((600.0, _S.FAILED), (None, _S.COMPLETED)):
        async with Process(MemoryPipelineStore(), definition={"stale_after": limit}) as here:
            here.journal.seconds = {"classify": 3 * HOUR}
            job = await here.manager.start_job("news")
            assert (await here.manager.wait(job.id)).status is status


@on_virtual_time
async def test_a_stuck_job_that_does_not_watch_itself_is_ended_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Upkeep, "_look_at_time", lambda self: None)
    store = MemoryPipelineStore()
    async with Process(store) as here, Process(store, "another") as other:
        here.journal.seconds = {"classify": 99 * HOUR}
        job = await here.manager.start_job("news")
        ended = await other.manager.wait(job.id)
        assert ended.status is _S.FAILED
        assert [error.message for error in ended.errors] == [WORDS]
        assert ended.finished_at - ended.created_at > 2 * HOUR  # type: ignore[operator]
        await asyncio.sleep(LEASE + 10)
        assert here.journal.running == set()
        assert here.manager._runs == {}
        assert await record_of(store, job.id) == ended


@on_virtual_time
async def test_a_job_that_does_not_even_keep_its_lease_is_stopped_by_its_own_manager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def asleep(self: Upkeep) -> None:
        await asyncio.sleep(999 * HOUR)

    monkeypatch.setattr(Upkeep, "run", asleep)
    async with Process(MemoryPipelineStore()) as here:
        here.journal.seconds = {"classify": 99 * HOUR}
        job = await here.manager.start_job("news")
        ended = await here.manager.wait(job.id)
        assert ended.status is _S.FAILED
        assert WORDS in [error.message for error in ended.errors]
        assert here.journal.running == set()


@on_virtual_time
async def test_a_call_may_take_as_long_as_its_stage_allows() -> None:
    store, long = MemoryPipelineStore(), Definition("long")

    @long.step(timeout=5 * HOUR)
    async def one() -> int:
        await asyncio.sleep(4 * HOUR)
        return 1

    async with Process(store, pipelines=[long]) as here, Process(store, "another"):
        job = await here.manager.start_job("long")
        ended = await here.manager.wait(job.id)
    assert (ended.status, ended.resumes) == (_S.COMPLETED, 0)


@on_virtual_time
async def test_a_job_that_lay_idle_for_long_has_its_two_hours_from_when_it_is_taken_up() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(0.5)
        lost.freeze()
        await asyncio.sleep(9 * HOUR)
        async with Process(store, "next") as there, Process(store, "another"):
            assert (await there.manager.wait(job.id)).status is _S.COMPLETED


# -- a store that is lost ---------------------------------------------------------


@on_virtual_time
async def test_a_job_goes_on_when_its_store_is_back() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        job = await here.manager.start_job("news")
        await asyncio.sleep(1.5)
        here.line.failing = True
        await asyncio.sleep(10)
        assert here.line.refused
        here.line.failing = False
        ended = await here.manager.wait(job.id)
        assert (ended.status, ended.resumes) == (_S.COMPLETED, 0)
        assert len(here.journal.begun) == len(set(here.journal.begun))


@on_virtual_time
async def test_a_job_whose_store_is_gone_for_long_is_left_and_taken_up_when_it_is_back() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        job = await here.manager.start_job("news")
        await asyncio.sleep(1.5)
        here.line.failing = True
        await asyncio.sleep(HOUR)
        await asyncio.sleep(1)
        assert here.manager._runs == {}
        assert here.journal.running == set()
        left = await record_of(store, job.id)
        assert left.status is _S.RUNNING
        done = set(here.journal.ended)
        here.line.failing = False
        here.journal.begun.clear()
        ended = await here.manager.wait(job.id)
        assert (ended.status, ended.resumes) == (_S.COMPLETED, 1)
        assert ("ingest", "0") in done
        assert "ingest" not in here.journal.stages()


@on_virtual_time
async def test_a_job_whose_store_never_came_back_is_finished_by_the_next_process() -> None:
    store = MemoryPipelineStore()
    async with Process(store, "lost") as lost:
        job = await lost.manager.start_job("news")
        await asyncio.sleep(2.5)
        lost.line.failing = True
        await asyncio.sleep(HOUR)
        async with Process(store, "next") as there:
            assert (await there.manager.wait(job.id)).status is _S.COMPLETED
            assert there.journal.stages() == ["neutralize", "brief"]


@on_virtual_time
async def test_a_sweep_that_the_store_refuses_is_made_up_for_by_the_next() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        here.line.failing = True
        await asyncio.sleep(200)
        await store.create(
            PipelineRecord(
                id="a", trace_id="a", pipeline="news", config={"sources": ["a"]}, created_at=NOW
            )
        )
        here.line.failing = False
        assert (await here.manager.wait("a")).status is _S.COMPLETED
