"""The HTTP server, within the engine's own event loop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

import uvicorn
from msgspec.structs import replace

from penstock.api.about import Health
from penstock.api.agents import Agents, mcp_operations, serve_mcp
from penstock.api.application import ApiSpec, Application, Authenticate, by_key
from penstock.api.call import Services
from penstock.api.connection import Connection, protocol_with
from penstock.api.cors import Cors
from penstock.api.metrics import Traffic
from penstock.api.monitor import ConcurrencyLimit, RequestMonitor
from penstock.api.openai.models import Served
from penstock.api.openapi import document
from penstock.api.operations import OPERATIONS, alias_of, shape_of
from penstock.api.options import HttpOptions
from penstock.api.reply import SECURITY, encode
from penstock.api.sessions import FailedSignIns
from penstock.api.stream import EventStreams
from penstock.core.errors import Misconfigured
from penstock.dashboard.pages import page
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Authenticator
from penstock.ports.process import (
    ENGINE_TIMEOUT,
    bind_unix,
    close_in_children,
    fileno_of,
    keep_alive,
)

log = logging.getLogger(__name__)

_BACKLOG = 2048


class AddressTaken(Misconfigured):
    """The address is in use."""


class ApiServer:
    """An HTTP server, from `start` to `close`."""

    def __init__(
        self,
        spec: ApiSpec,
        authenticate: Authenticate,
        options: HttpOptions,
        *,
        clock: Clock,
        health: Callable[[], Health] = Health,
        sign_ins: Authenticator | None = None,
    ) -> None:
        self.options = options
        self._spec = spec
        self.url = ""
        self._monitor = RequestMonitor(clock.monotonic, options.stall)
        self._streams = ConcurrencyLimit(
            "open streams", options.max_streams, options.streams_per_key
        )
        self._waits = ConcurrencyLimit(
            "waiting requests", options.max_waiting, options.waiting_per_key
        )
        self._services = services = Services(
            options=options,
            clock=clock,
            health=health,
            monitor=self._monitor,
            streams=self._streams,
            waits=self._waits,
            events=EventStreams(heartbeat=options.heartbeat),
            traffic=Traffic(),
            models=Served(clock),
            document=spec.document,
            page=spec.page,
            failed_sign_ins=FailedSignIns(clock.monotonic),
            sign_ins=sign_ins,
            agents=Agents(options.max_body),
        )
        self.application = Application(authenticate, services, spec)
        self._server: uvicorn.Server | None = None
        self._bound: socket.socket | None = None
        self._round: asyncio.Task[None] | None = None

    @property
    def asgi(self) -> Callable[..., Awaitable[None]]:
        """The ASGI application that is served."""
        return self.application

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self._streams.count

    @property
    def waiting(self) -> int:
        """How many requests wait for a job."""
        return self._waits.count

    async def start(self, bound: socket.socket | None = None) -> str:
        """Listen, with the socket that is given or with one of its own; returns the URL.

        Raises Misconfigured for what can't be listened at.
        """
        options = self.options
        options.check()
        bound = bound or bind(options)
        try:
            server = uvicorn.Server(self._config())
            server.lifespan = server.config.lifespan_class(server.config)
            await server.on_tick(0)
            await server.startup(sockets=[bound])
        except BaseException:
            bound.close()
            raise
        self._server, self._bound = server, bound
        close_in_children(self)
        self._round = asyncio.get_running_loop().create_task(self._go_round(), name="http rounds")
        host = f"[{options.host}]" if ":" in options.host else options.host
        self.url = f"{options.scheme}://{host}:{bound.getsockname()[1]}"
        if options.unix_socket is not None:
            self.url = f"unix://{options.unix_socket}"
        log.info("listening at %s", self.url)
        return self.url

    def _config(self) -> uvicorn.Config:
        options = self.options
        config = uvicorn.Config(
            self.asgi,
            http=protocol_with(options, self._spec.problem),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=[(name.decode(), value.decode()) for name, value in SECURITY],
            timeout_keep_alive=max(1, int(options.keep_alive)),
            backlog=2048,
            ssl_certfile=options.certfile,
            ssl_keyfile=options.keyfile,
        )
        try:
            config.load()
        except OSError as error:  # of which an error of TLS is one
            raise Misconfigured(
                f"can't use the certificate {options.certfile}: {error}",
                hint="it must be in PEM form, with its key",
            ) from error
        return config

    async def _go_round(self) -> None:
        """About once a second: update the Date header, close late connections."""
        loop = asyncio.get_running_loop()
        pause = min(1.0, self.options.head_timeout / 4, self.options.stall / 4)
        assert self._server is not None
        while True:
            await asyncio.sleep(pause)
            await self._server.on_tick(0)
            self._monitor.look()
            now = loop.time()
            for connection in self._connections():
                connection.look(now)

    def filenos(self) -> list[int]:
        if self._server is None or self._bound is None:
            return []
        listening = [each.fileno() for one in self._server.servers for each in one.sockets]
        connections = [fileno_of(each.transport) for each in self._connections()]
        return [self._bound.fileno(), *listening, *connections]

    def _connections(self) -> list[Connection]:
        assert self._server is not None
        return list(self._server.server_state.connections)  # type: ignore[arg-type]

    async def close(self) -> None:
        """Stop listening, end streams and waits, give other requests time to finish."""
        server = self._server
        if server is None:
            return
        for listener in server.servers:
            listener.close()
        self._monitor.close()
        for connection in self._connections():
            connection.send_mail()
            connection.shutdown()
        await self._drain(server)
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)
        self._server = None

    async def _drain(self, server: uvicorn.Server) -> None:
        tasks = server.server_state.tasks
        if tasks:
            await asyncio.wait(set(tasks), timeout=self.options.grace)
        for connection in self._connections():
            connection.transport.abort() if tasks else connection.transport.close()
        for task in set(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        for connection in self._connections():
            connection.transport.abort()


def bind(options: HttpOptions) -> socket.socket:
    """Bind the listening socket. Raises Misconfigured."""
    if options.unix_socket is not None:
        return _bind_unix(options.unix_socket)
    host = options.host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise Misconfigured(
            f"can't listen at {options.host}:{options.port}: {error}", hint="choose another host"
        ) from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keep_alive(bound, ENGINE_TIMEOUT)  # what it accepts inherits it
        bound.setblocking(False)
        bound.bind(address)
        bound.listen(_BACKLOG)  # only now is the port ours
    except OSError as error:
        bound.close()
        refusal = AddressTaken if error.errno == errno.EADDRINUSE else Misconfigured
        raise refusal(
            f"can't listen at {options.host}:{options.port}: {error.strerror or error}",
            hint="stop what listens there, or choose another port; 0 takes a free one",
        ) from error
    return bound


def _bind_unix(path: Path) -> socket.socket:
    """Raises AddressTaken if somebody listens there; a socket that was left behind is replaced."""
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise Misconfigured(f"{path} is there and is not a socket", hint="move it away")
            with closing(socket.socket(socket.AF_UNIX)) as probe, suppress(ConnectionRefusedError):
                probe.connect(str(path))
                raise AddressTaken(f"another process listens at {path}", hint="stop it first")
        bound = bind_unix(str(path))
        bound.setblocking(False)
        bound.listen(_BACKLOG)
    except OSError as error:
        raise Misconfigured(
            f"can't listen at {path}: {error}", hint="choose another path"
        ) from error
    return bound


class HttpServer(ApiServer):
    """The API of an engine."""

    def __init__(
        self,
        authenticator: Authenticator,
        options: HttpOptions,
        *,
        clock: Clock,
        health: Callable[[], Health] = Health,
    ) -> None:
        authenticate = by_key(authenticator)
        cors = Cors.of(options.cors, checks=False) if options.cors else None
        spec = replace(ENGINE, cors=cors)
        super().__init__(
            *(spec, authenticate, options), clock=clock, health=health, sign_ins=authenticator
        )

    async def close(self) -> None:
        await self._services.agents.close()
        await super().close()


@cache
def _document() -> bytes:
    return encode(document(OPERATIONS))


@cache
def _page() -> bytes:
    return page(document(OPERATIONS)).encode()


ENGINE = ApiSpec(
    (*OPERATIONS, *mcp_operations(serve_mcp)), _document, _page, shape=shape_of, alias=alias_of
)
