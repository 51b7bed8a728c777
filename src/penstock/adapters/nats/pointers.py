"""The memory pointers of CAP, `redis://ctx:JOB` and `redis://res:JOB`, over the Redis protocol.

A small server that the SDK's own Redis client can use: `GET` and `SET` of keys. Values are the
engine's blobs. What a job's record points to is read from there, so a key outlives a restart as
soon as its job is accepted or has ended; before that it is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from penstock.core.errors import PenstockError
from penstock.core.job import Job
from penstock.ports.blobs import Blobs

log = logging.getLogger(__name__)

SCHEME = "redis://"
_MAX_KEYS = 100_000
_MAX_LINE = 1 << 16
_MAX_ARGUMENTS = 16
_HELLO = (
    b"%3\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:3\r\n"
)
_HELLO_2 = (
    b"*6\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:2\r\n"
)


class PointerStore:
    """Keys, and the blobs that they stand for."""

    def __init__(
        self, blobs: Blobs, find: Callable[[str], Awaitable[Job | None]], max_size: int = 64 << 20
    ) -> None:
        """`find` gives the record of a job."""
        self._blobs, self._find, self.max_size = blobs, find, max_size
        self._uris: OrderedDict[str, str] = OrderedDict()

    async def set(self, key: str, data: bytes) -> None:
        self._uris[key] = await self._blobs.put(data)
        self._uris.move_to_end(key)
        if len(self._uris) > _MAX_KEYS:
            self._uris.popitem(last=False)

    async def uri_of(self, pointer: str) -> str | None:
        """The blob that a pointer stands for."""
        key = pointer.removeprefix(SCHEME)
        if (uri := self._uris.get(key)) is not None:
            return uri
        kind, _, job_id = key.partition(":")
        job = await self._find(job_id) if kind in ("ctx", "res") else None
        if job is None:
            return None
        if kind == "ctx":
            return job.request.context_ptr or None
        return None if job.result is None else job.result.result_ptr

    async def get(self, key: str) -> bytes | None:
        uri = await self.uri_of(key)
        if uri is None:
            return None
        try:
            return await self._blobs.get(uri)
        except PenstockError as error:
            log.warning("can't read %s: %s", key, error)
            return None

    def forget(self, job_id: str) -> None:
        """The job's record has them now."""
        for kind in ("ctx", "res"):
            self._uris.pop(f"{kind}:{job_id}", None)


class RedisServer:
    """Serves a PointerStore; the password is the engine's token."""

    def __init__(self, store: PointerStore, token: str) -> None:
        self._store, self._token = store, token
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_LINE)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for client in [*self._clients]:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        session = _Session(self._store, self._token)
        try:
            while (command := await _read_command(reader, self._store.max_size)) is not None:
                writer.write(await session.answer(command))
                await writer.drain()
        except (ValueError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a Redis client was cut off", exc_info=True)
        except asyncio.CancelledError:
            pass
        finally:
            self._clients.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class _Session:
    def __init__(self, store: PointerStore, token: str) -> None:
        self._store, self._token = store, token
        self._is_in = False
        self._protocol = 2

    async def answer(self, command: list[bytes]) -> bytes:
        name, *args = command
        match name.upper(), args:
            case b"AUTH", [*_, password]:
                return (
                    b"+OK\r\n" if self._let_in(password) else _error("WRONGPASS invalid password")
                )
            case b"HELLO", _:
                return self._hello(args)
            case b"PING", _:
                return b"+PONG\r\n"
            case b"QUIT", _:
                return b"+OK\r\n"
            case _ if not self._is_in:
                return _error("NOAUTH the password is the engine's token")
            case ((b"CLIENT" | b"SELECT"), _):
                return b"+OK\r\n"
            case b"GET", [key]:
                return self._bulk(await self._store.get(_text(key)))
            case b"EXISTS", [key]:
                return b":%d\r\n" % (await self._store.uri_of(_text(key)) is not None)
            case b"SET", [key, value, *_]:
                try:
                    await self._store.set(_text(key), value)
                except PenstockError as error:
                    return _error(f"ERR {error.message}")
                return b"+OK\r\n"
        return _error("ERR unknown command")

    def _let_in(self, password: bytes) -> bool:
        self._is_in = hmac.compare_digest(password, self._token.encode())
        return self._is_in

    def _hello(self, args: list[bytes]) -> bytes:
        for at, word in enumerate(args):
            if word.upper() == b"AUTH" and not self._let_in(
                args[at + 2] if at + 2 < len(args) else b""
            ):
                return _error("WRONGPASS invalid password")
        if not self._is_in:
            return _error("NOAUTH the password is the engine's token")
        self._protocol = 3 if args and args[0] == b"3" else 2
        return _HELLO if self._protocol == 3 else _HELLO_2

    def _bulk(self, data: bytes | None) -> bytes:
        if data is None:
            return b"_\r\n" if self._protocol == 3 else b"$-1\r\n"
        return b"$%d\r\n%s\r\n" % (len(data), data)


def _text(key: bytes) -> str:
    return key.decode("utf-8", "replace")[:512]


def _error(message: str) -> bytes:
    return b"-" + message.replace("\r", " ").replace("\n", " ").encode() + b"\r\n"


async def _read_command(reader: asyncio.StreamReader, max_size: int) -> list[bytes] | None:
    """Raises ValueError for what is none."""
    line = await reader.readline()
    if not line:
        return None
    if not line.startswith(b"*"):
        raise ValueError("not an array")
    count = int(line[1:])
    if not 0 < count <= _MAX_ARGUMENTS:
        raise ValueError("a command of so many words")
    words = []
    for _ in range(count):
        line = await reader.readline()
        length = int(line[1:]) if line.startswith(b"$") else -1
        if not 0 <= length <= max_size:
            raise ValueError("a word of that length")
        words.append((await reader.readexactly(length + 2))[:-2])
    return words
