"""The engine's end of a link: bridges the bus, and answers calls.

A Unix socket is protected by its file mode (owner only); TCP clients must send the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
import os
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    MAX_FRAME,
    MAX_GREETING,
    PROTOCOL,
    AnyFrame,
    Bye,
    Call,
    End,
    Failure,
    FrameProtocol,
    Hello,
    Item,
    Ping,
    Pong,
    Pub,
    Reply,
    Stop,
    Sub,
    Unsub,
    Welcome,
    Will,
)
from penstock.adapters.link.proxy import BLOBS, STATE
from penstock.core.errors import InvalidRequest, NotFound, PenstockError
from penstock.ports.blobs import BlobUploads
from penstock.ports.bus import AnyMessage, Bus, Subscription
from penstock.ports.engine_api import PARTS
from penstock.ports.process import ENGINE_TIMEOUT, close_in_children, fileno_of
from penstock.ports.shared_state import SharedState

log = logging.getLogger(__name__)

_BEGIN_SUBMIT = ""
"""Not a name: nobody can call it."""
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which a connection must send its Hello."""
_MAX_UNAUTHENTICATED = 1000
"""Connections without a valid Hello; one more closes the oldest of them."""


class LinkServer:
    """Accepts connections of clients and workers on one or more addresses."""

    def __init__(
        self,
        bus: Bus,
        api: object,
        token: str,
        state: SharedState | None = None,
        blobs: BlobUploads | None = None,
    ) -> None:
        self._bus, self._token = bus, token
        handlers = {**_public(api), **_named(STATE, state)}
        if blobs is not None:
            for upload in (blobs.write_part, blobs.finish_upload, blobs.drop_upload):
                handlers[f"{BLOBS}.{upload.__name__}"] = upload
        if (begin := getattr(api, "begin_submit", None)) is not None:
            handlers[_BEGIN_SUBMIT] = begin
        self._methods = {name: _Method(handler) for name, handler in handlers.items()}
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._unauthenticated: dict[_Connection, None] = {}
        self._paths: list[str] = []
        close_in_children(self)

    def filenos(self) -> list[int]:
        listening = [each.fileno() for server in self._servers for each in server.sockets]
        return listening + [fileno_of(each.protocol.transport) for each in self._connections]

    async def listen(self, address: Address) -> Address:
        """Start to listen; returns the address with the port that was given."""
        loop = asyncio.get_running_loop()
        if address.path is not None:
            path = str(address.path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            mask = os.umask(0o177)
            try:
                server = await loop.create_unix_server(lambda: self._accept(""), path)
            finally:
                os.umask(mask)
            self._paths.append(path)
        else:
            server = await loop.create_server(
                lambda: self._accept(self._token), address.host, address.port
            )
            address = Address(host=address.host, port=server.sockets[0].getsockname()[1])
        self._servers.append(server)
        return address

    def _accept(self, token: str) -> FrameProtocol:
        connection = _Connection(self._bus, self._methods, token, self._forget, self._known)
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            next(iter(self._unauthenticated)).drop(
                "there are too many connections without a greeting"
            )
        return connection.protocol

    def _known(self, connection: _Connection) -> None:
        self._unauthenticated.pop(connection, None)

    def _forget(self, connection: _Connection) -> None:
        self._unauthenticated.pop(connection, None)
        self._connections.discard(connection)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            await connection.close()
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _Connection:
    def __init__(
        self,
        bus: Bus,
        methods: Mapping[str, _Method],
        token: str,
        gone: Callable[[_Connection], None],
        known: Callable[[_Connection], None],
    ) -> None:
        self._bus, self._methods, self._token = bus, methods, token
        self._begin_submit = methods.get(_BEGIN_SUBMIT)
        self._gone, self._known = gone, known
        self.protocol = FrameProtocol(self._take, self._lost, ENGINE_TIMEOUT)
        self.protocol.buffer.max_size = MAX_GREETING
        self._late = asyncio.get_running_loop().call_later(
            _HANDSHAKE_TIMEOUT, self.drop, "handshake timeout"
        )
        self._welcome = False
        self._will: Will | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def _take(self, frame: AnyFrame) -> None:
        if not self._welcome:
            self._greet(frame)
            return
        match frame:
            case Pub(subject, messages):
                self._bus.publish(subject, messages)
            case Call(call_id, "submit") if self._begin_submit is not None:
                self._submit(frame, self._begin_submit)
            case Call(call_id):
                self._calls[call_id] = asyncio.create_task(self._answer(frame))
            case Stop(call_id):
                if (task := self._calls.get(call_id)) is not None:
                    task.cancel()
            case Sub(subject):
                if subject not in self._subscriptions:
                    self._subscriptions[subject] = self._bus.subscribe(
                        subject, self._forwarder(subject)
                    )
            case Unsub(subject):
                if (subscription := self._subscriptions.pop(subject, None)) is not None:
                    self._finish(subscription.close())
            case Will():
                self._will = frame
            case Bye():
                self._will = None
            case Ping():
                self.protocol.send(Pong())

    def _greet(self, frame: AnyFrame) -> None:
        if not isinstance(frame, Hello) or frame.protocol != PROTOCOL:
            self._refuse("PROTOCOL", f"this engine speaks protocol {PROTOCOL}")
        elif self._token and not hmac.compare_digest(frame.token.encode(), self._token.encode()):
            self._refuse("NOT_PERMITTED", "the token is wrong or missing")
        else:
            self._welcome = True
            self._late.cancel()
            self._known(self)
            self.protocol.buffer.max_size = MAX_FRAME
            self.protocol.send(Welcome(PROTOCOL))

    def _refuse(self, code: str, message: str) -> None:
        self.protocol.send(Failure(0, code, message))
        self.protocol.close()

    def drop(self, why: str) -> None:
        """Close it at once, without an answer."""
        self.protocol.abort(ConnectionError(why))

    def _forwarder(self, subject: str) -> Callable[[list[AnyMessage]], Any]:
        async def forward(messages: list[AnyMessage]) -> None:
            self.protocol.send(Pub(subject, messages))
            await self.protocol.sendable()

        return forward

    def _submit(self, call: Call, begin: _Method) -> None:
        """Answer the most frequent call, without a task."""
        try:
            begun, read = begin(call.params)
        except Exception as error:
            self._fail(call, error)
            return
        self._calls[call.id] = begun
        begun.add_done_callback(partial(self._submitted, call, read))

    def _submitted(
        self,
        call: Call,
        read: Callable[[asyncio.Future[Any]], object],
        done: asyncio.Future[Any],
    ) -> None:
        self._calls.pop(call.id, None)
        if not done.cancelled():
            try:
                self.protocol.send(Reply.of(call.id, read(done)))
            except Exception as error:
                self._fail(call, error)

    async def _answer(self, call: Call) -> None:
        try:
            method = self._methods.get(call.method)
            if method is None:
                raise NotFound(f"no call {call.method!r}")
            answer = method(call.params)
            if call.stream:
                async for value in answer:
                    self.protocol.send(Item.of(call.id, value))
                    await self.protocol.sendable()
                self.protocol.send(End(call.id))
            else:
                self.protocol.send(Reply.of(call.id, await answer))
        except Exception as error:
            self._fail(call, error)
        finally:
            self._calls.pop(call.id, None)

    def _fail(self, call: Call, error: Exception) -> None:
        if isinstance(error, PenstockError):
            failure = Failure.from_error(call.id, error)
        else:
            log.error("the call %s failed", call.method, exc_info=error)
            failure = Failure(call.id, "ERROR", f"{type(error).__name__}: {error}")
        self.protocol.send(failure)

    def _lost(self, error: Exception | None) -> None:
        self._late.cancel()
        will, self._will = self._will, None
        if will is not None:
            self._bus.publish(will.subject, will.messages)
        for task in self._calls.values():
            task.cancel()
        for subscription in self._subscriptions.values():
            self._finish(subscription.close())
        self._subscriptions.clear()
        self._gone(self)

    def _finish(self, closing: Any) -> None:
        task = asyncio.ensure_future(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        self._will = None
        calls = list(self._calls.values())
        self.protocol.close()
        self._lost(None)
        await asyncio.gather(*calls, *self._closing, return_exceptions=True)


class _Method:
    """Calls a handler with parameters checked against its signature."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler
        hints = typing.get_type_hints(handler)
        fields = [
            (name, hints[name])
            if parameter.default is parameter.empty
            else (name, hints[name], parameter.default)
            for name, parameter in inspect.signature(handler).parameters.items()
        ]
        arguments = msgspec.defstruct("Arguments", fields, kw_only=True)
        self._decode = msgspec.msgpack.Decoder(arguments).decode

    def __call__(self, params: Raw) -> Any:
        try:
            arguments = self._decode(params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest("parameters", str(error)) from error
        return self._handler(**msgspec.structs.asdict(arguments))


def _public(api: object) -> dict[str, Callable[..., Any]]:
    """Everything a caller can ask: the API's methods, and its parts' as `part.method`."""
    handlers = _methods(api)
    for part in PARTS:
        handlers.update(_named(part, getattr(api, part, None)))
    return handlers


def _named(part: str, thing: object) -> dict[str, Callable[..., Any]]:
    return {f"{part}.{name}": handler for name, handler in _methods(thing).items()}


def _methods(thing: object) -> dict[str, Callable[..., Any]]:
    return {
        name: handler
        for name in dir(thing)
        if not name.startswith("_")
        and name not in _NOT_FOR_CALLERS
        and inspect.ismethod(handler := getattr(thing, name))
    }


_NOT_FOR_CALLERS = frozenset({"serving", "begin_submit", "listen", "close"})
