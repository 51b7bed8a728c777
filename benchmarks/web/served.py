"""A server and what is aimed at it, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from harness import call
from ours.system import NOOP, until
from processes import kill, start

SERVED = "served.json"
"""Where a server says how to reach it."""
BARE, PLAIN, PENSTOCK = "bare", "plain", "penstock"
JOB = {"topic": NOOP, "input": {"sent": 0}}


@dataclass(frozen=True)
class Served:
    """A running server, seen from outside."""

    host: str
    port: int
    token: str
    pid: int

    def spec(self, **rest: Any) -> dict[str, Any]:
        """A task for a process that is aimed at this server."""
        address = (self.host, self.port)
        return {"address": address, "token": self.token, "pid": self.pid, **rest}

    def get(self, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        with urlopen(Request(f"http://{self.host}:{self.port}{path}", headers=headers)) as reply:
            return json.load(reply)


async def figures_of(function: str, specs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What a function finds out in a process of its own, one spec after another."""
    figures: list[dict[str, float]] = await asyncio.to_thread(call, function, specs)
    return figures


@asynccontextmanager
async def serving(kind: str, folder: Path) -> AsyncIterator[Served]:
    """A server until the end, which is a SIGKILL: what it has promised must be on disk."""
    told, log = folder.parent / SERVED, folder.parent / "serve.log"
    process = start([sys.executable, "-m", "web.serve", kind, str(folder)], log)
    try:
        await until(lambda: told.exists() or process.poll() is not None, 60.0)
        if not told.exists():
            raise RuntimeError(f"no server: {log.read_text()[-2000:]}")
        host, port, token = json.loads(told.read_text())
        yield Served(host, port, token, process.pid)
    finally:
        kill(process)
        told.unlink(missing_ok=True)
