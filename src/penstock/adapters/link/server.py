"""The engine's end of a link: bridges the bus, and answers calls.

A Unix socket is protected by its file mode (owner only), TCP clients must send the owner's token.
Over TLS a worker shows the certificate that it got when it joined, and may then speak as itself
and as nobody else; a client sends an API key, and has its rights and no bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import logging
import os
import socket
import ssl
import struct
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Protocol, cast

import msgspec
from msgspec import Raw

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    MAX_FRAME,
    MAX_GREETING,
    AnyFrame,
    Bye,
    Call,
    End,
    Failure,
    FrameProtocol,
    Hello,
    Item,
    Join,
    Joined,
    Ping,
    Pong,
    Pub,
    Reply,
    Stop,
    Sub,
    Trust,
    Trusted,
    Unsub,
    Welcome,
    Will,
    negotiated,
)
from penstock.adapters.link.proxy import BLOBS, RENEW, STATE
from penstock.adapters.link.secure import reason_of
from penstock.core.errors import (
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    NotOwner,
    NotPermitted,
    PenstockError,
    Superseded,
)
from penstock.ports.blobs import BlobUploads
from penstock.ports.bus import (
    CHECKPOINT,
    HANDSHAKE,
    HEARTBEAT,
    PROGRESS,
    RESULT,
    AnyMessage,
    Bus,
    Finished,
    Handshake,
    Subscription,
    jobs_of,
)
from penstock.ports.engine_api import OWNER, PARTS, Caller, KeyRole
from penstock.ports.process import ENGINE_TIMEOUT, bind_unix, close_in_children, fileno_of
from penstock.ports.shared_state import SharedState
from penstock.ports.tls import PEER_CERTIFICATE, SecureTransport, Tls

log = logging.getLogger(__name__)

_BEGIN_SUBMIT = ""
"""Not a name: nobody can call it."""
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds within which a connection must send its Hello."""
_MAX_UNAUTHENTICATED = 1000
"""Connections without a valid Hello; one more closes the oldest of them."""


_SWEEP = 1.0
"""Seconds after which a connection of a key that was revoked has ended."""
_FROM_WORKERS = frozenset({HANDSHAKE, HEARTBEAT, RESULT, PROGRESS, CHECKPOINT})
"""Subjects on which a worker may speak."""
_WORKER_ROLES = frozenset({KeyRole.SUBMIT, KeyRole.OPERATE})
"""What jobs on a worker elsewhere may do: submit and look after jobs, but not approve or manage."""


class KeyAccess(Protocol):
    """Who an API key belongs to, and what they may do."""

    def caller_of(self, token: str) -> Caller:
        """Raises NotAuthenticated."""

    def is_current(self, caller: Caller) -> bool:
        """Whether the key of a caller is still valid."""

    def api_for(self, caller: Caller) -> object: ...


class RemoteAccess(Protocol):
    """Who may connect over TLS, and as whom."""

    context: ssl.SSLContext
    authority: bytes
    """The certificate (PEM) by which a worker knows the engine."""

    def worker_of(self, certificate: bytes) -> tuple[str, Callable[[], bool]]:
        """The worker that has this certificate (DER), and what tells whether it is still valid.
        Raises NotAuthenticated."""

    async def join(self, token_id: str, secret: str, worker_id: str, request: bytes) -> bytes:
        """A certificate (PEM) for a new worker. Raises NotAuthenticated, Conflict."""

    async def renew(self, worker_id: str, request: bytes) -> bytes:
        """The next certificate of a worker."""

    def is_anothers(self, worker_id: str, job_id: str, attempt: int) -> bool:
        """Whether another worker than this one runs that attempt."""


@dataclass(frozen=True)
class _Grant:
    """What a connection may do."""

    methods: Mapping[str, Method]
    worker_id: str | None = None
    """Whose part of the bus it has; "" has none of it, None all."""
    is_current: Callable[[], bool] = lambda: True
    boot: int = 0


class LinkServer:
    """Accepts connections of clients and workers on one or more addresses."""

    def __init__(
        self,
        bus: Bus,
        api: object,
        token: str,
        state: SharedState | None = None,
        blobs: BlobUploads | None = None,
        remote: RemoteAccess | None = None,
        keys: KeyAccess | None = None,
    ) -> None:
        self.bus, self._token, self.remote, self._keys = bus, token, remote, keys
        for_workers = _named(STATE, state)
        if blobs is not None:
            for upload in (blobs.write_part, blobs.finish_upload, blobs.drop_upload):
                for_workers[f"{BLOBS}.{upload.__name__}"] = upload
        self._for_workers = _methods_of(for_workers)
        self._owner = _Grant({**api_methods(api), **self._for_workers})
        self._servers: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._unauthenticated: dict[_Connection, None] = {}
        self._introduced: dict[str, tuple[_Connection, str]] = {}
        """Which connection a worker said its name on, and the session that it said."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._paths: list[str] = []
        self.refused: Counter[str] = Counter()
        """Connections and messages that were refused, by reason."""
        close_in_children(self)

    def filenos(self) -> list[int]:
        listening = [each.fileno() for server in self._servers for each in server.sockets]
        return listening + [fileno_of(each.protocol.transport) for each in self._connections]

    async def listen(self, address: Address, bound: socket.socket | None = None) -> Address:
        """Start to listen, with the socket that is given or with one that is bound to the address;
        returns the address with the port that was given."""
        loop = asyncio.get_running_loop()
        if address.path is not None:
            path = str(address.path)
            if bound is None:
                bound = bind_unix(path)
                self._paths.append(path)
            server = await loop.create_unix_server(self._accept_local, sock=bound)
        else:
            accept = self._accept_secure if address.tls else self._accept_tcp
            if bound is None:
                server = await loop.create_server(accept, address.host, address.port)
            else:
                server = await loop.create_server(accept, sock=bound)
            port = server.sockets[0].getsockname()[1]
            address = Address(host=address.host, port=port, tls=address.tls)
            if address.tls and self._sweeping is None:
                self._sweep()
        self._servers.append(server)
        return address

    # -- who comes ---------------------------------------------------------------------------

    def _accept_local(self) -> FrameProtocol:
        return self._accept(self._greet_local).protocol

    def _accept_tcp(self) -> FrameProtocol:
        return self._accept(self._greet_token_holder).protocol

    def accept(self) -> _Connection:
        """A connection that comes another way than by a socket, and needs the token."""
        return self._accept(self._greet_token_holder)

    def _accept_secure(self) -> SecureTransport:
        assert self.remote is not None
        connection = self._accept(lambda hello: self._greet_remote(connection, hello))
        connection.is_remote = True
        tls = Tls(self.remote.context, server_side=True)
        return SecureTransport(connection.protocol, tls, server_side=True)

    def _accept(self, greet: Callable[[Hello], _Grant]) -> _Connection:
        connection = _Connection(self, greet)
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            self.refused["too_many_unauthenticated"] += 1
            next(iter(self._unauthenticated)).drop(
                "there are too many connections without a greeting"
            )
        return connection

    def _greet_local(self, hello: Hello) -> _Grant:
        """The engine's owner, as nobody else can open the socket; with a key, whose key it is."""
        return self._greet_key(hello.token) if hello.token and self._keys else self._owner

    def _greet_key(self, token: str) -> _Grant:
        keys = self._keys
        assert keys is not None
        caller = keys.caller_of(token)
        if caller is OWNER:
            return self._owner
        return _Grant(self._methods_for(caller), "", lambda: keys.is_current(caller))

    def _greet_token_holder(self, hello: Hello) -> _Grant:
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise NotPermitted("the token is wrong or missing")
        return self._owner

    def _greet_remote(self, connection: _Connection, hello: Hello) -> _Grant:
        remote, certificate = self.remote, connection.certificate
        assert remote is not None
        if certificate is None:
            return self._greet_key(hello.token)
        worker_id, is_valid = remote.worker_of(certificate)
        for other in [*self._connections]:
            if other.grant is None or other.grant.worker_id != worker_id:
                continue
            if other.grant.boot > hello.boot:
                raise Superseded(
                    f"a newer process of worker {worker_id} has connected",
                    hint="its certificate is in use twice: let each worker join by itself",
                )
            if other.grant.boot < hello.boot:
                other.refuse(Superseded(f"a newer process of worker {worker_id} has connected"))
        methods = {
            **self._methods_for(Caller(f"worker:{worker_id}", _WORKER_ROLES)),
            **self._for_workers,
            **_methods_of({RENEW: _Renewal(remote, worker_id).renew}),
        }
        return _Grant(methods, worker_id, is_valid, hello.boot)

    @lru_cache(maxsize=256)  # noqa: B019  (it lives as long as the engine)
    def _methods_for(self, caller: Caller) -> Mapping[str, Method]:
        assert self._keys is not None
        return api_methods(self._keys.api_for(caller))

    def authenticated(self, connection: _Connection) -> None:
        self._unauthenticated.pop(connection, None)

    def introduce(self, connection: _Connection, handshake: Handshake) -> None:
        """A worker whose process is gone makes room for the next one of its name, even if a child
        of it still holds the connection open."""
        other, session = self._introduced.get(handshake.worker_id, (connection, ""))
        if other is not connection and session != handshake.session and other.is_orphaned():
            other.drop("its process is gone")
        self._introduced[handshake.worker_id] = connection, handshake.session

    def forget(self, connection: _Connection) -> None:
        self._unauthenticated.pop(connection, None)
        self._connections.discard(connection)
        for worker_id, (one, _) in [*self._introduced.items()]:
            if one is connection:
                del self._introduced[worker_id]

    # -- who has to go -----------------------------------------------------------------------

    def recheck(self) -> None:
        """End the connections of keys and certificates that are not valid any more."""
        for connection in [*self._connections]:
            grant = connection.grant
            if grant is not None and not grant.is_current():
                connection.refuse(NotAuthenticated("the key or certificate was revoked"))

    def _sweep(self) -> None:
        self.recheck()
        self._sweeping = asyncio.get_running_loop().call_later(_SWEEP, self._sweep)

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self._connections):
            await connection.close()
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _Renewal:
    def __init__(self, remote: RemoteAccess, worker_id: str) -> None:
        self._remote, self._worker_id = remote, worker_id

    async def renew(self, request: bytes) -> bytes:
        return await self._remote.renew(self._worker_id, request)


class _Connection:
    def __init__(self, server: LinkServer, greet: Callable[[Hello], _Grant]) -> None:
        self._server, self._bus, self._greet = server, server.bus, greet
        self.grant: _Grant | None = None
        """None until it is authenticated."""
        self.is_remote = False
        self.protocol = FrameProtocol(self._take, self._lost, ENGINE_TIMEOUT)
        self.protocol.buffer.max_size = MAX_GREETING
        self._late = asyncio.get_running_loop().call_later(_HANDSHAKE_TIMEOUT, self._time_out)
        self._will: Will | None = None
        self._subscriptions: dict[str, Subscription] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def is_authenticated(self) -> bool:
        return self.grant is not None

    @property
    def certificate(self) -> bytes | None:
        transport = self.protocol.transport
        return None if transport is None else transport.get_extra_info(PEER_CERTIFICATE)

    def _take(self, frame: AnyFrame) -> None:
        if (grant := self.grant) is None:
            self._begin(frame)
            return
        match frame:
            case Pub(subject, messages):
                if self._may_say(grant, subject, messages):
                    for message in messages if subject == HANDSHAKE else ():
                        if isinstance(message, Handshake):
                            self._server.introduce(self, message)
                    self._bus.publish(subject, messages)
            case Call() if not grant.is_current():
                self._fail(frame, NotAuthenticated("the key or certificate is not valid any more"))
            case Call(call_id, "submit") if _BEGIN_SUBMIT in grant.methods:
                self._submit(frame, grant.methods[_BEGIN_SUBMIT])
            case Call(call_id):
                self._calls[call_id] = asyncio.create_task(self._answer(frame, grant))
            case Stop(call_id):
                if (task := self._calls.get(call_id)) is not None:
                    task.cancel()
            case Sub(subject):
                if grant.worker_id is not None and subject != jobs_of(grant.worker_id):
                    self._forbid(f"it may not listen to {subject}")
                elif subject not in self._subscriptions:
                    self._subscriptions[subject] = self._bus.subscribe(
                        subject, self._forwarder(subject)
                    )
            case Unsub(subject):
                if (subscription := self._subscriptions.pop(subject, None)) is not None:
                    self._finish(subscription.close())
            case Will(subject, messages):
                if self._may_say(grant, subject, messages):
                    self._will = frame
            case Bye():
                self._will = None
            case Ping():
                self.protocol.send(Pong())

    # -- the first frame ---------------------------------------------------------------------

    def _begin(self, frame: AnyFrame) -> None:
        remote = self._server.remote if self.is_remote else None
        match frame:
            case Hello():
                try:
                    protocol = negotiated(frame)
                    self.grant = self._greet(frame)
                except PenstockError as error:
                    self.refuse(error)
                else:
                    self._late.cancel()
                    self._server.authenticated(self)
                    self.protocol.buffer.max_size = MAX_FRAME
                    self.protocol.send(Welcome(protocol))
            case Trust() if remote is not None:
                self.protocol.send(Trusted(remote.authority))
            case Join() if remote is not None:
                self._finish(self._join(frame, remote))
            case _:
                self.refuse(InvalidRequest("frame", "the first one must be a greeting"))

    async def _join(self, frame: Join, remote: RemoteAccess) -> None:
        try:
            negotiated(Hello(frame.protocol))
            asked = (frame.token_id, frame.secret, frame.worker_id, frame.request)
            self.protocol.send(Joined(await remote.join(*asked)))
        except PenstockError as error:
            self.refuse(error)

    def refuse(self, error: PenstockError) -> None:
        """Say why, and end it."""
        self._server.refused[error.code.lower()] += 1
        if self.is_remote:
            log.warning("refused a connection from %s: %s", self._peer(), error.message)
        self.protocol.send(Failure.from_error(0, error))
        self.protocol.close()

    def _time_out(self) -> None:
        self._server.refused["handshake_timeout"] += 1
        self.drop("handshake timeout")

    def drop(self, why: str) -> None:
        """Close it at once, without an answer."""
        self.protocol.abort(ConnectionError(why))

    def is_orphaned(self) -> bool:
        """Whether the process at the other end of a Unix socket has ended."""
        transport = self.protocol.transport
        connection = None if transport is None else transport.get_extra_info("socket")
        if connection is None or connection.family != socket.AF_UNIX:
            return False
        if (option := getattr(socket, "SO_PEERCRED", None)) is None:
            return False
        found = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
        pid = _CREDENTIALS.unpack(found)[0]
        return pid > 0 and not os.path.exists(f"/proc/{pid}")

    def _peer(self) -> str:
        transport = self.protocol.transport
        name = None if transport is None else transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "a closed connection"

    # -- rights on the bus -------------------------------------------------------------------

    def _may_say(self, grant: _Grant, subject: str, messages: Sequence[AnyMessage]) -> bool:
        """Whether they speak of the worker itself, and of what it runs; else it is ended."""
        worker_id = grant.worker_id
        if worker_id is None:
            return True
        if not worker_id or subject not in _FROM_WORKERS:
            self._forbid(f"it may not publish to {subject}")
            return False
        remote = self._server.remote
        assert remote is not None
        for message in messages:
            said: Any = message.result if isinstance(message, Finished) else message
            named = getattr(said, "worker_id", worker_id)
            if named != worker_id:
                self._forbid(f"worker {worker_id} spoke as {named}")
                return False
            job_id = getattr(said, "job_id", None)
            if job_id is not None and remote.is_anothers(worker_id, job_id, said.attempt):
                self._forbid(f"worker {worker_id} spoke of job {job_id}, which another one runs")
                return False
        return True

    def _forbid(self, why: str) -> None:
        self.refuse(NotPermitted(why))

    def _forwarder(self, subject: str) -> Callable[[list[AnyMessage]], Any]:
        async def forward(messages: list[AnyMessage]) -> None:
            self.protocol.send(Pub(subject, messages))
            await self.protocol.sendable()

        return forward

    def _submit(self, call: Call, begin: Method) -> None:
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

    async def _answer(self, call: Call, grant: _Grant) -> None:
        try:
            method = grant.methods.get(call.method)
            if method is None or not call.method:
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
        if isinstance(error, NotOwner):
            self.drop("another engine owns the jobs now")  # the caller asks again, and finds it
            return
        if isinstance(error, PenstockError):
            failure = Failure.from_error(call.id, error)
        else:
            log.error("the call %s failed", call.method, exc_info=error)
            failure = Failure(call.id, "ERROR", f"{type(error).__name__}: {error}")
        self.protocol.send(failure)

    def _lost(self, error: Exception | None) -> None:
        self._late.cancel()
        if isinstance(error, ssl.SSLError) and self.grant is None:
            self._server.refused[reason_of(error)] += 1
            log.debug("a TLS handshake failed: %s", error)
        elif isinstance(error, ValueError | msgspec.MsgspecError) and self.grant is None:
            self._server.refused["invalid_frame"] += 1
        will, self._will = self._will, None
        if will is not None:
            self._bus.publish(will.subject, will.messages)
        for task in self._calls.values():
            task.cancel()
        for subscription in self._subscriptions.values():
            self._finish(subscription.close())
        self._subscriptions.clear()
        self._server.forget(self)

    def _finish(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._will = None
        calls = list(self._calls.values())
        self.protocol.close()
        self._lost(None)
        await asyncio.gather(*calls, *self._tasks, return_exceptions=True)


_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED has them."""


class Method:
    """Calls a handler with parameters checked against its signature."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self._handler = handler
        self._decode = _decoder(getattr(handler, "__func__", handler), hasattr(handler, "__self__"))

    def __call__(self, params: Raw) -> Any:
        try:
            arguments = self._decode(params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest("parameters", str(error)) from error
        return self._handler(**msgspec.structs.asdict(arguments))


@cache
def _decoder(function: Callable[..., Any], is_bound: bool) -> Callable[[Raw], Any]:
    """Reads the parameters of a function; the same for every caller that has it."""
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.items())[is_bound:]
    fields = [
        (name, hints[name])
        if parameter.default is parameter.empty
        else (name, hints[name], parameter.default)
        for name, parameter in parameters
    ]
    arguments = msgspec.defstruct("Arguments", fields, kw_only=True)
    return cast("Callable[[Raw], Any]", msgspec.msgpack.Decoder(arguments).decode)


def _methods_of(handlers: Mapping[str, Callable[..., Any]]) -> dict[str, Method]:
    return {name: Method(handler) for name, handler in handlers.items()}


def api_methods(api: object) -> dict[str, Method]:
    handlers = _public(api)
    if (begin := getattr(api, "begin_submit", None)) is not None:
        handlers[_BEGIN_SUBMIT] = begin
    return _methods_of(handlers)


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
