"""FunctionExecutor keeps the promises of every Executor, in each of its modes."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.core.job import JobRequest
from penstock.ports.executor import Context, Executor
from penstock.testing.executor import STARTED, ExecutorContract, Sample
from penstock.workloads.function.definition import JobFunction, make_function
from penstock.workloads.function.executor import FunctionExecutor

JOBS = str(Path(__file__).parents[1] / "support" / "jobs")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [JOBS, *sys.path])


def no_submitter() -> Any:
    raise AssertionError("nothing is submitted here")


def sample(name: str, **arguments: Any) -> Sample:
    request = JobRequest(job_id=f"job-{name}", topic=f"job.{name}")
    return Sample(request, msgspec.json.encode(arguments))


def named(*functions: Any) -> dict[str, Any]:
    return {fn.__name__: fn for fn in functions}


class FunctionContract(ExecutorContract):
    def functions(self) -> dict[str, Any]:
        raise NotImplementedError

    mode: str | None = None

    def make_executor(self) -> Executor:
        made: list[JobFunction[..., Any]] = [
            make_function(fn, f"job.{name}", no_submitter, mode=self.mode)
            for name, fn in self.functions().items()
        ]
        return FunctionExecutor({each.topic: each for each in made}, kill_grace=0.2, processes=2)

    def succeeding(self) -> Sample:
        return sample("double", number=21)

    def failing(self) -> Sample:
        return sample("fail")

    def refusing(self) -> Sample:
        return sample("double", number="many")

    def reporting(self) -> Sample:
        return sample("report")

    def endless(self) -> Sample:
        return sample("endless")

    def connecting(self, port: int) -> Sample:
        return sample("greet", port=port)

    def taking(self, size: int) -> Sample:
        return sample("eat", size=size)

    def writing(self, path: Path) -> Sample:
        return sample("write", path=str(path))


class TestAsyncFunctions(FunctionContract):
    alive = 0

    def functions(self) -> dict[str, Any]:
        async def double(number: int) -> int:
            return number * 2

        async def fail() -> None:
            raise ValueError("by design")

        async def report(ctx: Context) -> None:
            ctx.progress(0.5, "half")
            ctx.log("working")

        async def endless(ctx: Context) -> None:
            self.alive += 1
            try:
                ctx.progress(message=STARTED)
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                self.alive -= 1

        async def greet(port: int) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                return (await reader.read(100)).decode()
            finally:
                writer.close()

        async def eat(size: int) -> int:
            return len(bytearray(size))

        async def write(path: str) -> None:
            await asyncio.to_thread(Path(path).touch)

        return named(double, fail, report, endless, greet, eat, write)

    def is_running(self, sample: Sample) -> bool:
        return self.alive > 0


class TestThreadFunctions(FunctionContract):
    alive = 0

    def functions(self) -> dict[str, Any]:
        import process_jobs as jobs  # type: ignore[import-not-found]

        def double(number: int) -> int:
            return number * 2

        def fail() -> None:
            raise ValueError("by design")

        def report(ctx: Context) -> None:
            ctx.progress(0.5, "half")
            ctx.log("working")

        def endless(ctx: Context) -> None:
            self.alive += 1
            try:
                ctx.progress(message=STARTED)
                ctx.cancel.wait()
                ctx.cancel.raise_if_requested()
            finally:
                self.alive -= 1

        return named(double, fail, report, endless, jobs.greet, jobs.eat, jobs.write)

    def is_running(self, sample: Sample) -> bool:
        return self.alive > 0


class TestProcessFunctions(FunctionContract):
    mode = "process"

    @pytest.fixture(autouse=True)
    def _pid_file(self, tmp_path: Path) -> None:
        self.pid_file = tmp_path / "pid"

    def functions(self) -> dict[str, Any]:
        import process_jobs as jobs

        shared = (jobs.double, jobs.fail, jobs.report, jobs.greet, jobs.eat, jobs.write)
        return {"endless": jobs.deaf_with_pid, **named(*shared)}

    def endless(self) -> Sample:
        return sample("endless", pid_file=str(self.pid_file))

    def is_running(self, sample: Sample) -> bool:
        try:
            os.kill(int(self.pid_file.read_text()), 0)
        except ProcessLookupError:
            return False
        return True
