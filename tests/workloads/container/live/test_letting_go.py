"""A worker that goes leaves its containers as they are, and the next takes them up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.support.container.shop import OnCrun, OnDocker, OnPodman, OnRunc, Open, Shop, shop_on

from penstock.testing.aio import run_async
from penstock.workloads.container.engine import OWNER_LABEL, ContainerState, ContainerSummary
from penstock.workloads.container.job import ContainerJob, Stream


async def found(shop: Shop) -> ContainerSummary:
    (one,) = await shop.engine.find({OWNER_LABEL: shop.owner})
    return one


async def let_go(shop: Shop, open_engine: Open, script: str) -> ContainerJob:
    """A job that runs, without a worker; the shop has another client of its engine."""
    job = shop.job("sh", "-c", script, outputs=True, limits={"max_runtime_seconds": 20})
    work = shop.runner.run(job, shop.sandbox(job), shop.output, shop.stop)
    running = await shop.begun(work)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await shop.engine.close()
    shop.engine = open_engine()
    return job


class LettingGo:
    @run_async
    async def test_a_container_that_runs_goes_on_and_is_taken_up(
        self, open_engine: Open, tmp_path: Path
    ) -> None:
        async with shop_on(open_engine, tmp_path) as shop:
            began = time.time()
            script = "echo up; sleep 2; echo made > /output/f; echo after; exit 5"
            job = await let_go(shop, open_engine, script)
            left = await found(shop)
            assert left.state is ContainerState.RUNNING
            end = await shop.runner.adopt(
                job, left, shop.sandbox(job), shop.output, shop.stop, began
            )
            assert end.error is not None
            assert (end.error.code, end.exit_code) == ("NON_ZERO_EXIT", 5)
            assert shop.output.text(Stream.STDOUT) == "up\nafter\n"
            assert shop.output.text(Stream.STDERR) == ""
            assert not end.stdout_count.gap
            assert shop.files(job) == ["f"]
            assert end.image_id == (await shop.engine.image(job.image)).id
            await shop.remove(job)

    @run_async
    async def test_a_container_that_ended_without_a_worker_has_its_exit_code(
        self, open_engine: Open, tmp_path: Path
    ) -> None:
        async with shop_on(open_engine, tmp_path) as shop:
            began = time.time()
            job = await let_go(shop, open_engine, "echo up; sleep 0.5; echo > /output/f; exit 6")
            async with asyncio.timeout(20):
                await shop.engine.wait(shop.runner.name_of(job.job_id))
            left = await found(shop)
            assert left.state is ContainerState.EXITED
            end = await shop.runner.adopt(
                job, left, shop.sandbox(job), shop.output, shop.stop, began
            )
            assert end.error is not None
            assert (end.error.code, end.exit_code) == ("NON_ZERO_EXIT", 6)
            assert shop.files(job) == ["f"]
            assert not end.stdout_count.gap
            await shop.remove(job)

    @run_async
    async def test_an_adopted_container_whose_time_is_over_is_ended(
        self, open_engine: Open, tmp_path: Path
    ) -> None:
        async with shop_on(open_engine, tmp_path) as shop:
            job = await let_go(shop, open_engine, "echo up; sleep 1000")
            left = await found(shop)
            old = ContainerSummary(left.name, left.state, left.labels)
            began = time.time() - 1000
            end = await shop.runner.adopt(
                job, old, shop.sandbox(job), shop.output, shop.stop, began
            )
            assert end.error is not None
            assert end.error.code == "TIMEOUT"
            await shop.remove(job)


class TestDocker(OnDocker, LettingGo):
    pass


class TestPodman(OnPodman, LettingGo):
    pass


class TestRunc(OnRunc, LettingGo):
    pass


class TestCrun(OnCrun, LettingGo):
    pass
