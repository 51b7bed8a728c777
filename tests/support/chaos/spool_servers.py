"""Real servers of a spool, each a process of its own: `python spool_servers.py CONFIG.json`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct
from tests.support.fake_llm import FakeRunner

from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import ProgressListener, Runner
from penstock.workloads.llm.values import Completion, Delta, GenerationRequest
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.server.server import Server

ME = Path(__file__)


class Setting(Struct, kw_only=True):
    """What one process is told."""

    workspace: str
    marks: str = ""
    """A file with a line for each answer that was begun: who, and the prompt."""
    delay: float = 0.0
    workers: int = 8
    attempts: int = 50
    scan: float = 0.2
    lease: float = 30.0
    sync: Sync = Sync.FULL
    model: str = ""
    """A file; without one nothing is computed."""
    crash_on: tuple[str, ...] = ()


class MarkingRunner(FakeRunner):
    """Tells other processes what it begins."""

    marks = ""

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        if self.marks:
            file = os.open(self.marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, f"{os.getpid()} {ask.messages[-1].content}\n".encode())  # type: ignore[union-attr]
            os.close(file)
        async with contextlib.aclosing(super().generate(model, ask, choice)) as pieces:
            async for piece in pieces:
                yield piece


def make_runner(setting: Setting) -> Runner:
    if setting.model:
        from penstock.adapters.llama.runner import LlamaRunner

        config = ModelConfig(models=(setting.model,), slots=setting.workers, context=512, threads=2)
        return LlamaRunner(config)
    runner = MarkingRunner(delay=setting.delay, crash_on=setting.crash_on)
    runner.marks = setting.marks
    return runner


async def serve(setting: Setting) -> None:
    config = ServerConfig(
        workspace=Path(setting.workspace),
        workers=setting.workers,
        attempts=setting.attempts,
        scan=setting.scan,
        lease=setting.lease,
        sync=setting.sync,
        drain=0.2,
    )
    runner = make_runner(setting)
    server = Server(config, runner)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await server.start()
        print("ready", flush=True)
        await stop.wait()
        await server.stop()
    finally:
        await runner.close()


@contextlib.contextmanager
def server(setting: Setting, failpoint: str = "") -> Iterator[subprocess.Popen[str]]:
    """One that is ready; killed at the end, if nobody did it before."""
    words = [sys.executable, str(ME), msgspec.json.encode(setting).decode()]
    environment = {**os.environ, "PENSTOCK_FAILPOINT": failpoint}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n" or failpoint
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Setting)))
