"""What the dashboard asks of an engine: by the first look at a page, and by people who watch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ours.system import RARE, TENANTS, Figures, topic_of
from processes import process_seconds
from web.served import PENSTOCK, Served, figures_of, serving
from web.wire import Lines, request

FRAME = ["/v1/me", "/v1/status"]
"""Of every page."""
OVERVIEW = [
    *("/v1/status", "/v1/counts", "/v1/timeline?minutes=60", "/v1/pools", "/v1/workers"),
    "/v1/dead?limit=1&total=true",
]
STREAM = "/v1/stream?kind=counts&kind=worker&kind=pool"
EVERY = 30.0
"""Seconds after which an overview reads everything again although nothing happened."""
FILTERS: dict[str, dict[str, str]] = {
    "jobs": {},
    "jobs by state, few and old": {"state": "FAILED"},
    "jobs by topic": {"topic": topic_of(TENANTS[1])},
    "jobs by part of a topic, few and old": {"topic": f"*{RARE}*"},
    "jobs by tenant, few and old": {"tenant": RARE},
    "dead letters": {"dead": "true"},
}


async def first_looks(folder: Path, *, seconds: float) -> Figures:
    """Milliseconds of all requests of a page, one after another: median and worst (p99)."""
    async with serving(PENSTOCK, folder) as server:
        pages = {name: [*FRAME, *paths] for name, paths in _pages(server).items()}
        wanted = sorted({path for paths in pages.values() for path in paths})
        loads = [server.spec(paths=[path], seconds=seconds, warm_up=0.1) for path in wanted]
        found = dict(zip(wanted, await figures_of("web.load:drive_all", loads), strict=True))
    return {
        f"{name} {figure}": sum(found[path][figure] for path in paths)
        for name, paths in pages.items()
        for figure in ("p50_ms", "p99_ms")
    }


def _pages(server: Served) -> dict[str, list[str]]:
    job = server.get("/v1/jobs?limit=1")["jobs"][0]["job_id"]
    lists = {
        name: ["/v1/counts", "/v1/topics/schemas", f"/v1/jobs?{urlencode({**_LIST, **filters})}"]
        for name, filters in FILTERS.items()
    }
    parts = ("?why=true", "/history", "/children/counts", "/policy", "/result")
    tries = f"/v1/jobs?first_try={job}&limit=20"
    return {"overview": OVERVIEW, **lists, "a job": [*(f"/v1/jobs/{job}{p}" for p in parts), tries]}


_LIST = {"limit": "50", "why": "true", "total": "true"}


async def watched(folder: Path, *, viewers: int, seconds: float) -> Figures:
    """The share of a core that an idle engine takes with so many overviews open, and with none."""
    async with serving(PENSTOCK, folder) as server:
        loads = [server.spec(viewers=count, seconds=seconds) for count in (0, viewers)]
        alone, with_all = await figures_of("web.viewing:watch_all", loads)
    return {"alone": alone["share"], "watched": with_all["share"]}


def watch_all(specs: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [_watch(**spec) for spec in specs]


def _watch(
    address: tuple[str, int], token: str, pid: int, viewers: int, seconds: float
) -> dict[str, float]:
    """Each viewer has a stream open, and reads its page again every half minute."""
    lines = Lines(tuple(address), viewers + 1)
    reader, *streams = lines.all
    for stream in streams:
        lines.ask(stream, request("GET", STREAM, token), 0.0)
    time.sleep(1.0)
    used, begin = process_seconds(pid), time.perf_counter()
    reads = round(viewers * len(OVERVIEW) * seconds / EVERY)
    for n in range(reads):
        _drain(lines, streams, begin + n * seconds / reads)
        lines.ask(reader, request("GET", OVERVIEW[n % len(OVERVIEW)], token), 0.0)
        answered = False
        while not answered:
            for line in lines.ready(1.0):
                if line is reader:
                    answered = line.take()
                else:
                    line.socket.recv(1 << 16)
    _drain(lines, streams, begin + seconds)
    used = process_seconds(pid) - used
    lines.close()
    return {"share": used / (time.perf_counter() - begin)}


def _drain(lines: Lines, streams: list[Any], until: float) -> None:
    """Read what comes over the streams until a time."""
    while (left := until - time.perf_counter()) > 0:
        for line in lines.ready(left):
            line.socket.recv(1 << 16)
