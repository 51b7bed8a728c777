"""The memory pointers of CAP, `redis://ctx:JOB`, `redis://res:JOB` and `redis://art:JOB/NAME`, over
the Redis protocol.

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
from collections.abc import Awaitable, Callable, Container, Iterator
from itertools import count

from penstock.adapters.nats.packets import TRACE
from penstock.core.artifact import Artifact, check_name
from penstock.core.errors import InvalidRequest, PenstockError, UnreadablePointer
from penstock.core.job import Job
from penstock.core.pointer import data_media_type, decode_data
from penstock.ports.blobs import Blobs, keep_artifact

log = logging.getLogger(__name__)

SCHEME, DATA = "redis://", "data:"
_NO_INPUT = "data:application/json,{}"
"""What a job without input has as its input, unless a CAP client submitted it so."""
_MAX_KEYS = 100_000
_MAX_KEY = 2000
"""Characters; the longest of ours are of artifacts."""
_MAX_POINTERS = 256 << 10
"""Bytes of a result's artifact pointers: a NATS message has at most 1 MiB."""
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

    async def keep(self, pointer: str) -> str:
        """The blob of a `data:` URI. Raises InvalidRequest, and what `Blobs.put` raises."""
        return await self._blobs.put(decode_data(pointer), data_media_type(pointer))

    async def uri_of(self, pointer: str, tenant: str | None = None) -> str | None:
        """The blob that a pointer stands for; `tenant`: whose jobs it may be of, if not all."""
        key = pointer.removeprefix(SCHEME)
        if (uri := self._uris.get(key)) is not None:
            return uri
        kind, _, job_id = key.partition(":")
        name = ""
        if kind == "art":
            job_id, _, name = job_id.partition("/")
        job = await self._find(job_id) if kind in ("ctx", "res", "art") else None
        if job is None or tenant not in (None, job.request.tenant):
            return None
        if kind == "ctx":
            return job.request.context_ptr or (None if TRACE in job.request.env else _NO_INPUT)
        if job.result is None:
            return None
        if kind == "art":
            return next((one.pointer for one in job.result.artifacts if one.name == name), None)
        return job.result.result_ptr

    async def keep_artifact(self, name: str, pointer: str, tenant: str) -> Artifact:
        """Store what a pointer leads to under a name. Raises UnreadablePointer, InvalidRequest and
        what `Blobs` raises."""
        is_data = pointer.startswith(DATA)
        uri = pointer if is_data else await self.uri_of(pointer, tenant)
        if uri is None or not (is_data or pointer.startswith(SCHEME)):
            raise UnreadablePointer("artifact_ptrs", "is not found")
        return await keep_artifact(self._blobs, name, await self._blobs.get(uri))

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


def artifact_name(pointer: str, taken: Container[str]) -> str:
    """The name of a worker's artifact: what its key says behind `art:`, if that can be a name."""
    key = pointer.removeprefix(SCHEME) if pointer.startswith(SCHEME) else ""
    name = key.removeprefix("art:")
    try:
        if check_name(name) not in taken:
            return name
    except InvalidRequest:
        name = "artifact"
    return next(each for n in count(2) if (each := f"{name[:200]}-{n}") not in taken)


def artifact_pointers(job: Job) -> Iterator[str]:
    """Pointers to what a job left, as far as a packet has room for them."""
    left = job.result.artifacts if job.result is not None else ()
    room = _MAX_POINTERS
    for artifact in left:
        pointer = f"{SCHEME}art:{job.job_id}/{artifact.name}"
        room -= len(pointer.encode())
        if room < 0:
            log.warning("CAP: the result of %s does not name all of its artifacts", job.job_id)
            return
        yield pointer


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
    return key.decode("utf-8", "replace")[:_MAX_KEY]


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
