"""One worker process: `python -m ours.worker FOLDER NAME SLOTS`."""

from __future__ import annotations

import asyncio
import signal
import sys

from ours.jobs import app

from penstock.adapters.link.address import Address
from penstock.app.site import Site
from penstock.cli.service import run_service
from penstock.config import load


async def main(folder: str, name: str, slots: str) -> None:
    settings = load(flags={"data_dir": folder, "concurrency": int(slots)})
    site = Site(app, Address(path=settings.socket), settings, worker_id=name)
    working = asyncio.ensure_future(site.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    await asyncio.gather(working, return_exceptions=True)


if __name__ == "__main__":
    run_service(main(*sys.argv[1:]))
