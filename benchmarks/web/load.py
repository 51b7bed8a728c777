"""Load on a server, from a process of its own.

A closed loop: every connection sends its next request when the last one was answered.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from processes import percentile, process_seconds
from web.wire import BadReply, Lines, request


@dataclass(frozen=True)
class Load:
    """What to send, how, and for how long."""

    address: tuple[str, int]
    pid: int
    """The server's process, for its processor time."""
    token: str
    paths: list[str]
    """Asked for in turn."""
    method: str = "GET"
    body: str = ""
    kind: str = ""
    """The body's type, if it isn't JSON."""
    connections: int = 1
    seconds: float = 1.0
    warm_up: float = 0.3
    status: int = 200
    """What every answer has to be; anything else ends the measurement."""
    items: int = 0
    """How many lines a streamed answer has to have, each with a job's id."""


def drive(load: Load) -> dict[str, float]:
    wanted = cycle(
        [request(load.method, path, load.token, load.body, load.kind) for path in load.paths]
    )
    lines = Lines(tuple(load.address), load.connections)
    times, answered = array("d"), 0
    now = time.perf_counter()
    start, begun, took, used, own = now + load.warm_up, 0.0, 0.0, 0.0, 0.0
    for line in lines.all:
        lines.ask(line, next(wanted), now)
    under_way = load.connections
    while under_way:
        for line in lines.ready():
            if not line.take():
                continue
            now = time.perf_counter()
            _check(load, line.status, line.parts)
            answered += 1
            if begun and not took:
                times.append(now - line.since)
                # Where a request takes long, each connection is heard once all the same.
                if now >= begun + load.seconds and len(times) >= load.connections:
                    took, used = now - begun, process_seconds(load.pid) - used
                    own = time.process_time() - own
            elif not begun and now >= start:
                begun, used, own = now, process_seconds(load.pid), time.process_time()
            if took:
                under_way -= 1
            else:
                lines.ask(line, next(wanted), now)
    lines.close()
    return {
        "answered": answered,
        "rate": len(times) / took,
        "p50_ms": percentile(times, 0.5) * 1e3,
        "p99_ms": percentile(times, 0.99) * 1e3,
        "cpu_us": used / len(times) * 1e6,
        "load_us": own / len(times) * 1e6,
    }


def _check(load: Load, status: bytes, parts: list[bytes]) -> None:
    if int(status) != load.status:
        raise BadReply(f"{load.method} {load.paths[0]} answered {status.decode()}")
    if load.items and (found := b"".join(parts).count(b'{"job_id":')) != load.items:
        raise BadReply(f"{found} of {load.items} lines were accepted")


def drive_all(specs: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [drive(Load(**spec)) for spec in specs]
