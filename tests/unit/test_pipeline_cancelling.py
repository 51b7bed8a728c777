"""Cancelling a pipeline job: at each check of the seed's flowchart, within each stage, at any
moment, and against a finish."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any

import pytest
from tests.unit.pipeline_jobs import STAGES, Process, on_virtual_time, record_of

from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.testing.clock import VirtualLoop
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator
from penstock.workloads.pipeline.records import PipelineEventKind, PipelineRecord, StageStatus
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.store import CancelAnswer, Save

_S = PipelineJobStatus
EVERYTHING = {"enable_evaluation": True, "enable_auto_optimize": True}


# -- the flowchart ----------------------------------------------------------------


class Checks:
    """Marks the row, as somebody else would, just before a check of the orchestrator reads it."""

    def __init__(self, store: MemoryPipelineStore, at: int | None = None) -> None:
        self.store, self.at, self.made = store, at, 0
        self._check = AsyncPipelineOrchestrator._check_cancelled

    async def __call__(self, orchestrator: AsyncPipelineOrchestrator) -> bool:
        self.made += 1
        if self.made == self.at:
            (job,) = await self.store.unfinished()
            await self.store.request_cancel(job.id, job.created_at + 100)
        return await self._check(orchestrator)


async def _run_with(
    checks: Checks, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Process, PipelineRecord]:
    async def check(self: AsyncPipelineOrchestrator) -> bool:
        return await checks(self)

    monkeypatch.setattr(AsyncPipelineOrchestrator, "_check_cancelled", check)
    async with Process(checks.store) as here:
        job = await here.manager.start_job("news", config)
        return here, await here.manager.wait(job.id)


@pytest.mark.parametrize("check", range(1, 7))
@on_virtual_time
async def test_a_cancel_is_seen_at_each_of_the_six_checks(
    check: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(MemoryPipelineStore(), at=check)
    here, ended = await _run_with(checks, EVERYTHING, monkeypatch)
    assert ended.status is _S.CANCELLED
    assert ended.finished_at is not None
    assert (ended.cancel_requested, ended.cancel_effective) == (True, True)
    assert ended.abandoned_items == ()
    done = STAGES[: check - 1]
    assert tuple(here.journal.stages()) == done
    assert all(ended.stage_progress[name].status is StageStatus.COMPLETED for name in done)
    assert checks.made == check


@pytest.mark.parametrize(
    ("config", "made"), [({}, 4), ({"enable_evaluation": True}, 5), (EVERYTHING, 6)]
)
@on_virtual_time
async def test_there_is_a_check_before_each_stage_that_is_switched_on_and_no_other(
    config: dict[str, Any], made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(MemoryPipelineStore())
    _, ended = await _run_with(checks, config, monkeypatch)
    assert ended.status is _S.COMPLETED
    assert checks.made == made


@pytest.mark.parametrize("config", [{}, EVERYTHING])
@on_virtual_time
async def test_a_cancel_after_the_last_check_loses_and_the_record_says_so(
    config: dict[str, Any],
) -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        job = await here.manager.start_job("news", config)
        answers: list[CancelAnswer] = []

        async def ask(save: Save) -> None:
            if save.event is PipelineJobEvent.COMPLETE:
                answers.append(await store.request_cancel(job.id, here.clock.now()))

        here.line.before_save = ask
        ended = await here.manager.wait(job.id)
    assert answers == [CancelAnswer(True, _S.RUNNING)]
    assert ended.status is _S.COMPLETED
    assert (ended.cancel_requested, ended.cancel_effective) == (True, False)


@on_virtual_time
async def test_the_answer_to_a_cancel_that_lost_is_the_end_that_won() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        job = await here.manager.start_job("news")
        asking: list[asyncio.Task[CancelAnswer]] = []

        async def ask(save: Save) -> None:
            if save.event is PipelineJobEvent.COMPLETE:
                asking.append(asyncio.create_task(here.manager.cancel_job(job.id)))
                await asyncio.sleep(0.1)

        here.line.before_save = ask
        await here.manager.wait(job.id)
        answer = await asking[0]
    assert (answer.accepted, answer.status) == (False, _S.COMPLETED)
    assert answer.reason == "it ended COMPLETED first"


@pytest.mark.parametrize("stage", STAGES)
@on_virtual_time
async def test_a_cancel_within_an_item_ends_the_item_and_then_the_job(stage: str) -> None:
    async with Process(MemoryPipelineStore()) as here:
        here.journal.seconds = {stage: 600.0}
        job = await here.manager.start_job("news", EVERYTHING)
        await here.journal.reached(stage)
        answer = await here.manager.cancel_job(job.id)
        assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
        assert here.journal.running == set()
        ended = await here.manager.get_job(job.id)
        assert here.journal.stages() == list(STAGES[: STAGES.index(stage) + 1])
    assert ended.finished_at is not None
    assert ended.cancel_effective is True
    assert ended.finished_at - ended.created_at < 20
    assert ended.summary is not None
    assert ended.summary.status is _S.CANCELLED


@pytest.mark.parametrize("stage", STAGES)
@on_virtual_time
async def test_a_cancel_that_another_process_marks_is_learnt_within_the_lease(stage: str) -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here, Process(store, "another") as other:
        here.journal.seconds = {stage: 600.0}
        job = await here.manager.start_job("news", EVERYTHING)
        await here.journal.reached(stage)
        asked = here.clock.now()
        answer = await other.manager.cancel_job(job.id)
        assert (answer.accepted, answer.status) == (True, _S.RUNNING)
        ended = await other.manager.wait(job.id)
        assert (ended.status, ended.cancel_effective) == (_S.CANCELLED, True)
        assert ended.finished_at is not None
        assert ended.finished_at - asked < 30.0
        assert here.journal.running == set()


# -- before, twice, after ---------------------------------------------------------


@on_virtual_time
async def test_a_cancel_before_the_task_starts_ends_the_job_with_its_time() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        answer = await here.manager.cancel_job(job.id)
        assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
        ended = await here.manager.get_job(job.id)
        assert ended.finished_at is not None
        assert ended.started_at is None
        await asyncio.sleep(60)
        assert here.journal.begun == []
        assert await here.manager.get_job(job.id) == ended
        kinds = [event.kind async for event in here.manager.events(job.id)]
    assert kinds == [PipelineEventKind.JOB_COMPLETE]


@on_virtual_time
async def test_a_cancelled_job_makes_room_for_the_next() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        await asyncio.sleep(0.5)
        await here.manager.cancel_job(job.id)
        again = await here.manager.start_job("news")
        assert (await here.manager.wait(again.id)).status is _S.COMPLETED


@on_virtual_time
async def test_two_cancels_at_once_have_the_same_answer_and_a_third_comes_too_late() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        await asyncio.sleep(0.5)
        both = await asyncio.gather(
            here.manager.cancel_job(job.id), here.manager.cancel_job(job.id)
        )
        assert both == [CancelAnswer(True, _S.CANCELLED)] * 2
        ended = await here.manager.get_job(job.id)
        third = await here.manager.cancel_job(job.id)
        assert (third.accepted, third.status) == (False, _S.CANCELLED)
        assert third.reason
        assert await here.manager.get_job(job.id) == ended


@on_virtual_time
async def test_a_job_that_has_ended_is_not_cancelled() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        ended = await here.manager.wait(job.id)
        answer = await here.manager.cancel_job(job.id)
        assert (answer.accepted, answer.status) == (False, _S.COMPLETED)
        assert answer.reason
        assert await here.manager.get_job(job.id) == ended


@on_virtual_time
async def test_an_impatient_canceller_is_told_that_the_job_still_stops() -> None:
    slow = Definition("slow", cancel_grace=20.0)
    stopped = []

    @slow.step()
    async def tidy() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(3)
            stopped.append(True)
            raise

    async with Process(MemoryPipelineStore(), pipelines=[slow]) as here:
        job = await here.manager.start_job("slow")
        await asyncio.sleep(1)
        answer = await here.manager.cancel_job(job.id, timeout=0.1)
        assert (answer.accepted, answer.status) == (True, _S.RUNNING)
        assert stopped == []
        answer = await here.manager.cancel_job(job.id)
        assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
        assert stopped == [True]


@on_virtual_time
async def test_a_call_that_looks_for_the_cancel_may_end_by_itself() -> None:
    polite = Definition("polite", cancel_grace=10.0)
    left: list[str] = []

    @polite.step()
    async def steps(ctx: Any) -> None:
        for _ in range(600):
            await asyncio.sleep(0.1)
            if ctx.cancelled():
                break
        left.append("in order")

    async with Process(MemoryPipelineStore(), pipelines=[polite]) as here:
        job = await here.manager.start_job("polite")
        await asyncio.sleep(2.5)
        answer = await here.manager.cancel_job(job.id)
    assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
    assert left == ["in order"]


@on_virtual_time
async def test_what_will_not_stop_is_reported() -> None:
    store, stuck = MemoryPipelineStore(), Definition("stuck", cancel_grace=2.0)
    go = asyncio.Event()

    @stuck.map(over="items", key=str)
    async def deaf(item: str) -> None:
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()

    async with Process(store, pipelines=[stuck]) as here:
        job = await here.manager.start_job("stuck", {"items": ["x"]})
        await asyncio.sleep(1)
        answer = await here.manager.cancel_job(job.id)
        ended = await record_of(store, job.id)
        go.set()
        await asyncio.sleep(1)
    assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
    assert ended.abandoned_items == ("deaf/x",)


# -- flags ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluate", "optimize", "skipped"),
    [
        (True, True, {}),
        (True, False, {"optimization": "disabled"}),
        (False, False, {"evaluation": "disabled", "optimization": "disabled"}),
        (False, True, {"evaluation": "disabled", "optimization": "evaluation_disabled"}),
    ],
)
@on_virtual_time
async def test_what_is_switched_off_is_skipped_with_its_reason_and_not_counted(
    evaluate: bool, optimize: bool, skipped: dict[str, str]
) -> None:
    config = {"enable_evaluation": evaluate, "enable_auto_optimize": optimize}
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news", config)
        ended = await here.manager.wait(job.id)
    assert ended.status is _S.COMPLETED
    assert here.journal.stages() == [name for name in STAGES if name not in skipped]
    for stage in ended.stages:
        expected = StageStatus.SKIPPED if stage.name in skipped else StageStatus.COMPLETED
        assert (stage.status, stage.reason) == (expected, skipped.get(stage.name, ""))
        assert stage.counted is (stage.name not in skipped)


@on_virtual_time
async def test_optimization_is_skipped_when_evaluation_failed_and_that_counts() -> None:
    async with Process(MemoryPipelineStore()) as here:
        here.journal.failing = {("evaluation", "")}
        job = await here.manager.start_job("news", EVERYTHING)
        ended = await here.manager.wait(job.id)
    last = ended.stage_progress["optimization"]
    assert (last.status, last.reason, last.counted) == (
        StageStatus.SKIPPED,
        "evaluation_failed",
        True,
    )
    assert ended.status is _S.PARTIAL


# -- cancel against finish --------------------------------------------------------


class SlowStore(MemoryPipelineStore):
    """Its writes take some steps of the loop, as those to a file do."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def _turn(self) -> None:
        for _ in range(self._chance.randint(0, 8)):
            await asyncio.sleep(0)
        await super()._turn()


class Race:
    """One run and one cancel, at a moment between two steps of the loop."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.running = 0
        self.after_the_end: list[str] = []
        self.ended = False
        self.news = Definition("race", cancel_grace=chance.choice([0.0, 1.0, 5.0]))
        self.build()

    def build(self) -> None:
        chance, news = self.chance, self.news
        self.config = {"items": [str(n) for n in range(chance.randint(0, 4))]}

        @news.map(over="items", key=str, concurrency=chance.randint(1, 3))
        async def first(item: str) -> str:
            await self.work(f"first/{item}")
            return item

        @news.map(over=first)
        async def second(item: str) -> str:
            await self.work(f"second/{item}")
            return item

        @news.step()
        async def third() -> int:
            await self.work("third")
            return 3

    async def work(self, what: str) -> None:
        if self.ended:
            self.after_the_end.append(what)
        self.running += 1
        try:
            for _ in range(self.chance.randint(0, 4)):
                await asyncio.sleep(self.chance.choice([0, 0, 0, 0.01, 1.0]))
                if self.ended:
                    self.after_the_end.append(what)
            if self.chance.random() < 0.1:
                raise ValueError(what)
        finally:
            self.running -= 1

    async def run(self, seconds: float | None, steps: int) -> tuple[PipelineRecord, CancelAnswer]:
        """The record at the end and the answer to a cancel that comes after so many seconds,
        or with the write that is to end the job, and then so many steps of the loop."""
        store = SlowStore(self.chance)
        store.listen(lambda ids: self._heard(store))
        async with Process(store, pipelines=[self.news]) as here:
            job = await here.manager.start_job("race", self.config)
            waiting = asyncio.create_task(here.manager.wait(job.id))
            ending = here.line.when_ending()
            await (ending if seconds is None else asyncio.sleep(seconds))
            for _ in range(steps):
                await asyncio.sleep(0)
            answer = await here.manager.cancel_job(job.id)
            record = await waiting
            await asyncio.sleep(30)
            assert await here.manager.get_job(job.id) == record
            assert here.manager._runs == {}
        return record, answer

    def _heard(self, store: MemoryPipelineStore) -> None:
        for record in store._runs.values():
            if record.is_final and not self.ended:
                self.ended = True
                assert record.status is not _S.CANCELLED or not self.running


def _virtually(coroutine: Any) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def _moment(seed: int) -> tuple[float | None, int]:
    """Anywhere in the life of a run, and as often around its very end."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        return None, chance.randint(0, 12)
    return chance.choice([0.0, 0.0, 0.005, 0.01, 1.0, 1.01, 2.0]), chance.randint(0, 80)


def race_of(seed: int) -> tuple[bool, bool]:
    """Whether a cancel was marked, and whether it won; all that must hold holds."""
    race = Race(random.Random(seed))
    record, answer = _virtually(race.run(*_moment(seed)))
    where = f"seed {seed}: {answer}, {record.status}"
    won = record.status is _S.CANCELLED
    assert answer.accepted is won, where
    assert answer.status is record.status, where
    assert bool(answer.reason) is not won, where
    assert record.cancel_effective is (won if record.cancel_requested else None), where
    assert record.cancel_requested or not won, where
    assert record.finished_at is not None, where
    assert race.after_the_end == [], where
    assert race.running == 0, where
    return record.cancel_requested, won


@pytest.mark.parametrize("block", range(10))
def test_a_cancel_and_a_finish_have_one_winner_and_everybody_says_the_same(block: int) -> None:
    ends = {race_of(seed) for seed in range(100 * block, 100 * (block + 1))}
    assert ends == {(True, True), (True, False), (False, False)}, "badly chosen moments"
