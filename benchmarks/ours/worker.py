"""One worker process: `python -m ours.worker FOLDER NAME SLOTS`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from ours.jobs import app
from ours.system import PROFILE
from sampling import Sampler

from penstock.adapters.link.address import Address
from penstock.app.service import run_service
from penstock.app.worker_process import WorkerProcess
from penstock.config import load


async def main(folder: str, name: str, slots: str) -> None:
    settings = load(flags={"data_dir": folder, "concurrency": int(slots)})
    site = WorkerProcess(app, Address(path=settings.socket), settings, worker_id=name)
    working = asyncio.ensure_future(site.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    sampler = Sampler() if PROFILE in os.environ else None
    if sampler is not None:
        sampler.start()
    await asyncio.gather(working, return_exceptions=True)
    if sampler is not None:
        sampler.stop()
        sampler.save(Path(os.environ[PROFILE]))


if __name__ == "__main__":
    run_service(main(*sys.argv[1:]))
