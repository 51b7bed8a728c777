"""Cancelling a pipeline job: at each check of the seed's flowchart, within each stage, at any
moment, and against a finish."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.pipeline.pipeline_jobs import STAGES, Journal, news_shaped, on_virtual_time
from tests.support.pipeline.pipeline_runs import Place, turns

from penstock.core.ledger import Step
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.clock import VirtualLoop
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator
from penstock.workloads.pipeline.records import PipelineRecord, StageStatus

_S = PipelineJobStatus
EVERYTHING = {"enable_evaluation": True, "enable_auto_optimize": True}


# -- the flowchart ----------------------------------------------------------------


class Checks:
    """Cancels the run, as its worker would, just before a check of the orchestrator."""

    def __init__(self, place: Place, at: int | None = None) -> None:
        self.place, self.at, self.made = place, at, 0
        self._check = AsyncPipelineOrchestrator._check_cancelled

    async def __call__(self, orchestrator: AsyncPipelineOrchestrator) -> bool:
        self.made += 1
        if self.made == self.at:
            self.place.attempt.cancel_run()
            await turns()
        return await self._check(orchestrator)


async def _run_with(
    checks: Checks, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Journal, PipelineRecord]:
    async def check(self: AsyncPipelineOrchestrator) -> bool:
        return await checks(self)

    monkeypatch.setattr(AsyncPipelineOrchestrator, "_check_cancelled", check)
    journal = Journal()
    return journal, await checks.place.run(news_shaped(journal), config)


@pytest.mark.seed("002", "2.2", "8.2")
@pytest.mark.parametrize("check", range(1, 7))
@on_virtual_time
async def test_a_cancel_is_seen_at_each_of_the_six_checks(
    check: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(Place(), at=check)
    journal, ended = await _run_with(checks, EVERYTHING, monkeypatch)
    assert ended.status is _S.CANCELLED
    assert ended.finished_at is not None
    assert (ended.cancel_requested, ended.cancel_effective) == (True, True)
    assert ended.abandoned_items == ()
    done = STAGES[: check - 1]
    assert tuple(journal.stages()) == done
    assert all(ended.stage_progress[name].status is StageStatus.COMPLETED for name in done)
    assert checks.made == check


@pytest.mark.seed("002", "2.11")
@pytest.mark.parametrize(
    ("config", "made"), [({}, 4), ({"enable_evaluation": True}, 5), (EVERYTHING, 6)]
)
@on_virtual_time
async def test_there_is_a_check_before_each_stage_that_is_switched_on_and_no_other(
    config: dict[str, Any], made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = Checks(Place())
    _, ended = await _run_with(checks, config, monkeypatch)
    assert ended.status is _S.COMPLETED
    assert checks.made == made


def is_end(rows: Sequence[Step]) -> bool:
    """Whether these rows end a run."""
    return any(row.name == "run" and row.outcome for row in rows)


@pytest.mark.seed("002", "7.8")
@pytest.mark.parametrize("config", [{}, EVERYTHING])
@on_virtual_time
async def test_a_cancel_after_the_last_check_loses_and_the_record_says_so(
    config: dict[str, Any],
) -> None:
    place = Place()

    async def cancel(rows: Sequence[Step]) -> None:
        if is_end(rows):
            place.attempt.cancel_run()
            await turns()

    place.engine.before_message = cancel
    ended = await place.run(news_shaped(Journal()), config)
    assert ended.status is _S.COMPLETED
    assert (ended.cancel_requested, ended.cancel_effective) == (True, False)


@pytest.mark.seed("002", "8.3")
@pytest.mark.parametrize("stage", STAGES)
@on_virtual_time
async def test_a_cancel_within_an_item_ends_the_item_and_then_the_job(stage: str) -> None:
    place, journal = Place(), Journal()
    journal.seconds = {stage: 600.0}
    attempt = await place.begin(news_shaped(journal), EVERYTHING)
    await journal.reached(stage)
    attempt.cancel_run()
    ended = await attempt.task
    assert journal.running == set()
    assert journal.stages() == list(STAGES[: STAGES.index(stage) + 1])
    assert (ended.status, ended.cancel_effective) == (_S.CANCELLED, True)
    assert ended.finished_at is not None
    assert ended.finished_at - ended.created_at < 20
    assert ended.summary is not None
    assert ended.summary.status is _S.CANCELLED


# -- flags ------------------------------------------------------------------------


@pytest.mark.seed("002", "7.5")
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
    journal = Journal()
    ended = await Place().run(news_shaped(journal), config)
    assert ended.status is _S.COMPLETED
    assert journal.stages() == [name for name in STAGES if name not in skipped]
    for stage in ended.stages:
        expected = StageStatus.SKIPPED if stage.name in skipped else StageStatus.COMPLETED
        assert (stage.status, stage.reason) == (expected, skipped.get(stage.name, ""))
        assert stage.counted is (stage.name not in skipped)


@on_virtual_time
async def test_optimization_is_skipped_when_evaluation_failed_and_that_counts() -> None:
    journal = Journal()
    journal.failing = {("evaluation", "")}
    ended = await Place().run(news_shaped(journal), EVERYTHING)
    last = ended.stage_progress["optimization"]
    assert (last.status, last.reason, last.counted) == (
        StageStatus.SKIPPED,
        "evaluation_failed",
        True,
    )
    assert ended.status is _S.PARTIAL


# -- cancel against finish --------------------------------------------------------


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

    async def run(self, seconds: float | None, steps: int) -> PipelineRecord:
        """The record at the end, where a cancel comes after so many seconds, or with the write
        that is to end the run, and then so many steps of the loop."""
        place, ending = Place(), asyncio.Event()

        async def slow(rows: Sequence[Step]) -> None:
            if is_end(rows):
                ending.set()
            await turns(self.chance.randint(0, 8))

        place.engine.before_message = slow
        attempt = await place.begin(self.news, self.config)
        attempt.task.add_done_callback(lambda _: self._heard())
        await (ending.wait() if seconds is None else asyncio.sleep(seconds))
        await turns(steps)
        if not attempt.task.done():
            attempt.cancel_run()
        record = await attempt.task
        await asyncio.sleep(30)
        assert await place.record() == record
        return record

    def _heard(self) -> None:
        self.ended = True
        assert not self.running


def _moment(seed: int) -> tuple[float | None, int]:
    """Anywhere in the life of a run, and as often around its very end."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        return None, chance.randint(0, 40)
    return chance.choice([0.0, 0.0, 0.005, 0.01, 1.0, 1.01, 2.0]), chance.randint(0, 80)


def race_of(seed: int) -> tuple[bool, bool]:
    """Whether a cancel was requested, and whether it won; all that must hold holds."""
    race, loop = Race(random.Random(seed)), VirtualLoop()
    try:
        record = loop.run_until_complete(race.run(*_moment(seed)))
    finally:
        loop.close()
    where = f"seed {seed}: {record.status}"
    won = record.status is _S.CANCELLED
    assert record.cancel_effective is (won if record.cancel_requested else None), where
    assert record.cancel_requested or not won, where
    assert record.finished_at is not None, where
    assert all(stage.is_final for stage in record.stages), where
    assert record.summary is not None, where
    assert record.summary.status is record.status, where
    assert race.after_the_end == [], where
    assert race.running == 0, where
    return record.cancel_requested, won


@pytest.mark.seed("002", "8.6")
@pytest.mark.parametrize("block", range(3))
def test_a_cancel_and_a_finish_have_one_winner_and_everybody_says_the_same(block: int) -> None:
    ends = {race_of(seed) for seed in range(100 * block, 100 * (block + 1))}
    assert ends == {(True, True), (True, False), (False, False)}, "badly chosen moments"
