"""An engine with its HTTP API and a model, in a process of its own.

`python door.py DATA MODEL|none` says where it is and the key that it wants.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from spooled.prompts import SLOTS, THREADS
from tests.support.fake_llm import FakeRunner

import penstock
from penstock.app.engine import Engine
from penstock.config.loading import load
from penstock.workloads.llm.executor import LlmExecutor


async def serve(data: Path, model: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with no_op(data) if model == "none" else real(data, model) as url:
        token = (data / "token").read_text().strip()
        print(json.dumps({"url": url, "key": token}), flush=True)
        await stop.wait()


@asynccontextmanager
async def real(data: Path, model: str) -> AsyncIterator[str]:
    running = penstock.App().run(
        data,
        http__listen="127.0.0.1:0",
        models__serve=(model,),
        models__slots=SLOTS,
        models__context=1024,
        models__threads=THREADS,
        concurrency=64,
    )
    async with running as ps:
        yield str(ps.url)


@asynccontextmanager
async def no_op(data: Path) -> AsyncIterator[str]:
    """A model that computes nothing, everything else as it is."""
    flags = {"data_dir": str(data), "http": {"listen": "127.0.0.1:0"}, "concurrency": 64}
    async with Engine(load(flags=flags), [LlmExecutor(FakeRunner(), ["fake"])]) as engine:
        yield engine.url


if __name__ == "__main__":
    try:
        import uvloop as loops
    except ImportError:
        loops = asyncio  # type: ignore[assignment]
    loops.run(serve(Path(sys.argv[1]), sys.argv[2]))
