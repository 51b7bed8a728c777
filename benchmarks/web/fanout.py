"""What it takes to tell many readers what happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ours.system import Figures
from web.served import BARE, JOB, PENSTOCK, figures_of, serving

_PATHS: dict[str, dict[str, Any]] = {
    BARE: {"events": "/events", "deeds": "/events", "events_each": 1},
    PENSTOCK: {"events": "/v1/stream?kind=job", "deeds": "/v1/jobs", "events_each": 2},
}
"""Where to read, where to POST, and what follows: a job is accepted, then scheduled."""


async def http_fanout(
    folder: Path, *, server: str, readers: list[int], rates: list[float], seconds: float
) -> Figures:
    """Processor time of the server an event and reader, beyond what no reader costs."""
    figures: Figures = {}
    paths = _PATHS[server]
    async with serving(server, folder) as served:
        common = served.spec(body=json.dumps(JOB), seconds=seconds, **paths)
        audiences = [
            common | {"readers": audience, "rate": rate / paths["events_each"]}
            for count, rate in zip(readers, rates, strict=True)
            for audience in (0, count)
        ]
        found = await figures_of("web.readers:watch_all", audiences)
    for count, alone, watched in zip(readers, found[::2], found[1::2], strict=True):
        extra = watched["cpu_s"] / watched["events"] - alone["cpu_s"] / alone["events"]
        figures |= {
            f"{count} cpu_us": extra / count * 1e6,
            f"{count} p50_ms": watched["p50_ms"],
            f"{count} p99_ms": watched["p99_ms"],
        }
    return figures
