"""The engine's end of a link: bridges the bus, and answers calls.

Who may connect: on a Unix socket, whoever the file's mode lets in (its owner); on TCP,
whoever knows the token.
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
    Pub,
    Reply,
    Stop,
    Sub,
    Unsub,
    Welcome,
    Will,
    encode,
)
from penstock.adapters.link.pipelines import RECORDS
from penstock.core.errors import InvalidRequest, NotFound, PenstockError
from penstock.ports.bus import AnyMessage, Bus, Subscription
from penstock.ports.desk import PARTS
from penstock.ports.pipelines import PipelineStore

log = logging.getLogger(__name__)

_GREETING_TIMEOUT = 10.0
"""Seconds within which a connection must have said who it is."""
_MAX_STRANGERS = 1000
"""Connections that have not; one more ends the oldest of them."""


class LinkServer:
    """Listens on addresses; each connection is a client, a worker, or both."""

    def __init__(
        self, bus: Bus, desk: object, token: str, records: PipelineStore | None = None
    ) -> None:
        self._bus, self._token = bus, token
        handlers = {**_public(desk), **_named(RECORDS, records)}
        self._methods = {name: _Method(handler) for name, handler in handlers.items()}
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._strangers: dict[_Connection, None] = {}
        self._paths: list[str] = []

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
        self._strangers[connection] = None
        if len(self._strangers) > _MAX_STRANGERS:
            next(iter(self._strangers)).drop("there are too many connections without a greeting")
        return connection.protocol

    def _known(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)

    def _forget(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
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
        self._gone, self._known = gone, known
        self.protocol = FrameProtocol(self._take, self._lost)
        self.protocol.max_frame = MAX_GREETING
        self._late = asyncio.get_running_loop().call_later(
            _GREETING_TIMEOUT, self.drop, "no greeting came in time"
        )
        self._welcome = False
        self._will: Will | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def _take(self, frame: AnyFrame) -> None:
        if not self._welcome:
            self._greet(frame)
            return
        match frame:
            case Pub(subject, messages):
                self._bus.publish(subject, messages)
            case Call():
                self._calls[frame.id] = asyncio.create_task(self._answer(frame))
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

    def _greet(self, frame: AnyFrame) -> None:
        if not isinstance(frame, Hello) or frame.protocol != PROTOCOL:
            self._refuse("PROTOCOL", f"this engine speaks protocol {PROTOCOL}")
        elif self._token and not hmac.compare_digest(frame.token.encode(), self._token.encode()):
            self._refuse("NOT_PERMITTED", "the token is wrong or missing")
        else:
            self._welcome = True
            self._late.cancel()
            self._known(self)
            self.protocol.max_frame = MAX_FRAME
            self.protocol.send(Welcome(PROTOCOL))

    def _refuse(self, code: str, message: str) -> None:
        self.protocol.send(Failure(0, code, message))
        self.protocol.close()

    def drop(self, why: str) -> None:
        """End it without a word: nobody known is there."""
        self.protocol.abort(ConnectionError(why))

    def _forwarder(self, subject: str) -> Callable[[list[AnyMessage]], Any]:
        async def forward(messages: list[AnyMessage]) -> None:
            self.protocol.send(Pub(subject, messages))
            await self.protocol.sendable()

        return forward

    async def _answer(self, call: Call) -> None:
        try:
            method = self._methods.get(call.method)
            if method is None:
                raise NotFound(f"no call {call.method!r}")
            answer = method(call.params)
            if call.stream:
                async for value in answer:
                    self.protocol.send(Item(call.id, Raw(encode(value))))
                    await self.protocol.sendable()
                self.protocol.send(End(call.id))
            else:
                self.protocol.send(Reply(call.id, Raw(encode(await answer))))
        except PenstockError as error:
            self.protocol.send(Failure(call.id, error.code, error.message, error.hint, error.facts))
        except Exception as error:
            log.exception("the call %s failed", call.method)
            self.protocol.send(Failure(call.id, "ERROR", f"{type(error).__name__}: {error}"))
        finally:
            self._calls.pop(call.id, None)

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


def _public(desk: object) -> dict[str, Callable[..., Any]]:
    """Everything a caller can ask: the desk's methods, and its parts' as `part.method`."""
    handlers = _methods(desk)
    for part in PARTS:
        handlers.update(_named(part, getattr(desk, part, None)))
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


_NOT_FOR_CALLERS = frozenset({"serving", "listen", "close"})
