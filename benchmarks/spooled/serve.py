"""A spool's server in a process of its own.

`python serve.py WORKSPACE MODEL|none SYNC WORKERS [claims]` says `ready`, and then, if it is
asked to, when it claimed what: only for somebody who reads it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from spooled.prompts import SLOTS, THREADS
from tests.support.fake_llm import FakeRunner

from penstock.adapters.llama.runner import LlamaRunner
from penstock.app.service import run_service
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import Runner
from penstock.workloads.spool.config import ServerConfig, Sync
from penstock.workloads.spool.server.pool import EventKind, JobEvent
from penstock.workloads.spool.server.server import Server


async def serve(workspace: Path, model: str, sync: Sync, workers: int, tells: bool) -> None:
    runner: Runner = FakeRunner()
    if model != "none":
        config = ModelConfig(models=(model,), slots=SLOTS, context=1024, threads=THREADS)
        runner = LlamaRunner(config)
    server = Server(ServerConfig(workspace=workspace, workers=workers, sync=sync), runner)

    def hear(event: JobEvent) -> None:
        if event.what is EventKind.CLAIMED:
            print(event.job_id, time.time_ns(), flush=True)

    server.on_event = hear if tells else None
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await server.start()
    print("ready", flush=True)
    await stop.wait()
    await server.stop()


if __name__ == "__main__":
    place, asked, level, many, *more = sys.argv[1:]
    run_service(serve(Path(place), asked, Sync(level), int(many), "claims" in more))
