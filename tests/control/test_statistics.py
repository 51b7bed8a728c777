"""Numbers over time: what is counted, when it ends, and what a restart keeps."""

from __future__ import annotations

import pytest
from tests.support.ledgers import MemoryLedger

from penstock.control import statistics
from penstock.control.statistics import Statistics
from penstock.core.job import JobResult
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.engine_api import FailureCount
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, accept, move

_E = JobEvent


class Bench:
    def __init__(self) -> None:
        self.store, self.clock = MemoryLedger(), VirtualClock(T0)
        self.statistics = Statistics(self.store, self.clock)
        self._stop = self.store.listen(self.statistics.hear)

    async def restart(self) -> None:
        self.statistics._seal()
        await self.statistics._keep()
        self._stop()
        self.statistics = Statistics(self.store, self.clock)
        await self.statistics.restore()
        self.statistics.restore_open(await self.store.unfinished())
        self._stop = self.store.listen(self.statistics.hear)


@run_async
async def test_open_jobs_are_counted_by_topic_and_state_also_after_a_restart() -> None:
    bench = Bench()
    await bench.store.apply(
        [accept("a"), accept("b"), accept("c", topic="job.other", tenant="acme")]
    )
    await bench.store.apply([move("a", _E.SCHEDULE, _E.DISPATCH)])
    for _ in range(2):
        assert bench.statistics.open_by_topic(None) == {
            "job.test": {JobState.PENDING: 1, JobState.DISPATCHED: 1},
            "job.other": {JobState.PENDING: 1},
        }
        assert bench.statistics.open_by_topic("acme") == {"job.other": {JobState.PENDING: 1}}
        await bench.restart()
    await bench.store.apply([move("b", _E.CANCEL), move("c", _E.CANCEL)])
    assert bench.statistics.open_by_topic("acme") == {}
    assert bench.statistics.open_by_topic(None) == {"job.test": {JobState.DISPATCHED: 1}}


@run_async
async def test_each_minute_says_what_was_unfinished_by_state() -> None:
    bench = Bench()
    await bench.store.apply([accept("a"), accept("b", tenant="acme")])
    bench.clock.advance(120)  # a minute in which nothing happens
    await bench.store.apply([move("a", _E.SCHEDULE, _E.DISPATCH)])
    bench.clock.advance(60)
    await bench.store.apply([move("a", _E.START), move("b", _E.CANCEL)])
    await bench.store.apply([move("a", _E.SUCCEED)])
    for _ in range(2):
        told = bench.statistics.timeline(5, None, None)
        assert [point.open for point in told.points] == [
            {},
            {JobState.PENDING: 2},
            {JobState.PENDING: 2},
            {JobState.PENDING: 1, JobState.DISPATCHED: 1},
            {},
        ]
        theirs = bench.statistics.timeline(3, "acme", None)
        assert [point.open for point in theirs.points] == [{JobState.PENDING: 1}] * 2 + [{}]
        assert theirs.total.open == {}
        await bench.restart()


@run_async
async def test_what_happened_since_the_start_adds_up_over_minutes() -> None:
    bench = Bench()
    await bench.store.apply([accept("a"), accept("b")])
    await bench.store.apply([move("a", _E.SCHEDULE, _E.DISPATCH)])
    bench.clock.advance(70)
    await bench.store.apply([move("b", _E.CANCEL)])
    await bench.store.apply([accept("c")])
    activity = bench.statistics.activity()
    assert (activity.submitted, activity.ended) == (3, {JobState.CANCELLED: 1})
    assert activity.failures == {"CANCELLED": 1}


@run_async
async def test_each_minute_has_its_own_numbers_and_a_restart_keeps_them() -> None:
    bench = Bench()
    await bench.store.apply([accept("a"), accept("b"), accept("c", tenant="acme")])
    await bench.store.apply([move("a", _E.SCHEDULE, _E.DISPATCH)])
    bench.clock.advance(60)
    await bench.store.apply([move("a", _E.START, at=T0 + 60), move("c", _E.CANCEL, at=T0 + 60)])
    await bench.store.apply([move("a", _E.SUCCEED, at=T0 + 61)])
    for _ in range(2):
        told = bench.statistics.timeline(3, None, None)
        assert [point.submitted for point in told.points] == [0, 3, 0]
        assert [point.started for point in told.points] == [0, 0, 1]
        assert told.points[2].ended == {JobState.SUCCEEDED: 1, JobState.CANCELLED: 1}
        assert told.points[1].wait_p50 is None
        assert 60 <= (told.points[2].wait_p99 or 0) <= 60 * 2**0.5
        assert (told.total.submitted, told.total.started) == (3, 1)
        assert bench.statistics.timeline(3, "acme", None).total.started == 0
        assert bench.statistics.timeline(3, None, "job.x*").total.submitted == 0
        await bench.restart()
    bench.clock.advance(statistics.KEPT_MINUTES * 60)
    assert bench.statistics.timeline(1440, None, None).total.submitted == 0
    await bench.statistics._keep()
    assert list(await bench.store.recall_all("minute/")) == []


@run_async
async def test_failures_are_counted_by_reason() -> None:
    bench = Bench()
    for n, code in enumerate(("ValueError", "ValueError", "TIMEOUT")):
        await bench.store.apply([accept(f"{n}"), move(f"{n}", _E.SCHEDULE, _E.DISPATCH)])
        result = JobResult(job_id=f"{n}", status=JobState.FAILED, attempt=1, error_code=code)
        await bench.store.apply([move(f"{n}", _E.START, _E.FAIL, result=result)])
    assert bench.statistics.timeline(1, None, None).failures == (
        FailureCount("job.test", "ValueError", 2),
        FailureCount("job.test", "TIMEOUT", 1),
    )


@run_async
async def test_too_many_topics_in_a_minute_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "_PAIRS", 2)
    bench = Bench()
    await bench.store.apply([accept(f"{n}", topic=f"job.t{n}") for n in range(5)])
    told = bench.statistics.timeline(1, None, None)
    assert told.total.submitted == 5
    assert len(bench.statistics._cells) == 3
    assert bench.statistics.timeline(1, None, "job.*").total.submitted == 2


@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.001, 0.0131, 1.0, 59.9, 86_400.0])
def test_a_waiting_time_is_rounded_up_by_less_than_half(seconds: float) -> None:
    told = statistics._quantile({statistics._step(seconds): 7}, 0.5)
    assert told is not None
    assert seconds <= told + 1e-6
    assert told <= max(0.001, seconds * 2**0.5 + 1e-6)
