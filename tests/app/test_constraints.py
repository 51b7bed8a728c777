"""What safety rules demand of a job holds where it runs: a worker, its executor, real processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.network import leaving_is_permitted

import penstock
from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.core.job import JobRequest, JobResult
from penstock.core.pointer import decode_data, encode_data
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import (
    HANDSHAKE,
    RESULT,
    AnyMessage,
    Dispatch,
    Finished,
    Handshake,
    MemoryBus,
    Welcomed,
    jobs_of,
)
from penstock.ports.clock import SystemClock
from penstock.testing.aio import run_async
from penstock.testing.executor import NOT_ENFORCED, Greeter
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.function.definition import make_function
from penstock.workloads.function.executor import FunctionExecutor

JOBS = str(Path(__file__).parents[1] / "support" / "jobs")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [JOBS, *sys.path])


class ConstraintSite:
    """A worker of `process_jobs`, each function in two modes, and what it reports."""

    def __init__(self) -> None:
        import process_jobs as jobs  # type: ignore[import-not-found]

        functions = {
            f"job.{mode}.{fn.__name__}": make_function(
                fn, f"job.{mode}.{fn.__name__}", _nobody, mode=mode
            )
            for mode in ("thread", "process")
            for fn in (jobs.greet, jobs.eat, jobs.letters, jobs.write)
        }
        self.bus = MemoryBus()
        self.bus.subscribe(HANDSHAKE, self._hear)
        self.bus.subscribe(RESULT, self._hear)
        self._ends: dict[str, asyncio.Future[JobResult]] = {}
        executor = FunctionExecutor(functions, processes=1)
        options = WorkerOptions(worker_id="w", slots=4)
        self.worker = Worker(self.bus, MemoryBlobs(), [executor], SystemClock(), options)

    async def _hear(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            if isinstance(message, Handshake):
                self.bus.publish(jobs_of("w"), [Welcomed(message.session)])
            elif isinstance(message, Finished):
                self._ends[message.result.job_id].set_result(message.result)

    async def run(
        self, topic: str, constraints: Constraints | None = None, **input: Any
    ) -> JobResult:
        pointer = encode_data(msgspec.json.encode(input), "application/json")
        request = JobRequest(
            job_id=f"j{len(self._ends)}", topic=topic, context_ptr=pointer, idempotent=True
        )
        end = self._ends[request.job_id] = asyncio.get_running_loop().create_future()
        order = Dispatch(request, 1, timeout=50.0, constraints=constraints)
        self.bus.publish(jobs_of("w"), [order])
        async with asyncio.timeout(50):
            return await end


def _nobody() -> Any:
    raise AssertionError("nothing is submitted here")


@asynccontextmanager
async def site() -> AsyncIterator[ConstraintSite]:
    here = ConstraintSite()
    running = asyncio.ensure_future(here.worker.run())
    await asyncio.sleep(0.01)
    try:
        yield here
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await here.bus.close()


def value_of(result: JobResult) -> Any:
    assert result.status is JobState.SUCCEEDED, result
    return msgspec.json.decode(decode_data(result.result_ptr or ""))


@run_async
async def test_a_function_reaches_a_server_with_network_and_not_without() -> None:
    async with Greeter() as server, site() as here:
        free = await here.run("job.process.greet", port=server.port)
        assert (value_of(free), server.guests) == ("hello", 1)
        cut_off = await here.run("job.process.greet", Constraints(network=()), port=server.port)
        assert cut_off.status is JobState.FAILED
        assert server.guests == 1
        expected = "OSError" if leaving_is_permitted() else NOT_ENFORCED
        assert cut_off.error_code == expected, cut_off
        again = await here.run("job.process.greet", port=server.port)
        assert (value_of(again), server.guests) == ("hello", 2)


@run_async
async def test_a_function_in_a_thread_never_runs_without_the_network_it_shares() -> None:
    async with Greeter() as server, site() as here:
        result = await here.run("job.thread.greet", Constraints(network=()), port=server.port)
        assert (result.status, result.error_code) == (JobState.FAILED, NOT_ENFORCED)
        assert "run it in process mode" in (result.error_message or "")
        assert server.guests == 0
        assert value_of(await here.run("job.thread.greet", port=server.port)) == "hello"


@run_async
async def test_a_list_of_hosts_and_a_read_only_disk_are_refused_and_nothing_runs(
    tmp_path: Path,
) -> None:
    async with Greeter() as server, site() as here:
        for mode in ("thread", "process"):
            hosts = Constraints(network=("127.0.0.1",))
            result = await here.run(f"job.{mode}.greet", hosts, port=server.port)
            assert (result.error_code, server.guests) == (NOT_ENFORCED, 0)
            path = tmp_path / mode
            only = Constraints(read_only=True)
            result = await here.run(f"job.{mode}.write", only, path=str(path))
            assert (result.error_code, path.exists()) == (NOT_ENFORCED, False)


@run_async
async def test_a_function_gets_no_more_memory_than_the_rules_allow() -> None:
    async with site() as here:
        tight = Constraints(max_memory=64 * MIB)
        over = await here.run("job.process.eat", tight, size=512 * MIB)
        assert (over.status, over.error_code) == (JobState.FAILED, "OUT_OF_MEMORY")
        assert value_of(await here.run("job.process.eat", tight, size=MIB)) == MIB
        in_thread = await here.run("job.thread.eat", tight, size=MIB)
        assert in_thread.error_code == NOT_ENFORCED


@run_async
async def test_a_result_over_the_limit_is_an_error_whatever_made_it() -> None:
    async with site() as here:
        small = Constraints(max_output=100)
        for mode in ("thread", "process"):
            over = await here.run(f"job.{mode}.letters", small, count=99)
            assert (over.error_code, over.result_ptr) == ("OUTPUT_LIMIT", None)
            within = await here.run(f"job.{mode}.letters", small, count=98)
            assert value_of(within) == "x" * 98


RULES = """
default = "allow"

[[rules]]
id = "stays-inside"
decision = "allow_with_constraints"
topics = ["job.inside.*"]
constraints = { network = [], max_output = 1000 }
"""


@run_async
async def test_what_a_rule_file_demands_holds_from_the_engine_to_the_process(
    tmp_path: Path,
) -> None:
    import process_jobs as jobs

    (tmp_path / "rules.toml").write_text(RULES)
    app = penstock.App()
    inside = app.job("job.inside.greet", mode="process")(jobs.greet)
    shared = app.job("job.inside.shared", retries=3)(jobs.greet)
    outside = app.job("job.outside.greet", mode="process")(jobs.greet)
    large = app.job("job.inside.letters", mode="process")(jobs.letters)
    codes = {}
    async with Greeter() as server, app.run(tmp_path / "data", rules=tmp_path / "rules.toml"):
        for function, given in (inside, server.port), (shared, server.port), (large, 2000):
            ended = await (await function.asubmit(given)).await_end(50)
            assert ended.result is not None
            assert (ended.state, ended.successor) == (JobState.FAILED, None)
            codes[ended.request.topic] = ended.result.error_code
        assert server.guests == 0
        assert await (await outside.asubmit(server.port)).aresult(50) == "hello"
    permitted = leaving_is_permitted()
    assert codes == {
        "job.inside.greet": "OSError" if permitted else NOT_ENFORCED,
        "job.inside.shared": NOT_ENFORCED,
        "job.inside.letters": "OUTPUT_LIMIT" if permitted else NOT_ENFORCED,
    }
