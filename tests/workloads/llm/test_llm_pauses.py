"""A language engine that can't work: the jobs of its model wait, and none is charged for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.fake_llm import FakeRunner

from penstock.api.metrics import Figures, Traffic
from penstock.app import doctor
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.llm import aask
from penstock.app.portal import Portal
from penstock.cli.engine import EngineRef
from penstock.config import load
from penstock.core.errors import Unavailable
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.values import ChatRequest, EngineUnavailable, LlmCode, ModelFacts

WHY = "OUT_OF_MEMORY: no memory is left"


class Ill(FakeRunner):
    """Can't load its model while it is ill."""

    is_ill = False

    async def load(self, model: str = "", on_progress: Any = None) -> ModelFacts:
        if self.is_ill:
            raise EngineUnavailable(LlmCode.OUT_OF_MEMORY, "no memory is left")
        return await super().load(model, on_progress)


def a_job(text: str = "one two") -> JobRequest:
    ask = {"kind": "chat", "messages": [{"role": "user", "content": text}]}
    return JobRequest(
        job_id="", topic="job.llm.fake", context_ptr=encode_data(msgspec.json.encode(ask))
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workloads.llm.health._FIRST_DELAY", 0.05)
    monkeypatch.setattr("penstock.workloads.llm.health._LONGEST_DELAY", 0.05)


@asynccontextmanager
async def engine(
    folder: Path, runner: FakeRunner, *, listen: bool = False
) -> AsyncIterator[Engine]:
    settings = load(flags={"data_dir": str(folder), "limits__max_attempts": 2})
    async with Engine(settings, [LlmExecutor(runner, ["fake"])], listen=listen) as engine:
        yield engine


@run_async
async def test_jobs_wait_for_an_engine_that_is_ill_and_are_told_why(tmp_path: Path) -> None:
    runner = Ill()
    async with engine(tmp_path, runner) as one:
        api = one.api
        (first,) = await api.submit((a_job(),))
        assert (await api.wait(first.job_id, 10)).state is JobState.SUCCEEDED
        runner.is_ill = True
        jobs = await api.submit([a_job() for _ in range(20)])
        await told(api, paused=True)
        [(topic, why)] = (await api.status()).paused_topics.items()
        assert topic == "job.llm.fake"
        assert why.startswith(WHY)
        for job in jobs:
            assert WHY in await api.why(job.job_id)
            assert not (await api.get(job.job_id)).is_final
        metrics = (await Figures.of(api, Traffic())).text().decode()
        assert 'penstock_topic_paused{topic="job.llm.fake"} 1.0' in metrics
        assert 'penstock_model_engines{state="ill",topic="job.llm.fake"} 1.0' in metrics
        assert len(runner.asked) == 1, "nothing was computed"

        runner.is_ill = False
        for job in jobs:
            assert (await api.wait(job.job_id, 10)).state is JobState.SUCCEEDED
        await told(api, paused=False)
        assert (await api.status()).models["job.llm.fake"]["state"] == "ready"


@run_async
async def test_the_doctor_tells_the_state_of_each_engine(tmp_path: Path) -> None:
    async def checks() -> list[tuple[str, str]]:
        found = [one async for one in doctor.engine_checks(str(place.data), place.api)]
        return [(one.what, one.found) for one in found]

    runner, place = Ill(), EngineRef(data=str(tmp_path))
    async with engine(tmp_path, runner, listen=True) as one:
        await one.api.wait((await one.api.submit((a_job(),)))[0].job_id, 10)
        async with asyncio.timeout(10):
            while ("model: job.llm.fake", "ready") not in await checks():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        runner.is_ill = True
        await one.api.submit((a_job(),))
        await told(one.api, paused=True)
        [(what, found)] = [one for one in await checks() if "fake" in one[0]]
        assert what == "paused: job.llm.fake"
        assert found.startswith(WHY)


@run_async
async def test_a_job_is_not_charged_for_an_engine_that_falls_ill_again_and_again(
    tmp_path: Path,
) -> None:
    class Weak(FakeRunner):
        """Runs out of memory under the first jobs that it is given."""

        left = 4

        async def generate(self, model: str, ask: Any, choice: int = 0, watch: Any = None) -> Any:
            if self.left and isinstance(ask, ChatRequest):
                self.left -= 1
                raise EngineUnavailable(LlmCode.OUT_OF_MEMORY, "no memory is left")
            async for piece in super().generate(model, ask, choice):
                yield piece

    async with engine(tmp_path, Weak()) as one:
        (job,) = await one.api.submit((a_job(),))
        ended = await one.api.wait(job.job_id, 30)
    assert ended.state is JobState.SUCCEEDED
    assert ended.attempt == 5


@run_async
async def test_who_asks_is_told_at_once_that_the_engine_is_ill(tmp_path: Path) -> None:
    runner = Ill()
    runner.is_ill = True
    async with engine(tmp_path, runner) as one:
        client = Client(one.api, Portal(asyncio.get_running_loop()))
        for tell in (None, lambda text: None):
            with pytest.raises(Unavailable, match=WHY):
                await aask("Hello?", client=client, tell=tell)
        jobs = await one.api.find(JobQuery())
        assert [job.state for job in jobs] == [JobState.CANCELLED] * 2


async def told(api: Any, *, paused: bool) -> None:
    async with asyncio.timeout(10):
        while bool((await api.status()).paused_topics) is not paused:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
