"""Load on an HTTP server, and readers of its event streams, from a process of their own.

No library, because its own cost would be measured along. It knows only what the servers that are
measured here send: lower-case header names, a length or chunks.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from itertools import cycle
from typing import Any

from processes import percentile, process_seconds

Figures = dict[str, float]
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)")
_LAST_CHUNK = b"0\r\n\r\n"
_EVENT = b'"at":'
_SETTLE = 0.5
"""Seconds that what happened last has to reach everybody."""


class BadReply(Exception):
    pass


def request(method: str, path: str, token: str, body: str = "", kind: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
    if body:
        head += f"Content-Type: {kind or 'application/json'}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n{body}".encode("ascii")


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way."""

    transport: asyncio.Transport

    @classmethod
    async def to(cls, address: tuple[str, int]) -> Any:
        _, made = await asyncio.get_running_loop().create_connection(cls, *address)
        return made

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, sent: bytes) -> asyncio.Future[bytes]:
        """The status; `text` has the body if it came in chunks."""
        self._status, self._missing, self._parts = b"", -1, list[bytes]()
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.transport.write(sent)
        return self._answer

    @property
    def text(self) -> bytes:
        return b"".join(self._parts)

    def data_received(self, data: bytes) -> None:
        if not self._status:
            body = data.find(b"\r\n\r\n") + 4
            if body < 4:
                self._answer.set_exception(BadReply(f"not a head: {data[:200]!r}"))
                return
            self._status = data[9:12]
            if found := _LENGTH.search(data, 0, body):
                self._missing = body + int(found[1])
        if self._missing >= 0:
            self._missing -= len(data)
            is_complete = self._missing <= 0
        else:
            self._parts.append(data)
            is_complete = b"".join(self._parts[-6:]).endswith(_LAST_CHUNK)
        if is_complete:
            self._answer.set_result(self._status)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_exception(BadReply("the server hung up"))


async def drive(
    address: list[Any],
    token: str,
    pid: int,
    paths: list[str],
    *,
    method: str = "GET",
    body: str = "",
    kind: str = "",
    connections: int = 1,
    seconds: float = 1.0,
    warm_up: float = 0.3,
    status: int = 200,
    items: int = 0,
) -> Figures:
    """A closed loop: every connection sends its next request when the last one was answered.

    The paths are asked for in turn. Every answer must have the status, and a streamed one as many
    lines with a job's id as there are `items`; anything else ends the measurement.
    """
    wanted = cycle([request(method, path, token, body, kind) for path in paths])
    expected, times, answered = str(status).encode(), array("d"), 0
    is_counting, is_over, enough = False, False, asyncio.Event()

    async def ask(connection: Connection) -> None:
        nonlocal answered
        while not is_over:
            begin = time.perf_counter()
            if (found := await connection.ask(next(wanted))) != expected:
                raise BadReply(f"{method} {paths[0]} answered {found.decode()}")
            if items and (lines := connection.text.count(b'{"job_id":')) != items:
                raise BadReply(f"{lines} of {items} lines were accepted")
            answered += 1
            if is_counting:
                times.append(time.perf_counter() - begin)
                if len(times) == connections:
                    enough.set()
        connection.transport.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(connections):
            group.create_task(ask(await Connection.to((address[0], address[1]))))
        await asyncio.sleep(warm_up)
        begin, used, own = time.perf_counter(), process_seconds(pid), time.process_time()
        is_counting = True
        await asyncio.sleep(seconds)
        await enough.wait()  # where a request takes long, each connection is heard once
        is_counting, is_over = False, True
        took, used = time.perf_counter() - begin, process_seconds(pid) - used
        own = time.process_time() - own
    return {
        "answered": answered,
        "rate": len(times) / took,
        "p50_ms": percentile(times, 0.5) * 1e3,
        "p99_ms": percentile(times, 0.99) * 1e3,
        "cpu_us": used / len(times) * 1e6,
        "load_us": own / len(times) * 1e6,
    }


async def drive_all(loads: list[dict[str, Any]]) -> list[Figures]:
    """One after another."""
    return [await drive(**load) for load in loads]


class Stream(asyncio.Protocol):
    """A reader of events, which counts them and notes how old they are."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.seen, self.ages = 0, array("d")

    @classmethod
    async def to(cls, address: list[Any], opening: bytes) -> Stream:
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(cls, address[0], address[1])
        transport.write(opening)
        await stream.opened.wait()
        return stream

    def data_received(self, data: bytes) -> None:
        if not self.opened.is_set():
            assert b"200 OK" in data, data[:200]
            self.opened.set()
        if told := data.count(_EVENT):
            self.seen += told
            start = data.index(_EVENT) + len(_EVENT)
            # `at` of the first: when it was decided, just before it was committed.
            self.ages.append(time.time() - float(data[start : data.index(b",", start)]))


async def watch(
    address: list[Any],
    token: str,
    pid: int,
    *,
    readers: int,
    events: str,
    deeds: str,
    body: str,
    rate: float,
    events_each: int,
    seconds: float,
) -> Figures:
    """The server's processor time, and how old events are when they are read.

    `events` is the path of the stream, and `deeds` the one to POST to, so many times a second: so
    many events follow from each.
    """
    opening = request("GET", events, token)
    streams = [await Stream.to(address, opening) for _ in range(readers)]
    doer, deed = await Connection.to((address[0], address[1])), request("POST", deeds, token, body)

    async def act(seconds: float) -> int:
        begin, total = time.perf_counter(), max(1, round(seconds * rate))
        for n in range(total):
            await asyncio.sleep(max(0.0, begin + n / rate - time.perf_counter()))
            await doer.ask(deed)
        await asyncio.sleep(_SETTLE)
        return total * events_each

    await act(0.5)
    for stream in streams:
        stream.seen, stream.ages = 0, array("d")
    used = process_seconds(pid)
    happened = await act(seconds)
    used = process_seconds(pid) - used
    if (seen := sum(stream.seen for stream in streams)) != happened * readers:
        raise BadReply(f"{happened} events to {readers} readers, but {seen} were read")
    ages = [age for stream in streams for age in stream.ages] or [0.0]
    return {
        "event_us": used / happened * 1e6,
        "p50_ms": percentile(ages, 0.5) * 1e3,
        "p99_ms": percentile(ages, 0.99) * 1e3,
    }


async def watch_all(audiences: list[dict[str, Any]]) -> list[Figures]:
    """One after another."""
    return [await watch(**audience) for audience in audiences]


async def view(
    address: list[Any],
    token: str,
    pid: int,
    *,
    viewers: int,
    stream: str,
    paths: list[str],
    every: float,
    seconds: float,
) -> float:
    """The server's processor time in percent of a core: each viewer has the stream open, and reads
    all paths again every so many seconds."""
    for _ in range(viewers):
        await Stream.to(address, request("GET", stream, token))
    reader = await Connection.to((address[0], address[1]))
    await asyncio.sleep(1.0)
    used, begin = process_seconds(pid), time.perf_counter()
    reads = round(viewers * len(paths) * seconds / every)
    for n in range(reads):
        await asyncio.sleep(max(0.0, begin + n * seconds / reads - time.perf_counter()))
        await reader.ask(request("GET", paths[n % len(paths)], token))
    await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
    return (process_seconds(pid) - used) / (time.perf_counter() - begin) * 100
