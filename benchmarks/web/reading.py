"""What it takes to look at jobs over HTTP, with few and with many in the store."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlencode

from ours.system import RARE, TENANTS, Figures, topic_of
from web.served import PENSTOCK, Served, figures_of, serving

PAGE = 50
LISTINGS: dict[str, dict[str, str]] = {
    "all": {},
    "state, most jobs": {"state": "SUCCEEDED"},
    "state, few and old": {"state": "FAILED"},
    "tenant, a quarter": {"tenant": TENANTS[1]},
    "tenant, few and old": {"tenant": RARE},
    "topic, a quarter": {"topic": topic_of(TENANTS[1])},
    "topic, few and old": {"topic": topic_of(RARE)},
}
"""Filters, by name."""
DEEP = ("all", "state, most jobs", "tenant, a quarter", "topic, a quarter")
"""Those that also have a page from further down, by the cursor of the page before it."""
_GOT = 500
"""How many different jobs are asked for."""


async def http_reading(folder: Path, *, stores: list[int], seconds: float) -> Figures:
    """p50 and p99 of each request on each store. Stores take turns at each request."""
    figures: Figures = {}
    base = folder.parent
    async with AsyncExitStack() as stack:
        served = {
            stored: await stack.enter_async_context(serving(PENSTOCK, base / str(stored) / "data"))
            for stored in stores
        }
        wanted = {stored: _requests(server) for stored, server in served.items()}
        tasks = [(name, stored) for name in wanted[stores[0]] for stored in stores]
        loads = [
            served[stored].spec(paths=wanted[stored][name], seconds=seconds, warm_up=0.1)
            for name, stored in tasks
        ]
        found = await figures_of("web.load:drive_all", loads)
    for (name, stored), took in zip(tasks, found, strict=True):
        for figure in ("p50_ms", "p99_ms", "cpu_us"):
            figures[f"{name} {stored} {figure}"] = took[figure]
    return figures


def _requests(server: Served) -> dict[str, list[str]]:
    """The paths to ask for, by what they show."""
    newest = server.get("/v1/jobs?limit=1")["jobs"][0]["seq"]
    step = max(1, newest // _GOT)
    places = range(newest + 1, 1, -step)
    some = [server.get(f"/v1/jobs?limit=1&before={place}")["jobs"] for place in places]
    found = {"get one": [f"/v1/jobs/{jobs[0]['job_id']}" for jobs in some if jobs]}
    for name, filters in LISTINGS.items():
        found[name] = [_page(filters)]
    for name in DEEP:
        before = server.get(_page(LISTINGS[name]) + f"&before={newest * 3 // 4}")
        found[f"{name}, deep"] = [_page({**LISTINGS[name], "cursor": before["next"]})]
    return found


def _page(filters: dict[str, str]) -> str:
    return "/v1/jobs?" + urlencode({**filters, "limit": PAGE})
