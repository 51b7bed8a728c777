"""An engine with its HTTP API and a model, in a process of its own.

`python door.py DATA MODEL` says where it is and the key that it wants.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from spooled.prompts import SLOTS, THREADS

import penstock


async def serve(data: Path, model: str) -> None:
    running = penstock.App().run(
        data,
        http="127.0.0.1:0",
        models=(model,),
        model_slots=SLOTS,
        model_context=1024,
        model_threads=THREADS,
        concurrency=64,
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running as ps:
        token = (data / "token").read_text().strip()
        print(json.dumps({"url": ps.url, "key": token}), flush=True)
        await stop.wait()


if __name__ == "__main__":
    try:
        import uvloop as loops
    except ImportError:
        loops = asyncio  # type: ignore[assignment]
    loops.run(serve(Path(sys.argv[1]), sys.argv[2]))
