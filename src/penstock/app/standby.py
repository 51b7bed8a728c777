"""An engine whose database another engine owns: it passes connections on, and stands by.

Every connection to its own addresses is passed on, byte by byte, to the same kind of address of
the owner, which authenticates the caller and answers. So a client or worker may connect to any
engine of a database. When the owner is gone, one of the engines that stand by owns the database,
and the others pass connections on to that one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from msgspec.structs import replace

from penstock import __version__
from penstock.adapters.link.address import Address
from penstock.adapters.link.server import bind_unix
from penstock.adapters.postgres.engines import STANDBY, EngineEntry, Engines
from penstock.adapters.sqlite.database import WriterLock
from penstock.api.server import AddressTaken, bind
from penstock.app.engine import http_options, make_private
from penstock.config import Settings
from penstock.config.loading import parse_host_port
from penstock.control.guard import digest_of
from penstock.core.errors import Misconfigured, StoreFailed

log = logging.getLogger(__name__)

_PATIENCE = 10.0
"""Seconds that a new connection waits for an owner: a takeover is shorter."""
_CHUNK = 1 << 16
_BACKLOG = 1024
_WILDCARDS = {"0.0.0.0", "::", ""}

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
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

    def __init__(self, settings: Settings, *, any_port: bool = False) -> None:
        self._settings, self._any_port = settings, any_port
        token = digest_of(settings.token_file.read_text().strip())
        entry = entry_of(STANDBY + secrets.token_hex(8), links=[], http="", token=token)
        self.engines = Engines(settings.store, entry)
        self.engines.on_look = self._compare
        self.http = ""
        self._sockets: dict[str, socket.socket] = {}
        self._servers: list[asyncio.Server] = []
        self._looking: asyncio.Task[None] | None = None
        self._passing: dict[asyncio.Task[None], str] = {}
        """What is passed on, and the holder of the owner that it goes to."""
        self._told: set[str] = set()

    async def start(self) -> None:
        """Raises Misconfigured, StoreFailed."""
        try:
            await self.engines.be_known()
            for text in self._settings.addresses:
                self._sockets[text] = _bound(Address.parse(text))
            if self._settings.link.listen:
                host, port = parse_host_port(self._settings.link.listen)
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
        """Pass connections on until nobody owns the database. Raises AlreadyRunning."""
        lock = WriterLock(self._settings.lock_file)
        try:
            await self._listen()
            self._look()
            while not self.engines.is_free:
                await self.engines.looked.wait()
        finally:
            for server in self._servers:
                server.close()
            self._servers.clear()
            lock.close()

    async def _listen(self) -> None:
        for name, bound in self.sockets().items():
            connect = {"http": self._to_http, "tls": self._to_tls}.get(name, self._to_link)
            accept = partial(self._accept, connect)
            is_unix = bound.family is socket.AF_UNIX
            start = asyncio.start_unix_server if is_unix else asyncio.start_server
            self._servers.append(await start(accept, sock=bound))

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
        await asyncio.gather(*tasks, return_exceptions=True)
        for name, bound in self._sockets.items():
            bound.close()
            if name not in ("tls", "http") and (path := Address.parse(name).path) is not None:
                path.unlink(missing_ok=True)
        await self.engines.close()

    # -- passing on ---------------------------------------------------------------

    def _accept(
        self, connect: Connect, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._pass_on(reader, writer, connect))
        self._passing[task] = ""
        task.add_done_callback(self._passing.pop)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Connect
    ) -> None:
        other: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_PATIENCE):
                if connect == self._to_link:
                    theirs, other = await self._greeted(reader, writer)
                else:
                    theirs, other = await self._connected(connect)
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(reader, other))
                both.create_task(_copy(theirs, writer))
        except* (OSError, StoreFailed, TimeoutError) as errors:
            log.debug("a connection ended: %s", errors.exceptions[0])
        finally:
            for stream in (writer, other):
                if stream is not None:
                    stream.transport.abort()

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams:
        """A link whose greeting is answered: an owner that dies before that costs nothing."""
        greeting = await reader.read(_CHUNK)
        while True:
            theirs, other = await self._connected(self._to_link)
            try:
                other.write(greeting)
                answer = await theirs.read(_CHUNK)
            except OSError:
                answer = b""
            if answer or not greeting:
                writer.write(answer)
                return theirs, other
            other.transport.abort()
            await self.engines.looked.wait()

    async def _connected(self, connect: Connect) -> Streams:
        """A connection to the owner, once there is one."""
        while True:
            if (owner := self.engines.owner) is not None:
                try:
                    streams = await connect(owner)
                    self._passing[cast(asyncio.Task[None], asyncio.current_task())] = owner.holder
                    return streams
                except OSError as error:
                    self._tell(f"can't connect to {owner.name}, which owns the jobs: {error}")
            await self.engines.looked.wait()

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
