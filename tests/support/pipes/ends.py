"""Two ends of a wire, for tests: what they were told, and peers that do not keep to the rules."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import pytest
import uvloop

from penstock.workloads.pipes.wire.connection import (
    Admit,
    Connection,
    Listener,
    Terms,
    connect,
    head_of,
    listen,
)
from penstock.workloads.pipes.wire.identity import Identity, new_key, parse
from penstock.workloads.pipes.wire.messages import Bye, Counters, Hello, Kind, decode, encode

KEY = new_key()
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
_made: dict[tuple[str, str], Identity] = {}


def identity(node_id: str, key: str = KEY) -> Identity:
    if (key, node_id) not in _made:
        _made[key, node_id] = Identity.make(key, node_id)
    return _made[key, node_id]


def hello(node_id: str, **fields: Any) -> Hello:
    return Hello(node_id=node_id, boot="boot", **fields)


def patient(**terms: Any) -> Terms:
    """A machine may be slow: only who wants a deadline to pass gives a short one."""
    return Terms(**{"handshake": 20.0, **terms})


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run it in a new event loop of asyncio, and in one of uvloop. Nothing may be left to the
    loop's exception handler, unless the test has one of its own."""

    @pytest.mark.parametrize("loop", list(LOOPS))
    @wraps(test)
    def run(loop: str, **fixtures: Any) -> None:
        unhandled: list[dict[str, Any]] = []

        async def watched() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, told: unhandled.append(told))
            await test(**fixtures)

        with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
            runner.run(watched())
        assert unhandled == [], unhandled

    # pytest reads the signature to know which fixtures are wanted.
    import inspect

    wanted = inspect.signature(test)
    parameters = [
        inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY),
        *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in wanted.parameters.values()),
    ]
    run.__signature__ = wanted.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


class Noted:
    """A handler that notes what it is told."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[Connection] = asyncio.Queue()
        self.frames: asyncio.Queue[tuple[Kind, memoryview]] = asyncio.Queue()
        self.losses: asyncio.Queue[str] = asyncio.Queue()
        self.every: list[Connection] = []

    def connected(self, connection: Connection) -> None:
        self.every.append(connection)
        self.connections.put_nowait(connection)

    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        self.frames.put_nowait((kind, payload))

    def lost(self, connection: Connection, reason: str) -> None:
        self.losses.put_nowait(reason)


class Watched(Counters):
    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    def add(self, what: str) -> None:
        super().add(what)
        self.changed.set()


class Here:
    """A node that listens, with the id `here`."""

    def __init__(self, listener: Listener, noted: Noted, counters: Watched) -> None:
        self.listener, self.noted, self.counters = listener, noted, counters
        self.address = listener.address
        self.handlers = [noted]

    async def dial(
        self,
        node_id: str = "there",
        noted: Noted | None = None,
        admit: Admit | None = None,
        **terms: Any,
    ) -> Connection:
        noted = noted or Noted()
        self.handlers.append(noted)
        ends = (identity(node_id), hello(node_id), noted)
        return await connect(self.address, *ends, admit=admit, terms=patient(**terms))

    async def counted(self, what: str, times: int = 1) -> None:
        """Waits for it: who is refused may know it before the one who counts."""
        while self.counters[what] < times:
            self.counters.changed.clear()
            await self.counters.changed.wait()


@asynccontextmanager
async def here(
    noted: Noted | None = None, admit: Admit | None = None, **terms: Any
) -> AsyncIterator[Here]:
    noted, counters = noted or Noted(), Watched()
    ends = (identity("here"), hello("here"), noted)
    listener = await listen("127.0.0.1:0", *ends, patient(**terms), counters, admit)
    node = Here(listener, noted, counters)
    try:
        yield node
    finally:
        listener.close()
        await listener.wait_closed()
        for connection in [one for handler in node.handlers for one in handler.every]:
            connection.abort()
            await connection.wait_closed()


class Rough:
    """A peer that has the key, and says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, address: str, context: ssl.SSLContext | None) -> Rough:
        host, port = parse(address)
        name = "x" if context else None
        return cls(*await asyncio.open_connection(host, port, ssl=context, server_hostname=name))

    @classmethod
    async def greeted(cls, address: str, node_id: str = "there") -> Rough:
        rough = await cls.dial(address, identity(node_id).client)
        rough.say(Kind.HELLO, encode(hello(node_id)))
        kind, _ = await rough.hear()
        assert kind is Kind.HELLO
        return rough

    def say(self, kind: int, payload: bytes, size: int | None = None) -> None:
        told = len(payload) if size is None else size
        head = head_of(Kind.HELLO, told)[:4] + bytes([kind])
        self.writer.write(head + payload)

    async def hear(self) -> tuple[Kind, bytes]:
        head = await self.reader.readexactly(5)
        return Kind(head[4]), await self.reader.readexactly(int.from_bytes(head[:4], "little"))

    async def why(self) -> Bye:
        """The reason it is told at the end."""
        while True:
            kind, payload = await self.hear()
            if kind is Kind.BYE:
                return decode(payload, Bye)

    async def ended(self) -> None:
        """The other side closed it; what was still to be read is thrown away."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except OSError:
            pass

    def close(self) -> None:
        self.writer.transport.abort()
