"""`penstock.testing.InMemoryEngine`: an engine for tests, whose clock can be stepped."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.testing import InMemoryEngine
from penstock.testing.aio import run_async
from penstock.testing.clock import SteppedLoop

app = penstock.App()
NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
ran: list[str] = []


@app.job("job.report")
def report(name: str) -> str:
    ran.append(name)
    return f"report on {name}"


@app.job("job.nap", timeout=7200)
async def nap(hours: float) -> str:
    await asyncio.sleep(hours * 3600)
    return "rested"


@app.job("job.flaky", retries=penstock.RetryPolicy(retries=3, delay=60, jitter=0))
async def flaky(failures: int) -> str:
    ran.append("try")
    if len(ran) <= failures:
        raise ConnectionError("try again")
    return "done"


@app.job("job.wait", timeout=60, ctx=True)
def wait_for_cancel(ctx: penstock.Context) -> bool:
    return ctx.cancel.wait(50)


@app.job("job.parent")
def parent(name: str) -> str:
    return report.options(delay=600).submit(name).result() + ", by its parent"


@app.job("job.aparent")
async def aparent(name: str) -> str:
    return await (await report.options(delay=600).asubmit(name)) + ", by its parent"


@pytest.fixture
def engine() -> Iterator[InMemoryEngine]:
    ran.clear()
    with InMemoryEngine(app, start=NOON) as engine:
        yield engine


def states(engine: InMemoryEngine, **query: str) -> list[str]:
    return [job.record.state.value for job in engine.jobs(**query)]


# -- time -------------------------------------------------------------------------


def test_a_delayed_job_runs_when_its_time_is_stepped_to(engine: InMemoryEngine) -> None:
    job = report.options(delay=3600).submit("x")
    engine.step(minutes=59)
    assert (job.state, ran) == (penstock.JobState.SCHEDULED, [])
    engine.step(minutes=1)
    assert job.state is penstock.JobState.SUCCEEDED
    assert job.result() == "report on x"


def test_a_step_takes_no_time(engine: InMemoryEngine) -> None:
    nap.submit(1)
    report.options(delay=40 * 86400).submit("x")
    began = time.process_time()
    engine.step(days=50)
    assert ran == ["x"]
    assert time.process_time() - began < 2


def test_the_clock_begins_where_it_is_told_and_records_follow_it(engine: InMemoryEngine) -> None:
    assert NOON <= engine.now < NOON + dt.timedelta(minutes=1)
    engine.step(days=1, hours=2)
    job = report.submit("x")
    job.result()
    assert dt.timedelta(hours=26) <= engine.now - NOON < dt.timedelta(hours=27)
    finished = dt.datetime.fromtimestamp(job.refresh().finished_at or 0, dt.UTC)
    assert dt.timedelta(hours=26) <= finished - NOON < dt.timedelta(hours=27)


def test_a_start_without_a_time_zone_is_refused() -> None:
    with pytest.raises(penstock.InvalidRequest, match="time zone"):
        InMemoryEngine(app, start=dt.datetime(2026, 1, 1))


def test_time_does_not_go_back(engine: InMemoryEngine) -> None:
    with pytest.raises(penstock.InvalidRequest, match="does not go back"):
        engine.step(hours=-1)


def test_what_needs_no_time_needs_no_step(engine: InMemoryEngine) -> None:
    assert report.submit("x").result(timeout=10) == "report on x"


def test_a_job_that_sleeps_goes_on_when_time_is_stepped(engine: InMemoryEngine) -> None:
    job = nap.submit(1.5)
    engine.step(hours=1)
    assert job.state is penstock.JobState.RUNNING
    engine.step(hours=1)
    assert job.result() == "rested"


def test_a_running_job_is_not_lost_by_a_step(engine: InMemoryEngine) -> None:
    job = nap.options(timeout=90_000).submit(24)
    engine.step(hours=23)
    assert (job.state, job.refresh().attempt) == (penstock.JobState.RUNNING, 1)
    engine.step(hours=1)
    assert [entry.event for entry in job.history()][-2:] == ["start", "succeed"]


def test_a_job_times_out_when_its_time_is_over_not_when_the_step_ends(
    engine: InMemoryEngine,
) -> None:
    job = nap.submit(3)
    engine.step(hours=8)
    assert job.refresh().state is penstock.JobState.TIMEOUT
    assert job.record.result is not None
    assert job.record.result.execution_ms == pytest.approx(7_200_000, abs=100)


def test_a_thread_that_waits_is_timed_out_within_the_step(engine: InMemoryEngine) -> None:
    job = wait_for_cancel.submit()
    engine.step(minutes=2)
    assert job.state is penstock.JobState.TIMEOUT


def test_a_step_waits_for_a_job_that_needs_real_time() -> None:
    slow = penstock.App()

    @slow.job("job.slow", timeout=60)
    def work() -> None:
        time.sleep(0.2)

    with InMemoryEngine(slow, patience=20) as engine:
        job = work.submit()
        engine.step(hours=1)
        assert job.state is penstock.JobState.SUCCEEDED


def test_a_step_waits_for_a_job_that_reads_a_socket() -> None:
    reading = penstock.App()
    here, there = socket.socketpair()
    here.setblocking(False)

    @reading.job("job.read", timeout=60)
    async def read() -> str:
        return (await asyncio.get_running_loop().sock_recv(here, 5)).decode()

    with here, there, InMemoryEngine(reading, patience=5) as engine:
        job = engine.submit("job.read")
        answer = threading.Timer(0.1, there.send, (b"hello",))
        answer.start()
        engine.step(hours=1)
        assert job.result(timeout=5) == "hello"
        answer.join()


def test_retries_follow_their_back_off(engine: InMemoryEngine) -> None:
    job = flaky.submit(3)
    engine.step(seconds=50)
    assert len(ran) == 1
    engine.step(seconds=11)
    assert len(ran) == 2
    engine.step(seconds=120)
    assert len(ran) == 3
    engine.step(seconds=240)
    assert job.result() == "done"


def test_one_step_carries_a_chain_of_retries_to_its_end(engine: InMemoryEngine) -> None:
    job = flaky.submit(3)
    engine.step(hours=1)
    assert job.result() == "done"
    assert len(ran) == 4


def test_a_schedule_fires_at_each_of_its_times(engine: InMemoryEngine) -> None:
    request = engine.request("job.report", {"name": "hourly"})
    engine.schedules.put(penstock.Schedule(name="hourly", cron="@hourly", request=request))
    engine.step(hours=24)
    assert ran == ["hourly"] * 24
    fired = sorted(job.record.accepted_at for job in engine.jobs(topic="job.report"))
    offsets = [at - (NOON.timestamp() + 3600 * n) for n, at in enumerate(fired, 1)]
    assert all(0 <= offset < 1 for offset in offsets), offsets


def test_a_deadline_passes_before_what_comes_later(engine: InMemoryEngine) -> None:
    before = nap.submit(1)
    deadline = engine.now + dt.timedelta(minutes=10)
    late = report.options(after=before, deadline=deadline).submit("late")
    engine.step(hours=2)
    assert (before.state, late.state) == (penstock.JobState.SUCCEEDED, penstock.JobState.CANCELLED)
    assert ran == []


def test_a_rate_limit_follows_the_clock(engine: InMemoryEngine) -> None:
    rate = penstock.Rate(count=1, per=60)
    engine.limits.put(penstock.Limit(name="slowly", rate=rate))
    jobs = [report.submit(str(n)) for n in range(5)]
    engine.step(seconds=90)
    assert len(ran) == 2
    engine.step(minutes=5)
    assert [job.result() for job in jobs] == [f"report on {n}" for n in range(5)]


@pytest.mark.parametrize("topic", ["job.parent", "job.aparent"])
def test_a_parent_waits_for_a_child_across_a_step(topic: str) -> None:
    with InMemoryEngine(app, start=NOON, patience=50) as engine:
        job = engine.submit(topic, {"name": "x"})
        began = time.monotonic()
        engine.step(minutes=11)
        assert job.result() == "report on x, by its parent"
        assert time.monotonic() - began < 40, "it waited for the thread of a job that waits"


def test_two_steps_at_once_are_refused(engine: InMemoryEngine) -> None:
    wait_for_cancel.submit()
    errors: list[BaseException] = []

    def step() -> None:
        try:
            engine.step(seconds=1)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=step) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == ["the clock is being stepped already"]


# -- drain ------------------------------------------------------------------------


def test_drain_lets_time_pass_until_every_job_has_ended(engine: InMemoryEngine) -> None:
    nap.submit(1)
    flaky.submit(9)
    report.options(delay=7200).submit("x")
    engine.drain()
    assert engine.now - NOON < dt.timedelta(hours=3)
    assert sorted(states(engine)) == ["FAILED", "SUCCEEDED", "SUCCEEDED"]
    assert Counter(ran) == {"try": 4, "x": 1}


def test_drain_says_what_did_not_end(engine: InMemoryEngine) -> None:
    job = report.options(delay=10 * 86400).submit("x")
    with pytest.raises(penstock.WaitTimedOut, match=f"{job.job_id}: delayed"):
        engine.drain(days=3)
    assert engine.now - NOON >= dt.timedelta(days=3)


# -- the engine -------------------------------------------------------------------


def test_two_engines_know_nothing_of_each_other(engine: InMemoryEngine) -> None:
    report.submit("x").result()
    with InMemoryEngine(app) as other:
        assert other.jobs() == []
        report.submit("y").result()
        assert len(other.jobs()) == 1
    assert report.submit("z").result() == "report on z", "the first is bound again"
    assert len(engine.jobs()) == 2


def test_settings_are_given_by_name_and_none_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text("concurrency = 7\n")
    monkeypatch.setenv("PENSTOCK_CONCURRENCY", "8")
    with InMemoryEngine(app) as engine:
        assert engine.workers()[0].slots == 32
    with InMemoryEngine(app, concurrency=2) as engine:
        assert engine.workers()[0].slots == 2


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(penstock.PenstockError, match="concurency"):
        InMemoryEngine(app, concurency=2).start()
    assert not app.is_running


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    threads = threading.active_count()
    with InMemoryEngine(app) as engine:
        report.submit("x" * 10_000).result()
        assert engine.url == ""
    assert os.listdir(tmp_path) == []
    assert threading.active_count() == threads, threading.enumerate()


def test_a_job_that_runs_is_ended_when_the_engine_is_closed() -> None:
    ended = []
    other = penstock.App()

    @other.job("job.long")
    async def long() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("async")

    @other.job("job.thread", ctx=True)
    def thread(ctx: penstock.Context) -> None:
        ctx.cancel.wait(50)
        ended.append("thread")

    began = time.monotonic()
    with InMemoryEngine(other, patience=0.1) as engine:
        jobs = [long.submit(), thread.submit()]
        engine.step(seconds=1)
        assert [job.state for job in jobs] == [penstock.JobState.RUNNING] * 2
    assert sorted(ended) == ["async", "thread"]
    assert time.monotonic() - began < 8


def test_it_can_be_started_and_closed_without_with() -> None:
    engine = InMemoryEngine(app).start()
    with pytest.raises(RuntimeError, match="started already"):
        engine.start()
    assert report.submit("x").result() == "report on x"
    engine.close()
    engine.close()
    assert not app.is_running


@run_async
async def test_it_is_used_in_async_tests() -> None:
    async with InMemoryEngine(app) as engine:
        job = await report.options(delay=60).asubmit("x")
        await engine.astep(minutes=1)
        assert await job == "report on x"
        await nap.asubmit(1)
        await engine.adrain()
        assert [job.record.state for job in await engine.ajobs()] == ["SUCCEEDED"] * 2


# -- the loop ---------------------------------------------------------------------


def stepped(seconds: float, loop: SteppedLoop, work: object) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        await asyncio.sleep(0)
        await loop.step(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(main())


def test_a_step_goes_from_timer_to_timer_in_order() -> None:
    seen: list[tuple[str, float]] = []
    loop = SteppedLoop()
    begin = loop.time()

    async def every(name: str, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            seen.append((name, round(loop.time() - begin, 1)))

    async def both() -> None:
        await asyncio.gather(every("a", 20), every("b", 35))

    stepped(65, loop, both())
    loop.close()
    assert seen == [("a", 20), ("b", 35), ("a", 40), ("a", 60)]


def test_a_step_does_not_stop_for_who_polls() -> None:
    looks: list[float] = []
    loop = SteppedLoop(polling={"poller"})

    async def poll() -> None:
        while True:
            await asyncio.sleep(1)
            looks.append(loop.time())

    async def work() -> None:
        asyncio.current_task().set_name("poller")  # type: ignore[union-attr]
        await poll()

    stepped(1e6, loop, work())
    loop.close()
    assert len(looks) <= 2
