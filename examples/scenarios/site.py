"""A worker process: python -m scenarios.site DATA_DIR WORKER_ID APP"""

from __future__ import annotations

import asyncio
import signal
import sys

from penstock.adapters.link.address import Address
from penstock.app.site import Site
from penstock.config import load
from scenarios import jobs


async def main(data: str, worker_id: str, app: str) -> None:
    settings = load(flags={"data_dir": data})
    address = Address(path=settings.socket)
    site = Site(getattr(jobs, app), address, settings, worker_id=worker_id, pool="elsewhere")
    working = asyncio.create_task(site.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    await asyncio.gather(working, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
