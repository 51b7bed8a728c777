"""Servers to be measured, each in a process of its own: an engine with its HTTP API, and what is
possible at best, an endpoint that does next to nothing, as raw ASGI on two servers.

Each takes the folder for its data and says where it listens and what token it wants.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import uvicorn
from harness import Server
from ours.system import settings_for

from penstock.api.options import HttpOptions
from penstock.api.reply import EVENT_STREAM, JSON_HEADERS
from penstock.api.server import HttpServer
from penstock.api.stream import entry_frame
from penstock.app.engine import Engine
from penstock.core.job import IdSource
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.clock import SystemClock
from penstock.ports.store import JournalEvent

PENSTOCK, BARE, PLAIN = "penstock", "bare", "plain"
Where = tuple[str, int, str]
"""Host, port, token."""


def aimed_at(server: Server, **load: Any) -> dict[str, Any]:
    """What a load on this server is to be told."""
    host, port, token = server.told
    return {"address": (host, port), "token": token, "pid": server.pid, **load}


def get(server: Server, path: str) -> Any:
    host, port, token = server.told
    headers = {"Authorization": f"Bearer {token}"}
    with urlopen(Request(f"http://{host}:{port}{path}", headers=headers)) as reply:
        return json.load(reply)


class Wish(msgspec.Struct):
    topic: str
    input: msgspec.Raw


class Granted(msgspec.Struct):
    job_id: str
    topic: str


class Trivial:
    """POST: decode, make an id, encode. GET: an event stream, told of each POST to /events."""

    def __init__(self) -> None:
        self._ids = IdSource()
        self._decode = msgspec.json.Decoder(Wish).decode
        self._encode = msgspec.json.Encoder().encode
        self._next: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._told = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["method"] == "GET":
            await self._stream(send)
            return
        message = await receive()
        body = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        wish = self._decode(body)
        if scope["path"] == "/events":
            self._tell(wish)
        reply = self._encode(Granted(self._ids.next(time.time()), wish.topic))
        length = (b"content-length", b"%d" % len(reply))
        headers = [*JSON_HEADERS, length]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": reply})

    def _tell(self, wish: Wish) -> None:
        """One event to all readers, written once: the same bytes as Penstock's."""
        now = time.time()
        self._told += 1
        transition = Transition(
            self._ids.next(now), 1, None, JobEvent.ACCEPT, JobState.PENDING, 0, "gateway", now
        )
        told = self._next
        self._next = asyncio.get_running_loop().create_future()
        told.set_result(entry_frame(JournalEvent(self._told, "default", wish.topic, transition)))

    async def _stream(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await send({"type": "http.response.body", "body": b"id: 0\n\n", "more_body": True})
        while True:
            frame = await self._next
            await send({"type": "http.response.body", "body": frame, "more_body": True})


@asynccontextmanager
async def bare(folder: Path) -> AsyncIterator[Where]:
    """Penstock's server with the trivial application."""
    server = HttpServer(None, HttpOptions(port=0), clock=SystemClock())
    server.application = Trivial()
    url = await server.start()
    yield "127.0.0.1", int(url.rpartition(":")[2]), "none"


@asynccontextmanager
async def plain(folder: Path) -> AsyncIterator[Where]:
    """Uvicorn as it comes."""
    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        Trivial(), http="httptools", interface="asgi3", lifespan="off", log_config=None
    )
    config.access_log = False
    serving = asyncio.ensure_future(uvicorn.Server(config).serve(sockets=[bound]))
    yield "127.0.0.1", bound.getsockname()[1], "none"
    await serving


@asynccontextmanager
async def penstock(folder: Path) -> AsyncIterator[Where]:
    """An engine with its HTTP API."""
    settings = settings_for(folder).changed(http__listen="127.0.0.1:0")
    async with Engine(settings) as engine:
        token = settings.token_file.read_text().strip()
        yield "127.0.0.1", int(engine.url.rpartition(":")[2]), token
