"""One worker process of PgQueuer: `python -m peers.pgqueuer_worker URL BATCH`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import asyncpg
from marks import mark
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver


async def main(url: str, batch: int) -> None:
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(url)))

    @queuer.entrypoint("noop")
    async def noop(job: Any) -> None:
        mark(int(job.payload))

    @queuer.entrypoint("nap")
    async def nap(job: Any) -> None:
        await asyncio.sleep(0.02)
        mark(int(job.payload))

    await queuer.qm.run(batch_size=batch)


if __name__ == "__main__":
    try:
        from uvloop import run
    except ImportError:
        run = asyncio.run
    run(main(sys.argv[1], int(sys.argv[2])))
