"""Readers of an event stream, in a process of their own.

Plain sockets that count `id:` lines and note how old each event is. One more connection makes
something happen at a steady rate, so that begin and end are known here.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any

from processes import percentile, process_seconds
from web.wire import BadReply, Line, Lines, request

_EVENT = b'"at":'
_SETTLE = 0.5
"""Seconds that what happened last has to reach everybody."""


@dataclass(frozen=True)
class Audience:
    """How many read what, and what makes it happen."""

    address: tuple[str, int]
    pid: int
    token: str
    readers: int
    events: str
    """The path of the stream."""
    deeds: str
    """The path to POST to."""
    body: str
    rate: float
    """POSTs a second."""
    events_each: int
    """How many events follow from one."""
    seconds: float


def watch(audience: Audience) -> dict[str, float]:
    """The server's processor time, and how old events are when they are read."""
    lines = Lines(tuple(audience.address), audience.readers + 1)
    doer, *readers = lines.all
    _open_all(lines, readers, request("GET", audience.events, audience.token))
    deed = request("POST", audience.deeds, audience.token, audience.body)
    _attend(lines, doer, deed, audience, 0.5)
    used = process_seconds(audience.pid)
    deeds, seen, ages = _attend(lines, doer, deed, audience, audience.seconds)
    used = process_seconds(audience.pid) - used
    lines.close()
    events = deeds * audience.events_each
    if seen != events * len(readers):
        raise BadReply(f"{events} events to {len(readers)} readers, but {seen} were read")
    return {
        "events": events,
        "cpu_s": used,
        "p50_ms": percentile(ages, 0.5) * 1e3 if ages else 0.0,
        "p99_ms": percentile(ages, 0.99) * 1e3 if ages else 0.0,
    }


def _open_all(lines: Lines, readers: list[Line], opening: bytes) -> None:
    for line in readers:
        lines.ask(line, opening, 0.0)
    opened: set[Line] = set()
    while len(opened) < len(readers):
        for line in lines.ready():
            if b"200 OK" in line.socket.recv(1 << 16):
                opened.add(line)


def _attend(
    lines: Lines, doer: Line, deed: bytes, audience: Audience, seconds: float
) -> tuple[int, int, array[float]]:
    """Do and read for so long: how much was done, how many events were read, and how old."""
    ages = array("d")
    deeds = seen = 0
    total = max(1, round(seconds * audience.rate))
    begin = time.perf_counter()
    busy, end = False, begin + seconds + 10.0
    while (now := time.perf_counter()) < end:
        due = begin + deeds / audience.rate
        if deeds == total and not busy:
            end = min(end, now + _SETTLE)
            due = end
        elif now >= due and not busy:
            lines.ask(doer, deed, now)
            deeds, busy = deeds + 1, True
            continue
        for line in lines.ready(max(0.0, due - now) if not busy else 0.05):
            if line is doer:
                busy = not doer.take()
                continue
            data = line.socket.recv(1 << 16)
            if told := data.count(_EVENT):
                seen += told
                ages.append(_age(data))
    return deeds, seen, ages


def _age(data: bytes) -> float:
    """Of the first event in it; `at` is when it was decided, just before it was committed."""
    start = data.index(_EVENT) + len(_EVENT)
    return time.time() - float(data[start : data.index(b",", start)])


def watch_all(specs: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [watch(Audience(**spec)) for spec in specs]
