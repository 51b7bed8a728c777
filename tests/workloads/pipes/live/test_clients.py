"""Clients of an engine with a real origin who leave in the middle: their jobs end or go on as each
door promises, nothing is left on any node, and others are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from tests.support.openai.door import Door, door
from tests.support.pipes.networks import (
    LAYERS,
    MODEL,
    PROMPT,
    Network,
    SmallModel,
    asked,
    ranges,
    until,
)
from tests.support.pipes.strangers import beside
from tests.workloads.pipes.live.test_engine_nodes import answer_of

from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.executor import PipesExecutor
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.runner import NodeHost

LONG = 400


class ModelSite(NamedTuple):
    door: Door
    a: Node
    b: Node


@asynccontextmanager
async def served(folder: Path, small: SmallModel) -> AsyncIterator[ModelSite]:
    """HTTP and the OpenAI API before an origin `a`, and a node `b` with the other half."""
    async with Network(small, keep=0) as network:
        b = await network.add("b", *ranges(3, LAYERS))
        config = LpConfig(
            model=MODEL,
            source=small.folder,
            node_id="a",
            layers=tuple(ranges(0, 3)),
            end_model=True,
            key=network.key,
            join=(b.address,),
            dtype="float32",
            threads=1,
            context=512,
            keep=0,
            drain=0.0,
        )
        host = NodeHost(config)
        async with door(folder, executors=[PipesExecutor(config, lambda _: host)]) as one:
            yield ModelSite(one, host.runner.node, b)


async def free(node: Node, jobs: int) -> None:
    """Until so many are open there, and nothing else takes room."""

    def is_free() -> bool:
        record = node.record
        return record.jobs == jobs and (jobs > 0 or record.cache_used == 0)

    async with asyncio.timeout(20):
        await until(is_free, node)


@pytest.mark.seed("000", "18.8")
@run_async
async def test_a_client_of_the_openai_api_that_leaves_in_mid_stream_frees_every_node(
    tmp_path: Path, small: SmallModel
) -> None:
    async with served(tmp_path, small) as site, site.door.client() as client:
        async with beside(site.a, small), asyncio.timeout(30):
            stream = await client.completions.create(
                model=MODEL, prompt=list(PROMPT), max_tokens=LONG, stream=True
            )
            await anext(stream)
            await free(site.b, 2)
            await stream.close()
            (job,) = await site.door.engine.api.find(JobQuery())
            done = await site.door.engine.api.wait(job.job_id, 20)
            assert done.state is JobState.CANCELLED
            for node in (site.a, site.b):
                await free(node, 1)
        for node in (site.a, site.b):
            await free(node, 0)


@run_async
async def test_a_client_that_leaves_before_it_hears_anything_frees_every_node(
    tmp_path: Path, small: SmallModel
) -> None:
    async with served(tmp_path, small) as site, site.door.client() as client:
        async with beside(site.a, small):
            waiting = asyncio.ensure_future(
                client.completions.create(model=MODEL, prompt=list(PROMPT), max_tokens=LONG)
            )
            await free(site.b, 2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            (job,) = await site.door.engine.api.find(JobQuery())
            done = await site.door.engine.api.wait(job.job_id, 20)
            assert done.state is JobState.CANCELLED
        for node in (site.a, site.b):
            await free(node, 0)


@run_async
async def test_a_reader_of_a_jobs_updates_that_leaves_disturbs_nothing(
    tmp_path: Path, small: SmallModel
) -> None:
    async with served(tmp_path, small) as site, asyncio.timeout(30):
        given = msgspec.to_builtins(asked(count=120, stream=True, logprobs=None))
        job = await site.door.submit(f"job.chat.{MODEL}", input=given)
        reader, writer = await site.door.connect()
        writer.write(site.door.head("GET", f"/v1/jobs/{job['job_id']}/updates"))
        await reader.readuntil(b'"text"')
        writer.transport.abort()
        engine = site.door.engine
        result = await answer_of(engine.api, await engine.api.get(job["job_id"]))
        assert result.choices[0].text == small.text(PROMPT, 120)
        for node in (site.a, site.b):
            await free(node, 0)
