"""Work that goes on until a signal ends it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from penstock.app.service import Stop
from penstock.cli.live import saying_why
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi
from penstock.testing.aio import run_async
from penstock.testing.samples import a_job


@run_async
async def test_work_that_is_told_to_stop_has_ended_when_the_wait_for_it_ends() -> None:
    stop, done = Stop(), []

    async def work() -> None:
        try:
            stop.asked.set()
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            done.append("tidied up")

    await stop.first_of(work())
    assert done == ["tidied up"]


@run_async
async def test_what_fails_before_it_is_told_to_stop_fails() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await Stop().first_of(work())


@run_async
async def test_what_is_urgent_is_not_waited_for() -> None:
    stop = Stop()
    release = asyncio.Event()

    async def work() -> None:
        stop.urgent.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await release.wait()

    async with asyncio.timeout(20):
        assert await stop.unless_urgent(work()) is False
    release.set()


@pytest.mark.parametrize(
    ("state", "terminal", "said"),
    [
        (JobState.SCHEDULED, True, "penstock: job j waits: no worker is here\n"),
        (JobState.RUNNING, True, ""),
        (JobState.SCHEDULED, False, ""),
    ],
)
def test_at_a_terminal_it_is_said_what_a_job_waits_for(
    state: JobState,
    terminal: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    monkeypatch.setattr("penstock.cli.live._SOON", 0.0)

    class Jobs:
        async def get(self, job_id: str) -> Job:
            return a_job(state=state)

        async def why(self, job_id: str) -> str:
            return "no worker is here"

    async def waited() -> None:
        async with saying_why(cast(EngineApi, Jobs()), "j"):
            await asyncio.sleep(0.05)

    asyncio.run(waited())
    assert capsys.readouterr().err == said
