"""What callers see when a part of the engine fails, and what a bad job costs the others."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.adapters.files import start_log
from penstock.adapters.files.start_log import FileStartLog
from penstock.control.ledger import Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.control.scheduler import Scheduler
from penstock.control.schedules import ScheduleRunner
from penstock.core.errors import JobFailed, NotRunning, StoreFailed, Unavailable
from penstock.core.job import Job
from penstock.testing.aio import run_async

PATIENCE = 30.0
"""Seconds that only a broken engine needs."""


def an_app() -> penstock.App:
    app = penstock.App()

    @app.job("job.double")
    async def double(n: int) -> int:
        return 2 * n

    @app.job("job.never")
    async def never() -> None:
        await asyncio.sleep(3600)

    @app.job("job.odd")
    async def odd() -> None:
        kind = type("Odd", (Exception,), {"__module__": "m\udcff"})
        raise kind("odd")

    return app


@pytest.fixture(autouse=True)
def _quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that never ends is not waited for."""
    monkeypatch.setenv("PENSTOCK_TIMEOUTS__DRAIN", "0.1")


# -- the store -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fetch", "recall"])
def test_an_engine_goes_on_after_a_read_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    read, failures = getattr(Ledger, method), [StoreFailed("the disk refused to read")]

    async def faulty(self: Ledger, asked: Any) -> Any:
        if failures:
            raise failures.pop()
        return await read(self, asked)

    monkeypatch.setattr(Ledger, method, faulty)
    with an_app().run(tmp_path) as client:
        job = client.submit("job.double", {"n": 4}, delay=0.1)  # so that it waits for a turn
        assert job.result(timeout=PATIENCE) == 8
    assert not failures


def test_a_job_that_ends_while_the_store_is_asked_about_it_is_not_waited_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, asked = Ledger.get, threading.Event()
    app = penstock.App()

    @app.job("job.asked")
    async def ends_when_asked_about() -> None:
        await asyncio.to_thread(asked.wait)

    async def slow(self: Ledger, job_id: str) -> Job | None:
        job = await get(self, job_id)
        asked.set()
        while (after := await get(self, job_id)) is not None:
            if after.is_final:
                break
            await asyncio.sleep(0.001)
        return job  # out of date by now

    monkeypatch.setattr(Ledger, "get", slow)
    with app.run(tmp_path, durability="memory") as client:
        assert client.submit("job.asked").wait(timeout=PATIENCE).state == "SUCCEEDED"


# -- jobs ------------------------------------------------------------------------------


def test_an_error_whose_name_cannot_be_stored_costs_no_other_job(tmp_path: Path) -> None:
    with an_app().run(tmp_path) as client:
        odd = client.submit("job.odd")
        with pytest.raises(JobFailed, match="odd"):
            odd.result(timeout=PATIENCE)
        assert client.submit("job.double", {"n": 4}).result(timeout=PATIENCE) == 8


# -- services --------------------------------------------------------------------------


def _break_schedules(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A service that fails when the event is set."""
    broken = threading.Event()

    async def run(self: ScheduleRunner) -> None:
        await asyncio.to_thread(broken.wait)
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ScheduleRunner, "run", run)
    return broken


def _break_scheduler(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    broken, turn = threading.Event(), Scheduler.turn

    async def failing(self: Scheduler) -> None:
        if broken.is_set():
            raise ZeroDivisionError("a bug")
        await turn(self)

    monkeypatch.setattr(Scheduler, "turn", failing)
    return broken


def _break_listener(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    broken, observe = threading.Event(), OpenJobs.observe

    def failing(self: OpenJobs, moved: Sequence[Any]) -> None:
        if broken.is_set():
            raise ZeroDivisionError("a bug")
        observe(self, moved)

    monkeypatch.setattr(OpenJobs, "observe", failing)
    return broken


@pytest.mark.parametrize("break_", [_break_schedules, _break_scheduler, _break_listener])
def test_callers_of_an_embedded_engine_hear_that_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_: Any
) -> None:
    ends: list[BaseException] = []
    app = an_app()
    with monkeypatch.context() as patch, pytest.raises(Unavailable, match="a bug") as left:
        broken = break_(patch)
        with app.run(tmp_path) as client:
            handle = client.submit("job.never")

            def wait() -> None:
                try:
                    handle.wait()
                except BaseException as error:
                    ends.append(error)

            waiter = threading.Thread(target=wait)
            waiter.start()
            broken.set()
            with pytest.raises(Unavailable, match="the engine failed"):
                while True:  # until it notices
                    client.submit("job.double", {"n": 1}).wait()
            waiter.join(PATIENCE)
            with pytest.raises(Unavailable, match="the engine failed"):
                client.status()
    assert "start it again" in left.value.hint
    assert [type(end) for end in ends] == [Unavailable]
    with pytest.raises(NotRunning), penstock.connect(data=tmp_path):
        pass  # nobody else waits there either
    with app.run(tmp_path) as client:
        assert client.submit("job.double", {"n": 4}).result(timeout=PATIENCE) == 8
        assert client.verify().mismatches == ()


def test_a_start_log_that_cannot_be_replaced_does_not_end_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()
    replace = FileStartLog._replace

    def full(self: FileStartLog) -> None:
        if tried.is_set():
            return replace(self)
        tried.set()
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(start_log, "_ROOM", 40)
    monkeypatch.setattr(FileStartLog, "_replace", full)
    with an_app().run(tmp_path) as client:
        for n in range(4):
            assert client.submit("job.double", {"n": n}).result(timeout=PATIENCE) == 2 * n
    assert tried.is_set()


@run_async
async def test_a_task_in_the_engines_own_loop_hears_that_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = _break_schedules(monkeypatch)
    body_went_on = False
    with pytest.raises(Unavailable, match="a bug"):
        async with an_app().run(tmp_path) as client:
            handle = await client.asubmit("job.never")
            broken.set()
            with pytest.raises(Unavailable, match="the engine failed"):
                async with asyncio.timeout(PATIENCE):
                    await handle.await_end()
            await asyncio.sleep(0)  # the task itself is not cancelled
            body_went_on = True
    assert body_went_on


def test_an_engine_whose_service_fails_at_once_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _break_scheduler(patch).set()
        with pytest.raises(Unavailable, match="a bug"), an_app().run(tmp_path):
            pytest.fail("it started")
    with an_app().run(tmp_path) as client:
        assert client.submit("job.double", {"n": 4}).result(timeout=PATIENCE) == 8
