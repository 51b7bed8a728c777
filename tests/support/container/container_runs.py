"""A runner with a fake engine, in an event loop whose time is made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.support.fake_containers import FakeEngine, Script

from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.workloads.container.config import InputRules, WorkerConfig
from penstock.workloads.container.engine import OWNER_LABEL, ContainerSummary
from penstock.workloads.container.files.artifacts import output_files
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import JobFolders, Sandbox
from penstock.workloads.container.job import ContainerJob, ContainerResult, Limits, Stream
from penstock.workloads.container.runner import Runner
from penstock.workloads.container.timeouts import StopRequest

IMAGE = "tool:1"


class _Threadless(VirtualLoop):
    """What would go to a thread is done at once: it takes no time here."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class Rig:
    """One job of one worker."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.clock = LoopClock(loop)
        self.engine = FakeEngine(self.clock, {IMAGE: Script()})
        self.config = WorkerConfig(stop_grace=5)
        self.sandboxes = JobFolders(folder, InputRules())
        self.job = ContainerJob(job_id="job-1", image=IMAGE, limits=Limits(max_runtime_seconds=10))
        self.stop = StopRequest()
        self.output = Output(folder / "logs", 1 << 20)

    @property
    def sandbox(self) -> Sandbox:
        return self.sandboxes.sandbox(self.job.job_id)

    @property
    def runner(self) -> Runner:
        return Runner(self.engine, self.config, self.clock, "owner")

    @property
    def container(self) -> str:
        return self.runner.name_of(self.job.job_id)

    def script(self, **what: Any) -> None:
        self.engine.scripts[IMAGE] = Script(**what)

    def asks(self, **what: Any) -> None:
        """Of the job; `limits` is a dict."""
        if "limits" in what:
            what["limits"] = replace(self.job.limits, **what["limits"])
        self.job = replace(self.job, **what)

    def text(self, stream: Stream = Stream.STDOUT) -> str:
        return self.output.text(stream)

    async def run(self) -> ContainerResult:
        return await self.runner.run(self.job, self.sandbox, self.output, self.stop)

    def begin(self) -> asyncio.Task[ContainerResult]:
        return asyncio.ensure_future(self.run())

    async def found(self) -> ContainerSummary:
        (found,) = await self.engine.find({})
        return found

    async def adopt(self, found: ContainerSummary, started_at: float) -> ContainerResult:
        return await self.runner.adopt(
            self.job, found, self.sandbox, self.output, self.stop, started_at
        )

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def remove(self) -> bool:
        """As a worker does when the end is recorded."""
        if not await self.runner.remove(self.job.job_id):
            return False
        for image in await self.engine.images({OWNER_LABEL: "owner"}):
            await self.engine.remove_image(image.id)
        await self.sandbox.delete()
        return True

    def left(self) -> list[tuple[str, int]]:
        """Files in its output folder, and their sizes."""
        most = self.job.limits.max_artifact_bytes
        files = output_files(self.sandbox.output, most, lambda path, reason: None)
        return [(path, len(file.read())) for path, file in files]


Body = Callable[[Rig], Coroutine[Any, Any, None]]


def virtually(folder: Path, body: Body) -> None:
    """Run it; nothing may run on afterwards."""
    loop = _Threadless()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_whole(Rig(folder, loop), body))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _whole(rig: Rig, body: Body) -> None:
    async with asyncio.timeout(3000):  # a job that never ends would be looked at for ever
        await body(rig)
    await rig.engine.close()
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"somebody forgot {left}"


def with_rig(test: Body) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        virtually(tmp_path, test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def code_of(end: ContainerResult) -> str | None:
    return end.error.code if end.error is not None else None
