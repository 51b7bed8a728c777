"""How fast jobs come in over HTTP: one by one and in bulk, and in process for comparison."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

from ours.system import NOOP, Figures, System, running, settings_for, start_workers
from processes import running as started
from web.served import JOB, PENSTOCK, figures_of, serving

from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data

BULK_CONNECTIONS = 4
"""So that the server has the next call at hand while it commits one."""
_NDJSON = "application/x-ndjson"


async def http_requests(
    folder: Path, *, server: str, seconds: float, connections: int, workers: int = 0
) -> Figures:
    """POST one small job a request, over many connections."""
    async with serving(server, folder) as served:
        with started(start_workers(folder, workers)):
            load = served.spec(
                method="POST",
                paths=["/v1/jobs"],
                body=json.dumps(JOB),
                connections=connections,
                seconds=seconds,
                status=201,
            )
            (figures,) = await figures_of("web.load:drive_all", [load])
    if server == PENSTOCK:
        check_stored(folder, figures["answered"])
    return {**figures}


async def http_bulk(folder: Path, *, sizes: list[int], lines: int, seconds: float) -> Figures:
    """Jobs accepted a second: batches of these sizes, and streams of so many lines."""
    figures: Figures = {}
    accepted = 0.0
    async with serving(PENSTOCK, folder) as served:
        common = served.spec(method="POST", connections=BULK_CONNECTIONS, seconds=seconds)
        kinds = {f"batch {size}": (size, _batch(size)) for size in sizes}
        kinds["stream"] = (lines, _stream(lines))
        found = await figures_of(
            "web.load:drive_all", [common | load for _, load in kinds.values()]
        )
    for (name, (size, _)), took in zip(kinds.items(), found, strict=True):
        accepted += size * took["answered"]
        figures[f"{name} rate"] = took["rate"] * size
        figures[f"{name} cpu_us"] = took["cpu_us"] / size
    check_stored(folder, accepted)
    return figures


def _batch(size: int) -> dict[str, Any]:
    return {"paths": ["/v1/jobs/batch"], "body": json.dumps({"jobs": [JOB] * size}), "status": 201}


def _stream(lines: int) -> dict[str, Any]:
    body = (json.dumps(JOB) + "\n") * lines
    return {"paths": ["/v1/jobs/stream"], "body": body, "kind": _NDJSON, "items": lines}


async def engine_bulk(folder: Path, *, sizes: list[int], seconds: float) -> Figures:
    """The same by calls of the engine's own EngineApi, as many in flight: its limit."""
    figures: Figures = {}
    async with running(folder) as system:
        for size in sizes:
            ends: list[float] = []
            over = asyncio.Event()
            producers = [
                asyncio.ensure_future(_submit_in_process(system, size, ends, over))
                for _ in range(BULK_CONNECTIONS)
            ]
            await asyncio.sleep(min(0.3, seconds / 3))
            begin, cpu = time.perf_counter(), time.process_time()
            await asyncio.sleep(seconds)
            finish, cpu = time.perf_counter(), time.process_time() - cpu
            over.set()
            await asyncio.gather(*producers)
            count = size * sum(begin <= end < finish for end in ends)
            figures |= {
                f"batch {size} rate": count / (finish - begin),
                f"batch {size} cpu_us": cpu / count * 1e6,
            }
    return figures


async def _submit_in_process(
    system: System, size: int, ends: list[float], over: asyncio.Event
) -> None:
    request = JobRequest(job_id="", topic=NOOP, context_ptr=encode_data(b'{"sent":0}'))
    while not over.is_set():
        await system.submit_requests([request] * size)
        ends.append(time.perf_counter())


def check_stored(folder: Path, accepted: float) -> None:
    """The server was killed: every job that it had accepted must be there all the same."""
    with sqlite3.connect(settings_for(folder).database) as file:
        (stored,) = file.execute("SELECT count(*) FROM job").fetchone()
    assert stored >= accepted, f"{accepted:.0f} jobs were accepted, the store has {stored}"
