"""An engine that stops or dies while its origin answers: the job is repeated, and never lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.cli.commands import Penstock, said
from tests.support.pipes.networks import LAYERS, PROMPT, Network, SmallModel, asked, ranges, until
from tests.workloads.pipes.live.test_cli_nodes import environment
from tests.workloads.pipes.live.test_engine_nodes import answer_of, engine_of, settings, submitted

import penstock
from penstock.config import Settings
from penstock.ports.engine_api import EngineApi, Streamed
from penstock.testing.aio import run_async
from penstock.workloads.pipes.node import Node

LONG = 440


def settings_of(folder: Path, small: SmallModel, network: Network, b: Node) -> Settings:
    return settings(
        folder,
        small,
        durability="os",
        node__key=network.key,
        node__join=b.address,
        node__end_model="true",
        node__layers="0-2",
        node__node_id="a",
        node__drain=0.0,
        node__keep_cache=0,
    )


async def speaks(api: EngineApi, job_id: str) -> None:
    """Until its answer has begun."""
    async with asyncio.timeout(30):
        async for update in api.follow(job_id):
            if isinstance(update, Streamed):
                return
    raise AssertionError("it ended without a word")


async def free(node: Node) -> None:
    """Until it has nothing of any job."""
    async with asyncio.timeout(30):
        await until(lambda: not (node.record.jobs or node.record.cache_used), node)


@pytest.mark.seed("000", "18.5")
@run_async
async def test_an_answer_that_outlasts_the_drain_is_made_by_the_next_engine(
    tmp_path: Path, small: SmallModel
) -> None:
    async with Network(small, keep=0) as network:
        b = await network.add("b", *ranges(3, LAYERS))
        mine = settings_of(tmp_path, small, network, b)
        async with engine_of(mine) as first:
            assert first._local is not None
            first._local.options = replace(first._local.options, drain_timeout=0.01)
            job = await submitted(first.api, LONG, stream=True, logprobs=None)
            await speaks(first.api, job.job_id)
        await free(b)
        async with engine_of(mine) as second:
            result = await answer_of(second.api, job)
            assert (await second.api.get(job.job_id)).attempt == 2
        assert result.choices[0].text == small.text(PROMPT, LONG)
        assert {hop.node for hop in result.hops} == {"a", "b"}


class Origin(Penstock):
    """`penstock node start --end-model`: a process with an engine of its own."""

    def __init__(self, folder: Path, small: SmallModel, network: Network, b: Node) -> None:
        super().__init__(folder)
        self.env |= environment(small) | {
            "PENSTOCK_NODE__KEY": network.key,
            "PENSTOCK_NODE__JOIN": b.address,
            "PENSTOCK_NODE__KEEP_CACHE": "0",
        }

    @asynccontextmanager
    async def serves(self) -> AsyncIterator[subprocess.Popen[str]]:
        args = ("--end-model", "--layers", "0-2", "--node-id", "a", "--no-http")
        process = self.start("node", "start", *args, stderr=subprocess.STDOUT)
        try:
            await asyncio.to_thread(said, process, "ready; Ctrl-C stops it")
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            await asyncio.to_thread(process.communicate)


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def stopped_at_once(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    said(process, "once more to stop at once")
    process.send_signal(signal.SIGTERM)
    assert "stopped at once" in process.communicate(timeout=30)[0]


@pytest.mark.seed("000", "18.5")
@pytest.mark.parametrize("end", [killed, stopped_at_once])
@run_async
async def test_a_job_whose_engine_ends_in_mid_answer_is_answered_by_the_next_on_its_folder(
    tmp_path: Path, small: SmallModel, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    async with Network(small, keep=0) as network:
        b = await network.add("b", *ranges(3, LAYERS))
        origin = Origin(tmp_path, small, network, b)
        async with origin.serves() as process:
            with await asyncio.to_thread(penstock.connect, data=origin.data) as ps:
                given = msgspec.to_builtins(asked(count=LONG, stream=True, logprobs=None))
                job = await ps.asubmit("job.chat.tiny", given)
                async with aclosing(job.afollow()) as updates:  # type: ignore[type-var]
                    async for update in updates:
                        if isinstance(update, Streamed):
                            break
            await asyncio.to_thread(end, process)
        await free(b)
        async with engine_of(settings_of(origin.data, small, network, b)) as engine:
            result = await answer_of(engine.api, job.record)
            assert (await engine.api.get(job.job_id)).attempt == 2
        assert result.choices[0].text == small.text(PROMPT, LONG)
        assert {hop.node for hop in result.hops} == {"a", "b"}
