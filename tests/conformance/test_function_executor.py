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

JOBS = str(Path(__file__).parent.parent / "jobs")


def no_submitter() -> Any:
    raise AssertionError("nothing is submitted here")


def sample(name: str, **arguments: Any) -> Sample:
    request = JobRequest(job_id=f"job-{name}", topic=f"job.{name}")
    return Sample(request, msgspec.json.encode(arguments))


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

        return {"double": double, "fail": fail, "report": report, "endless": endless}

    def is_running(self, sample: Sample) -> bool:
        return self.alive > 0


class TestThreadFunctions(FunctionContract):
    alive = 0

    def functions(self) -> dict[str, Any]:
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

        return {"double": double, "fail": fail, "report": report, "endless": endless}

    def is_running(self, sample: Sample) -> bool:
        return self.alive > 0


class TestProcessFunctions(FunctionContract):
    mode = "process"

    @pytest.fixture(autouse=True)
    def _paths(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(sys, "path", [JOBS, *sys.path])
        self.pid_file = tmp_path / "pid"

    def functions(self) -> dict[str, Any]:
        import process_jobs as jobs

        return {
            "double": jobs.double,
            "fail": jobs.fail,
            "report": jobs.report,
            "endless": jobs.deaf_with_pid,
        }

    def endless(self) -> Sample:
        return sample("endless", pid_file=str(self.pid_file))

    def is_running(self, sample: Sample) -> bool:
        try:
            os.kill(int(self.pid_file.read_text()), 0)
        except ProcessLookupError:
            return False
        return True
