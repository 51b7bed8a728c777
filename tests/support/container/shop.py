"""A runner on a real engine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_runtime

from penstock.ports.clock import SystemClock
from penstock.testing.images import IMAGE
from penstock.workloads.container.config import BuildRules, InputRules, WorkerConfig
from penstock.workloads.container.engine import OWNER_LABEL, ContainerEngine
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.engines.oci.images import ImageStore
from penstock.workloads.container.files.artifacts import output_files
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import JobFolders, Sandbox
from penstock.workloads.container.job import ContainerJob, ContainerResult, Limits
from penstock.workloads.container.runner import Runner
from penstock.workloads.container.timeouts import StopRequest

MIB = 1 << 20


Open = Callable[[], ContainerEngine]


class Shop:
    """Every job is removed when it has ended, unless it is only begun."""

    engine_is_away = False

    def __init__(self, engine: ContainerEngine, folder: Path) -> None:
        self.engine = engine
        self.sandboxes = JobFolders(folder, InputRules())
        self.config = WorkerConfig(stop_grace=1, build=BuildRules(enabled=True, bases=(IMAGE,)))
        self.owner = f"owner-{secrets.token_hex(6)}"
        self.output = Output(folder / "logs", MIB)
        self.left: list[str] = []
        """Files that the last job left in its output folder."""
        self.stop = StopRequest()

    @property
    def runner(self) -> Runner:
        return Runner(self.engine, self.config, SystemClock(), self.owner)

    def job(self, *cmd: str, limits: dict[str, Any] | None = None, **fields: Any) -> ContainerJob:
        usual: dict[str, Any] = {"job_id": secrets.token_hex(4), "image": IMAGE, "cmd": cmd}
        most = {"memory_mb": 64, "max_runtime_seconds": 30, **(limits or {})}
        return ContainerJob(**{**usual, **fields}, limits=Limits(**most))

    async def run(self, *cmd: str, **fields: Any) -> ContainerResult:
        job = self.job(*cmd, **fields)
        end = await self.runner.run(job, self.sandbox(job), self.output, self.stop)
        self.left = self.files(job)
        await self.remove(job)
        return end

    async def shell(self, script: str, **fields: Any) -> ContainerResult:
        return await self.run("sh", "-c", script, **fields)

    async def begun(
        self, running: Coroutine[Any, Any, ContainerResult]
    ) -> asyncio.Task[ContainerResult]:
        """Until it has said something."""
        heard = asyncio.Event()
        self.output.listen(lambda stream, data: heard.set())
        task = asyncio.ensure_future(running)
        await heard.wait()
        return task

    def sandbox(self, job: ContainerJob) -> Sandbox:
        return self.sandboxes.sandbox(job.job_id)

    def files(self, job: ContainerJob) -> list[str]:
        files = output_files(self.sandbox(job).output, MIB, lambda path, reason: None)
        return [path for path, _ in files]

    async def remove(self, job: ContainerJob) -> None:
        removed = await self.runner.remove(job.job_id)
        assert removed or self.engine_is_away
        if removed:
            for image in await self.engine.images({OWNER_LABEL: self.owner}):
                await self.engine.remove_image(image.id)
        await self.sandbox(job).delete()


@asynccontextmanager
async def shop_on(open_engine: Open, folder: Path) -> AsyncIterator[Shop]:
    """Nothing of it may be left in its engine afterwards."""
    shop = Shop(open_engine(), folder)
    try:
        yield shop
        if not shop.engine_is_away:
            assert await shop.engine.find({OWNER_LABEL: shop.owner}) == []
            assert await shop.engine.images({OWNER_LABEL: shop.owner}) == []
    finally:
        await shop.engine.close()


class OnDocker:
    @pytest.fixture
    def socket(self, docker_socket: Path) -> Path:
        return docker_socket

    @pytest.fixture
    def open_engine(self, socket: Path) -> Open:
        return lambda: DockerEngine(socket)


class OnPodman(OnDocker):
    @pytest.fixture
    def socket(self, podman_socket: Path) -> Path:
        return podman_socket


class OnRunc:
    program = "runc"

    @pytest.fixture
    def open_engine(self, busybox: Path, tmp_path: Path) -> Open:
        needs_runtime(self.program)
        root = tmp_path / "oci"
        store = ImageStore(root / "images")
        store.import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
        return lambda: OciEngine(root, runtime=self.program)


class OnCrun(OnRunc):
    program = "crun"
