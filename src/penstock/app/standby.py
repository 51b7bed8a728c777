"""An engine whose database another engine owns: it answers reads, forwards the rest, stands by.

A client or worker may connect to any engine of a database. Reads of jobs are answered from the
database itself. All else goes to the same kind of address of the owner, which authenticates the
caller again: requests over HTTP one by one, frames of a link one by one, and TLS connections byte
by byte. When the owner is gone, one of the engines that stand by owns the database, and the others
forward to that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from msgspec.structs import replace

from penstock import __version__
from penstock.adapters.link.address import Address
from penstock.adapters.link.relay import Relay, Streams
from penstock.adapters.postgres.engines import STANDBY, EngineEntry, Engines
from penstock.adapters.sqlite.database import WriterLock
from penstock.api.about import Health
from penstock.api.server import AddressTaken, bind
from penstock.app.engine import http_options, make_private
from penstock.app.front_door import FrontDoor, OwnerUrl, Reader
from penstock.config import Settings
from penstock.control.follower import OwnerNeeded
from penstock.control.guard import digest_of
from penstock.core.errors import Misconfigured, StoreFailed
from penstock.core.shards import Shard
from penstock.ports.address import parse_address
from penstock.ports.process import bind_unix

log = logging.getLogger(__name__)

_PATIENCE = 10.0
"""Seconds that a new connection waits for an owner: a takeover is shorter."""
_CHUNK = 1 << 16
_BACKLOG = 1024
_WILDCARDS = {"0.0.0.0", "::", ""}

Connect = Callable[[EngineEntry], Awaitable[Streams]]


def entry_of(holder: str, *, links: Sequence[Address], http: str, token: str) -> EngineEntry:
    """How an engine of this process is reached by the others."""
    return EngineEntry(
        holder=holder,
        name=f"{socket.gethostname()}:{os.getpid()}",
        machine=machine_id(),
        links=tuple(str(_advertised(link)) for link in links),
        http=_advertised_url(http) if http else "",
        token=token,
        version=__version__,
    )


def machine_id() -> str:
    """A name for this machine, as it runs now."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _advertised(link: Address) -> Address:
    if link.path is not None or link.host not in _WILDCARDS:
        return link
    return replace(link, host=socket.gethostname())


def _advertised_url(url: str) -> str:
    parts = urlsplit(url)
    if (parts.hostname or "") not in _WILDCARDS:
        return url
    return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"


class StandBy:
    """Listens where its engine would; `run` returns when the database has no owner.

    It keeps its sockets when its engine owns the database: a connection that comes meanwhile waits.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        any_port: bool = False,
        shard: Shard | None = None,
        home: str = "",
        may_own: Callable[[], bool] = lambda: True,
        owner_url: OwnerUrl | None = None,
    ) -> None:
        """`shard` and `home` as for an Engine. `may_own`: whether this process is to own it, if
        nobody does. `owner_url` finds the owners of other shards."""
        self._owner_url_of = owner_url
        self._settings, self._any_port, self._may_own = settings, any_port, may_own
        token = settings.token_file.read_text().strip()
        holder = STANDBY + secrets.token_hex(8)
        entry = entry_of(holder, links=[], http="", token=digest_of(token))
        self.engines = Engines(settings.store, entry)
        self.engines.on_look = self._compare
        self._reader = Reader(settings, token, self.engines.opens, shard or Shard(), home)
        self.http = ""
        self._sockets: dict[str, socket.socket] = {}
        self._servers: list[asyncio.Server] = []
        self._front_door: FrontDoor | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._passing: dict[asyncio.Task[None], str] = {}
        """What is passed on, and the holder of the owner that it goes to."""
        self._told: set[str] = set()

    async def start(self) -> None:
        """Raises Misconfigured, StoreFailed."""
        try:
            await self.engines.be_known()
            await self._reader.renew()
            for text in self._settings.addresses:
                self._sockets[text] = _bound(Address.parse(text))
            if self._settings.link.listen:
                host, port = parse_address(self._settings.link.listen)
                self._sockets["tls"] = _bound(Address(host=host, port=port, tls=True))
            if self._settings.http.listen:
                self._bind_http()
        except BaseException:
            await self.close()
            raise

    def _bind_http(self) -> None:
        options = http_options(self._settings)
        try:
            bound = bind(options)
        except AddressTaken:
            if not self._any_port or not options.port:
                raise
            bound = bind(replace(options, port=0))
        self._sockets["http"] = bound
        self.http = f"{options.scheme}://{options.host}:{bound.getsockname()[1]}"

    def sockets(self) -> dict[str, socket.socket]:
        """For an engine of this process to listen with; they are its own to close."""
        return {name: bound.dup() for name, bound in self._sockets.items()}

    async def run(self) -> None:
        """Pass connections on until nobody owns the database, and this process may.

        Raises AlreadyRunning.
        """
        lock = WriterLock(self._settings.lock_file)
        try:
            await self._listen()
            self._look()
            while not (self.engines.is_free and self._may_own()):
                await self.engines.looked.wait()
                with contextlib.suppress(StoreFailed):  # then there is nothing to read, either
                    await self._reader.renew()
        finally:
            for server in self._servers:
                server.close()
            self._servers.clear()
            self._close_front_door()
            lock.close()

    def _close_front_door(self) -> None:
        """Listen no more; requests that wait for the next owner get time to finish."""
        front_door, self._front_door = self._front_door, None
        if front_door is not None:
            task = asyncio.get_running_loop().create_task(front_door.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _listen(self) -> None:
        for name, bound in self.sockets().items():
            if name == "http" and not self._settings.http.certificate:
                await self._open_front_door(bound)
                continue
            is_unix = bound.family is socket.AF_UNIX
            passing = {
                "http": partial(self._pass_on, connect=self._to_http),
                "tls": partial(self._pass_on, connect=self._to_tls),
            }.get(name, partial(self._relay, is_private=is_unix))
            accept = partial(self._accept, passing)
            start = asyncio.start_unix_server if is_unix else asyncio.start_server
            self._servers.append(await start(accept, sock=bound))

    async def _open_front_door(self, bound: socket.socket) -> None:
        options = http_options(self._settings)
        front_door = FrontDoor(self._reader, options, self._route, self._health)
        await front_door.start(bound)
        self._front_door = front_door

    def _health(self) -> Health:
        if self.engines.owner is None:
            return Health(False, ("no engine owns the database",))
        return Health()

    def _look(self) -> None:
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self.engines.run())

    def _compare(self) -> None:
        """End connections to an engine that was replaced: it may be paused, and never answer."""
        owner = self.engines.owner
        if owner is None:
            return
        for task, holder in self._passing.items():
            if holder and holder != owner.holder:
                task.cancel()
        if owner.version != __version__:
            self._tell(f"{owner.name} owns the database with version {owner.version}")

    def _tell(self, text: str) -> None:
        """Once each."""
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)

    async def close(self) -> None:
        """End all that is passed on."""
        tasks = [*self._passing] + ([] if self._looking is None else [self._looking])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._closing, return_exceptions=True)
        await self._reader.close()
        for name, bound in self._sockets.items():
            bound.close()
            if name not in ("tls", "http") and (path := Address.parse(name).path) is not None:
                path.unlink(missing_ok=True)
        await self.engines.close()

    # -- passing on ---------------------------------------------------------------

    def _accept(
        self,
        passing: Callable[..., Coroutine[Any, Any, None]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._ended(passing, reader, writer))
        self._passing[task] = ""
        task.add_done_callback(self._passing.pop)

    async def _ended(
        self,
        passing: Callable[..., Coroutine[Any, Any, None]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            await passing(reader, writer)
        except* (OSError, StoreFailed) as errors:
            log.debug("a connection ended: %s", errors.exceptions[0])
        finally:
            writer.transport.abort()

    async def _relay(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_private: bool
    ) -> None:
        reads_of = partial(self._reader.reads_of, is_private=is_private)
        connect = partial(self._connected, self._to_link, _this_task())
        await Relay((reader, writer), reads_of, connect, OwnerNeeded).run()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Connect
    ) -> None:
        async with asyncio.timeout(_PATIENCE):
            theirs, other = await self._connected(connect, _this_task())
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, other))
                both.create_task(_copy(theirs, writer))
        finally:
            other.transport.abort()

    async def _connected(self, connect: Connect, task: asyncio.Task[None]) -> Streams:
        """A connection of this task to the owner, once there is one."""
        while True:
            owner = await self._owner(task)
            try:
                return await connect(owner)
            except OSError as error:
                self._tell(f"can't connect to {owner.name}, which owns the jobs: {error}")
            await self.engines.looked.wait()

    async def _owner(self, task: asyncio.Task[None]) -> EngineEntry:
        """Whom this task depends on from now on."""
        while (owner := self.engines.owner) is None:
            await self.engines.looked.wait()
        self._passing[task] = owner.holder
        return owner

    async def _route(self, shard: int) -> str:
        if shard == self._reader.shard or self._owner_url_of is None:
            return await self.owner_url()
        return await self._owner_url_of(shard)

    async def owner_url(self) -> str:
        """For a request over HTTP, which ends with its task."""
        task = _this_task()
        task.add_done_callback(lambda task: self._passing.pop(task, None))
        async with asyncio.timeout(_PATIENCE):
            while not (owner := await self._owner(task)).http:
                self._tell(f"can't connect to {owner.name}, which owns the jobs: no HTTP port")
                await self.engines.looked.wait()
        return owner.http

    async def _to_link(self, owner: EngineEntry) -> Streams:
        """Only on the same machine: this link is not encrypted."""
        if owner.machine == self.engines.entry.machine:
            for link in map(Address.parse, owner.links):
                if link.path is not None:
                    return await asyncio.open_unix_connection(link.path)
                if not link.tls:
                    return await asyncio.open_connection(link.host, link.port)
        raise OSError("it is on another machine; connect with penstock://HOST:PORT or over HTTP")

    async def _to_tls(self, owner: EngineEntry) -> Streams:
        for link in map(Address.parse, owner.links):
            if link.tls:
                return await asyncio.open_connection(link.host, link.port)
        raise OSError("it does not listen for other machines; see link.listen in the settings")

    async def _to_http(self, owner: EngineEntry) -> Streams:
        parts = urlsplit(owner.http)
        if not parts.hostname:
            raise OSError("it has no HTTP port")
        return await asyncio.open_connection(parts.hostname, parts.port)


def _this_task() -> asyncio.Task[None]:
    return cast(asyncio.Task[None], asyncio.current_task())


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def _bound(address: Address) -> socket.socket:
    """A socket that listens there. Raises Misconfigured."""
    try:
        if address.path is not None:
            make_private(address.path.parent)
            bound = bind_unix(str(address.path))
        else:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            bound = socket.create_server((address.host, address.port), family=family)
        bound.setblocking(False)
        bound.listen(_BACKLOG)
    except OSError as error:
        raise Misconfigured(
            f"can't listen at {address}: {error.strerror or error}", hint="choose another address"
        ) from error
    return bound
