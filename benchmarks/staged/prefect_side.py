"""Prefect with its ephemeral server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from staged.clocked import STAGES, WARM_ITEMS, many, once, run


def measure(what: str, folder: Path, *, at_once: int, count: int) -> dict[str, float]:
    os.environ["PREFECT_HOME"] = str(folder)
    os.environ["PREFECT_LOGGING_LEVEL"] = "ERROR"
    os.environ["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"
    os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
    os.environ["DO_NOT_TRACK"] = "1"
    from prefect import flow, task

    @task
    async def nothing(n: int) -> int:
        return n

    @flow
    async def six() -> int:
        for n in range(STAGES):
            await nothing(n)
        return STAGES

    @flow
    async def items(n: int, at_once: int) -> int:
        for first in range(0, n, at_once):
            await asyncio.gather(*(nothing(first + k) for k in range(min(at_once, n - first))))
        return n

    if what == "jobs":
        return run(many(six, count, at_once))

    async def both() -> dict[str, float]:
        await items(WARM_ITEMS, at_once)
        return await once(lambda: items(count, at_once), count)

    return run(both())
