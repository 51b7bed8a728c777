"""Real nodes under an engine: jobs go over them, and the engine shows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.pipes.networks import LAYERS, PROMPT, Network, SmallModel, asked, ranges

from penstock.adapters.link.address import Address
from penstock.app import App
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.app.worker_process import WorkerProcess
from penstock.config import Settings, load
from penstock.core.errors import Misconfigured, NotRunning
from penstock.core.job import Job, JobRequest
from penstock.core.pointer import decode_data, encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineApi, Progressed
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import LlmResult
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.setup import observe, pipe_config
from penstock.workloads.pipes.status import PipesView, status_of
from penstock.workloads.pipes.wire.identity import new_key


def settings(folder: Path, small: SmallModel, **more: Any) -> Settings:
    given = {
        "data_dir": str(folder),
        "durability": "memory",
        "node__model": str(small.folder),
        "node__dtype": "float32",
        "node__threads": 1,
        "node__cache": 64 << 20,
        "node__context": 512,
        "node__heartbeat": 0.2,
        "node__lease": 10.0,
        "node__drain": 5.0,
        **more,
    }
    return load(environ={}, flags=given)


@asynccontextmanager
async def engine_of(mine: Settings) -> AsyncIterator[Engine]:
    async with Engine(mine, make_executors(None, mine)) as engine:
        yield engine


async def submitted(api: EngineApi, count: int = 12, tenant: str = "default", **more: Any) -> Job:
    ask = encode_data(msgspec.json.encode(asked(count=count, **more)))
    (job,) = await api.submit(
        [JobRequest(job_id="", topic="job.chat.tiny", context_ptr=ask, tenant=tenant)]
    )
    return job


async def answer_of(api: EngineApi, job: Job) -> LlmResult:
    done = await api.wait(job.job_id, 30)
    assert done.result is not None
    assert done.state is JobState.SUCCEEDED, done.result.error_message
    pointer = done.result.result_ptr or ""
    payload = decode_data(pointer) if pointer.startswith("data:") else await api.get_blob(pointer)
    return msgspec.json.decode(payload, type=LlmResult)


async def shown(api: EngineApi, true: Callable[[PipesView], bool]) -> PipesView:
    async with asyncio.timeout(20):
        while True:
            if true(view := status_of(await api.workers())):
                return view
            await asyncio.sleep(0.05)


def is_whole(view: PipesView) -> bool:
    return any(pipe.complete for pipe in view.pipes)


@pytest.mark.seed("000", "13.1")
@run_async
async def test_a_job_goes_over_the_engine_s_node_and_another(
    tmp_path: Path, small: SmallModel
) -> None:
    async with Network(small) as network:
        b = await network.add("b", *ranges(3, LAYERS))
        mine = settings(
            tmp_path,
            small,
            node__key=network.key,
            node__join=b.address,
            node__end_model="true",
            node__layers="0-2",
            node__node_id="a",
        )
        async with engine_of(mine) as engine:
            job = await submitted(engine.api)
            result = await answer_of(engine.api, job)
            assert result.choices[0].text == small.text(PROMPT, 12)
            assert {hop.node for hop in result.hops} == {"a", "b"}
            view = await shown(engine.api, is_whole)
            assert [(node.node_id, node.worker_id) for node in view.nodes] == [
                ("a", engine.worker_id),
                ("b", ""),
            ]
            (pipe,) = view.pipes
            assert [(hop.node_id, hop.layers) for hop in pipe.hops] == [("a", "0-2"), ("b", "3-5")]
            seen = await observe(b.address, network.key)
            assert [node.node_id for node in seen.nodes] == ["a", "b"]
            with pytest.raises(NotRunning):
                await observe(b.address, new_key())


@run_async
async def test_a_tenant_is_never_told_what_another_has_asked(
    tmp_path: Path, small: SmallModel
) -> None:
    async with engine_of(settings(tmp_path, small, node__end_model="true")) as engine:

        async def cached(tenant: str) -> int:
            job = await submitted(engine.api, count=4, tenant=tenant)
            return (await answer_of(engine.api, job)).usage.cached_tokens

        assert await cached("hospital") == 0
        assert await cached("stranger") == 0
        assert await cached("hospital") == len(PROMPT) - 1
        assert await cached("stranger") == len(PROMPT) - 1


@run_async
async def test_workers_of_one_engine_find_each_other_and_tell_of_what_is_missing(
    tmp_path: Path, small: SmallModel
) -> None:
    key = new_key()
    here = settings(
        tmp_path, small, node__key=key, node__layers=f"3-{LAYERS - 1}", node__node_id="b"
    )
    async with engine_of(here) as engine:
        alone = await shown(engine.api, lambda view: bool(view.nodes))
        assert (alone.pipes[0].complete, alone.pipes[0].missing) == (False, "0-2")
        assert "--end-model" in alone.pipes[0].reason
        assert await engine.api.topics() == []
        there = settings(
            tmp_path,
            small,
            node__key=key,
            node__layers="0-2",
            node__end_model="true",
            node__node_id="a",
        )
        site = WorkerProcess(App(), Address(path=here.socket), there, worker_id="w-a")
        working = asyncio.ensure_future(site.run())
        try:
            view = await shown(engine.api, is_whole)
            assert [(node.node_id, node.worker_id) for node in view.nodes] == [
                ("a", "w-a"),
                ("b", engine.worker_id),
            ]
            result = await answer_of(engine.api, await submitted(engine.api))
            assert result.choices[0].text == small.text(PROMPT, 12)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        gone = await shown(engine.api, lambda view: len(view.nodes) == 1)
        assert gone.nodes[0].node_id == "b"


@run_async
async def test_a_job_without_its_nodes_waits_with_a_reason_and_goes_on_when_one_comes(
    tmp_path: Path, small: SmallModel
) -> None:
    key = new_key()
    mine = settings(tmp_path, small, node__key=key, node__end_model="true", node__layers="0-2")
    async with engine_of(mine) as engine:
        (worker,) = await engine.api.workers()
        job = await submitted(engine.api)
        async with asyncio.timeout(20):
            async for update in engine.api.follow(job.job_id):
                if isinstance(update, Progressed) and "3-5" in update.message:
                    break
        assert "3-5" in await engine.api.why(job.job_id)
        late = settings(
            tmp_path,
            small,
            node__key=key,
            node__layers=f"3-{LAYERS - 1}",
            node__join=worker.labels["pipe"],
        )
        config = pipe_config(late)
        assert config is not None
        node = Node(config)
        try:
            await node.start()
            result = await answer_of(engine.api, job)
            assert result.choices[0].text == small.text(PROMPT, 12)
        finally:
            await node.stop()


@run_async
async def test_a_job_whose_pipe_stays_incomplete_fails_with_what_is_missing(
    tmp_path: Path, small: SmallModel
) -> None:
    mine = settings(
        tmp_path, small, node__end_model="true", node__layers="0-2", node__wait_timeout=0.3
    )
    async with engine_of(mine) as engine:
        done = await engine.api.wait((await submitted(engine.api)).job_id, 30)
        assert (done.state, done.result and done.result.error_code) == (
            JobState.FAILED,
            "PIPE_UNAVAILABLE",
        )
        assert "3-5" in ((done.result and done.result.error_message) or "")


@pytest.mark.seed("000", "15.4")
@run_async
async def test_a_cancelled_job_gives_its_room_back_on_every_node(
    tmp_path: Path, small: SmallModel
) -> None:
    async with Network(small, keep=0) as network:
        b = await network.add("b", *ranges(3, LAYERS))
        mine = settings(
            tmp_path,
            small,
            node__key=network.key,
            node__join=b.address,
            node__end_model="true",
            node__layers="0-2",
            node__node_id="a",
            node__keep_cache=0,
        )
        async with engine_of(mine) as engine:
            job = await submitted(engine.api, count=400, stream=True, logprobs=None)
            async with asyncio.timeout(20):
                async for update in engine.api.follow(job.job_id):
                    if type(update).__name__ == "Streamed":
                        break
            ended = await engine.api.cancel(job.job_id, reason="enough", timeout=20)
            assert ended.job.state is JobState.CANCELLED
            async with asyncio.timeout(20):
                while b.record.jobs or b.record.cache_used:
                    await b.changed(0.05)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"node__layers": "0-6"}, "0-6"),
        ({"node__key": "nonsense"}, "not a network key"),
        ({"node__listen": "203.0.113.1:1"}, "203.0.113.1"),
    ],
)
@run_async
async def test_an_engine_whose_node_can_not_be_does_not_start(
    tmp_path: Path, small: SmallModel, flags: dict[str, str], words: str
) -> None:
    mine = settings(tmp_path, small, node__end_model="true", **flags)
    with pytest.raises(Misconfigured, match=words):
        async with engine_of(mine):
            pass
