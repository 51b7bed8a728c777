"""The ASGI application: host check, routing, authentication, rate limit and error replies."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import aclosing
from hmac import compare_digest
from time import perf_counter
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from penstock.api.call import Call, Services
from penstock.api.connection import Connection
from penstock.api.cors import Cors
from penstock.api.decoding import refuse_query
from penstock.api.monitor import Closing, Gone, RateLimit, Receive, Stalled
from penstock.api.operation import PUBLIC, Allowed, Operation, Pace, Router, allow_header
from penstock.api.problems import ProblemReply, Refused, problem_reply
from penstock.api.reply import LARGE, NO_STORE, AppReply, Headers, Reply, Send, StreamReply
from penstock.api.sessions import check_page, token_of
from penstock.core.errors import NotAuthenticated, NotFound
from penstock.ports.engine_api import Authenticator, KeyRole, Session

log = logging.getLogger(__name__)
access_log = logging.getLogger("penstock.access")

R = TypeVar("R", Reply, StreamReply)
Sent = Reply | StreamReply | int
"""A reply, or the status of one that was already sent."""

_MOST_HOSTS = 256
"""Maximum number of cached Host headers."""


class Application:
    """Holds counters only; all other state is behind the operations."""

    def __init__(self, authenticate: Authenticate, services: Services, spec: ApiSpec) -> None:
        self._authenticate, self._services = authenticate, services
        self._problem: ProblemReply = spec.problem
        self._shape, self._alias = spec.shape, spec.alias
        self._cors: Cors | None = spec.cors
        self._router = Router(spec.operations)
        options = services.options
        self._hosts = options.hosts
        self._ignore_unknown = options.ignore_unknown
        self._known_hosts: set[bytes] = set()
        self._rate_limit = None
        if options.rate > 0:
            self._rate_limit = RateLimit(options.rate, options.burst, services.clock.monotonic)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = perf_counter()
        reply: Sent | AppReply
        try:
            try:
                call = self._admit(scope, receive)
                if call.operation.pace is Pace.PROMPT:
                    reply = await call.operation.handler(call)
                    if isinstance(reply, AppReply):
                        reply = await self._serve_app(reply, scope, receive, send)
                    elif isinstance(reply, StreamReply) and reply.counted:
                        with self._services.streams.passing(call.caller):
                            reply = await self._stream(reply, scope, receive, send)
                else:
                    reply = await self._at_length(call, send)
            except Gone:
                raise
            except Allowed as known:
                reply = Reply(b"", 204, (allow_header(known.methods), NO_STORE))
            except Exception as error:
                reply = self._problem_for(scope)(error)
            self._count(scope, reply, perf_counter() - begun)
            if isinstance(reply, Reply):
                if len(reply.body) >= LARGE and _takes_gzip(scope):
                    reply = await reply.compressed()
                if self._cors is not None:
                    reply = self._dressed(reply, scope)
                connection = scope.get("penstock.connection")
                if (
                    connection is None
                    or reply.status >= 300
                    or not connection.answer(send.__self__, reply)  # type: ignore[attr-defined]
                ):
                    await reply.send(send)
            elif isinstance(reply, StreamReply):
                await self._stream(reply, scope, receive, send)
        except (Gone, asyncio.CancelledError):
            return  # nobody is there any more, or the server's patience has ended

    def _problem_for(self, scope: dict[str, Any]) -> ProblemReply:
        """The error format of the API that was called."""
        operation: Operation | None = scope.get("penstock.operation")
        if operation is not None:
            return operation.problem or self._problem
        found = self._shape(scope["path"]) if self._shape is not None else None
        return found or self._problem

    def _dressed(self, reply: R, scope: dict[str, Any]) -> R:
        """The reply with CORS headers, if there are any."""
        if self._cors is None:
            return reply
        more: Headers = self._cors.headers(dict(scope["headers"]))
        return replace(reply, headers=(*reply.headers, *more)) if more else reply

    def _count(self, scope: dict[str, Any], reply: Sent, seconds: float) -> None:
        operation: Operation | None = scope.get("penstock.operation")
        prompt = operation is not None and operation.pace is Pace.PROMPT
        if isinstance(reply, int) or "penstock.waited" in scope:
            prompt = False
        status = reply if isinstance(reply, int) else reply.status
        self._services.traffic.count(operation, status, seconds if prompt else None)
        if self._services.options.access_log:
            _log_access(scope, status, seconds)

    # -- in -----------------------------------------------------------------------

    def _see_host(self, scope: dict[str, Any], headers: dict[bytes, bytes]) -> None:
        host = headers.get(b"host")
        if host not in self._known_hosts:
            self._check_host(host, scope["http_version"])

    def _identify(self, scope: dict[str, Any], headers: dict[bytes, bytes]) -> Session:
        session = scope["penstock.session"] = self._session(scope, headers)
        if self._rate_limit is not None:
            caller = session.caller
            self._rate_limit.take(caller.key_id or caller.principal)
        return session

    def _admit(self, scope: dict[str, Any], receive: Receive) -> Call:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        self._see_host(scope, headers)
        if self._cors is not None:
            self._cors.check(scope["method"], headers)
        operation, params = self._find(scope)
        scope["penstock.operation"] = operation
        call = Call(scope, headers, receive, self._services, operation, params)
        if operation.role is not PUBLIC:
            call.session = self._identify(scope, headers)
            _check_role(call.session, operation, params)
        if operation.query is None and scope["query_string"] and not self._ignore_unknown:
            refuse_query(scope["query_string"])
        return call

    def _session(self, scope: dict[str, Any], headers: dict[bytes, bytes]) -> Session:
        """The caller's session. A key that is repeated on one connection is not hashed again."""
        if b"cookie" in headers and (session := self._browser_session(scope, headers)) is not None:
            return session
        connection: Connection | None = scope.get("penstock.connection")
        given = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        if connection is not None and (session := connection.session) is not None:
            is_current = session.is_current
            if compare_digest(given, connection.authorization) and is_current and is_current():
                return session
        session = self._authenticate(headers)
        if connection is not None:
            connection.session, connection.authorization = session, given
        return session

    def _browser_session(
        self, scope: dict[str, Any], headers: Mapping[bytes, bytes]
    ) -> Session | None:
        sign_ins = self._services.sign_ins
        if sign_ins is None or not (token := token_of(scope, headers)):
            return None
        session = sign_ins.resume(token)
        check_page(scope["method"], headers, token)
        return session

    def _find(self, scope: dict[str, Any]) -> tuple[Operation, dict[str, str]]:
        path = scope["raw_path"].decode("ascii")
        if self._ignore_unknown and len(path) > 1:
            path = path.rstrip("/")
        try:
            return self._router.find(scope["method"], path)
        except NotFound:
            if self._alias is not None and (meant := self._alias(path)) is not None:
                return self._router.find(scope["method"], meant)
            if scope["method"] == "OPTIONS" and self._cors is not None:
                raise Allowed(["OPTIONS"]) from None
            raise

    def _check_host(self, host: bytes | None, version: str) -> None:
        """Refuse unknown Host headers, as protection against DNS rebinding."""
        if host is None:
            if version != "1.0":
                raise Refused(400, "MALFORMED", "the Host header is missing")
            return
        if self._hosts and _name(host) not in self._hosts:
            raise Refused(
                421,
                "WRONG_HOST",
                "the Host header names another server",
                hint="use the server's own name, or add this one to the setting http.allowed_hosts",
            )
        if len(self._known_hosts) < _MOST_HOSTS:
            self._known_hosts.add(host)

    # -- what takes its time ------------------------------------------------------

    async def _at_length(self, call: Call, send: Send) -> Sent:
        """Run an operation that waits or streams, within the concurrency limits."""
        scope, receive, may_stay = call.scope, call.receive, self._may_stay(call)
        call.still_welcome = may_stay
        waits = call.operation.pace is Pace.WAITS
        places = self._services.waits if waits else self._services.streams
        with places.passing(call.caller):
            reply = await call.operation.handler(call)
            if isinstance(reply, AppReply):
                return await self._serve_app(reply, scope, receive, send)
            if isinstance(reply, Reply) or (waits and not reply.counted):
                return reply
            return await self._stream(reply, scope, receive, send, may_stay)

    def _may_stay(self, call: Call) -> Callable[[], object]:
        return lambda: self._session(call.scope, call.headers)

    async def _serve_app(
        self, reply: AppReply, scope: dict[str, Any], receive: Receive, send: Send
    ) -> int:
        """Returns the status that the application answered with."""
        status = 0

        async def watched(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await reply.app(scope, receive, watched)
        except Exception:
            if not status:
                raise
            log.exception("an answer of another application was broken off")
            abort(scope)
        return status

    async def _stream(
        self,
        reply: StreamReply,
        scope: dict[str, Any],
        receive: Receive,
        send: Send,
        may_stay: Callable[[], object] | None = None,
    ) -> int:
        """Returns the status."""
        reply = self._dressed(reply, scope)
        monitor = self._services.monitor
        monotonic = self._services.clock.monotonic
        watched = receive if reply.watched else None
        try:
            async with aclosing(reply.content) as content:
                with monitor.attending(watched, may_stay) as attendance:
                    head = {"status": reply.status, "headers": reply.headers}
                    await send({"type": "http.response.start", **head})
                    async for part in content:
                        attendance.since = monotonic()
                        await send({"type": _BODY, "body": part, "more_body": True})
                        attendance.since = None
        except (Closing, NotAuthenticated):
            if reply.whole or reply.length is not None:
                abort(scope)
                return reply.status
        except (Gone, Stalled):
            abort(scope)
            return reply.status
        except Exception:
            # The head is out: all that is left is to break off where it can be noticed.
            log.exception("an answer in parts was broken off")
            abort(scope)
            return reply.status
        await send({"type": _BODY, "body": b""})
        return reply.status


_BODY = "http.response.body"


_GZIP = re.compile(rb"\bgzip\s*(?:,|$|;\s*q=(?!0(?:\.0*)?\s*(?:,|$)))")
"""In Accept-Encoding, unless with the weight 0."""


def _takes_gzip(scope: dict[str, Any]) -> bool:
    accepted = dict(scope["headers"]).get(b"accept-encoding", b"")
    return scope["method"] == "GET" and _GZIP.search(accepted) is not None


def _log_access(scope: dict[str, Any], status: int, seconds: float) -> None:
    """Without the query, which may have a sign-in link, and with the path as it was sent."""
    client, session = scope.get("client"), scope.get("penstock.session")
    access_log.info(
        '%s %s "%s %s" %d %.1f ms',
        client[0] if client else "-",
        "-" if session is None else session.caller.principal,
        scope["method"],
        scope["raw_path"].decode("ascii"),
        status,
        seconds * 1000,
    )


def _check_role(session: Session, operation: Operation, params: dict[str, str]) -> None:
    """Refuse a caller without the role, before a body is read."""
    role = operation.role
    if isinstance(role, KeyRole) and session.require is not None and not session.caller.may(role):
        session.require(role, operation.action, "/".join(params.values())[:128])


def abort(scope: dict[str, Any]) -> None:
    connection = scope.get("penstock.connection")
    if connection is not None:
        connection.transport.abort()


def by_key(authenticator: Authenticator) -> Authenticate:
    """Authenticate by API key."""

    def authenticate(headers: Mapping[bytes, bytes]) -> Session:
        return authenticator.authenticate(token_in(headers))

    return authenticate


def token_in(headers: Mapping[bytes, bytes]) -> str:
    """Raises NotAuthenticated if there is none."""
    given = headers.get(b"authorization")
    if given is None and (key := headers.get(b"x-api-key")):  # as Anthropic's clients send it
        return key.strip().decode("latin-1")
    if given is None:
        raise NotAuthenticated("no key was given", hint="send Authorization: Bearer <key>")
    scheme, _, token = given.partition(b" ")
    if scheme.lower() != b"bearer" or not token:
        raise NotAuthenticated(
            "the Authorization header is not a bearer key", hint="send Authorization: Bearer <key>"
        )
    return token.strip().decode("latin-1")


def _name(host: bytes) -> str:
    """The host without its port."""
    name = host.decode("latin-1").lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.partition(":")[0]


Authenticate = Callable[[Mapping[bytes, bytes]], Session]
"""Who has sent these headers. Raises NotAuthenticated."""


class ApiSpec(Struct, frozen=True):
    operations: tuple[Operation, ...]
    document: Callable[[], bytes] = bytes
    """The OpenAPI document."""
    page: Callable[[], bytes] = bytes
    """The API documentation as HTML."""
    problem: ProblemReply = problem_reply
    shape: Callable[[str], ProblemReply | None] | None = None
    """The shape of errors at a path without an operation; None means that of `problem`."""
    alias: Callable[[str], str | None] | None = None
    """Alternative path for a path without an operation."""
    cors: Cors | None = None
    """CORS policy; None sends no CORS headers."""
