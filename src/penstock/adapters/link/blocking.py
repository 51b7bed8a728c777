"""Connections to an engine for ordinary threads, without an event loop."""

from __future__ import annotations

import itertools
import logging
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    MAX_FRAME,
    NOT_FRAMES,
    OLDEST_PROTOCOL,
    PROTOCOL,
    AnyFrame,
    Call,
    Failure,
    Frame,
    Hello,
    Ping,
    Pong,
    Pub,
    Reply,
    decode_frame,
    encoded,
)
from penstock.adapters.link.proxy import ONCE, Decode, remote_api
from penstock.adapters.link.renewal import (
    MAX_UNANSWERED,
    PING_INTERVAL,
    RECONNECT_TIMEOUT,
    ConnectionLost,
    Sending,
    job_ids,
    pauses,
    ping_interval,
)
from penstock.adapters.link.secure import Security, explained, needed
from penstock.core.errors import NotRunning, PenstockError, Unavailable
from penstock.ports.bus import HEARTBEAT, Heartbeat
from penstock.ports.engine_api import EngineApi
from penstock.ports.frames import FrameBuffer
from penstock.ports.process import CALLER_TIMEOUT, close_in_children, keep_alive

log = logging.getLogger(__name__)

_PING = encoded(Ping())
T = TypeVar("T")
_READ = 1 << 16
_WRITE = 1 << 18
"""Bytes that have to leave until the next ping is due."""
_INSTANT = 0.001
"""The shortest timeout of a socket: with 0 it would not wait at all."""


class BlockingLink:
    """One connection that one thread at a time calls an engine over; made when it is needed.

    `call` is a coroutine function, as `EngineApi` wants it, but it never suspends.
    """

    def __init__(
        self,
        address: Address,
        token: str,
        reconnect_timeout: float | None = RECONNECT_TIMEOUT,
        security: Security | None = None,
    ) -> None:
        self._address, self._token, self._security = address, token, security
        self._reconnect_timeout = reconnect_timeout
        self._ping_interval = ping_interval(reconnect_timeout)
        self._buffer, self._frames = FrameBuffer(MAX_FRAME), deque[AnyFrame]()
        self._call_ids = itertools.count(1)
        self._job_ids = job_ids()
        self._socket: socket.socket | None = None
        self.may_connect = True
        self.api = remote_api(self)
        close_in_children(self)

    def filenos(self) -> list[int]:
        return [] if self._socket is None else [self._socket.fileno()]

    async def call(self, method: str, decode: Decode[T], params: Mapping[str, object]) -> T:
        sending = Sending(self._address, method, params, self._reconnect_timeout, self._job_ids)
        while True:
            if self._socket is None or (method in ONCE and self._is_stale(self._socket)):
                self._connect(sending)
            call_id = next(self._call_ids)
            try:
                frame = self._ask(Call.of(call_id, method, sending.params), sending)
            except ConnectionLost as error:
                sending.lost(error.since)
                continue
            if isinstance(frame, Reply) and frame.id == call_id:
                return decode(frame.value)
            if isinstance(frame, Failure) and frame.id == call_id:
                raise frame.revive()
            self.close()
            raise NotRunning(f"{self._address} sent an unexpected {type(frame).__name__}")

    def stream(
        self, method: str, decode: Decode[T], params: Mapping[str, object]
    ) -> AsyncIterator[T]:
        raise Unavailable("a blocking connection has no streams: read them over a Link")

    def _connect(self, sending: Sending) -> None:
        """Try until the engine is there. Raises EngineUnavailable when the time is over."""
        self.close()
        has_failed = False
        for pause in pauses():
            if not self.may_connect:
                raise NotRunning(f"not connected to {self._address}")
            left = sending.time_left()
            try:
                # Not all of the time: what is sent while the network is down is never answered.
                patience = self._ping_interval
                self._open(patience if left is None else min(left, patience))
            except Unavailable:
                if not has_failed:
                    log.warning("lost the connection to %s; reconnecting", self._address)
                has_failed = True
            else:
                return
            time.sleep(pause if left is None else min(left, pause))

    def _open(self, patience: float) -> None:
        until = time.monotonic() + patience
        self._buffer, self._frames = FrameBuffer(MAX_FRAME), deque()
        self._socket = open_socket(self._address, patience, self._security)
        try:
            self._send(encoded(Hello(PROTOCOL, self._token, OLDEST_PROTOCOL)), until)
            if isinstance(frame := self._receive(until), Failure):
                raise frame.revive()
            self._socket.settimeout(self._ping_interval)
        except (ConnectionLost, TimeoutError) as error:
            self.close()
            raise self._address.unreachable() from error
        except BaseException:
            self.close()
            raise

    def _is_stale(self, connection: socket.socket) -> bool:
        """Whether the engine has closed it: what is sent once must not be lost to that."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        try:
            if not poll.poll(0):
                return False
            # Over TLS one can't look without reading: nothing but its end is due here.
            return isinstance(connection, ssl.SSLSocket) or not connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _ask(self, frame: Frame, sending: Sending) -> AnyFrame:
        patience = sending.answer_timeout
        until = None if patience is None else time.monotonic() + patience
        try:
            self._send(encoded(frame), until)
            answer = self._receive(until)
        except TimeoutError:
            self.close()
            raise sending.unavailable() from None
        if until is not None and self._socket is not None:
            self._socket.settimeout(self._ping_interval)
        return answer

    def _receive(self, until: float | None) -> AnyFrame:
        """The next frame; the engine sends one for each of ours."""
        while True:
            while self._frames:
                if not isinstance(frame := self._frames.popleft(), Pong):
                    return frame
            data = self._more(until)
            try:
                self._frames.extend(map(decode_frame, self._buffer.feed(data)))
            except NOT_FRAMES as error:
                raise self._lost(error) from error

    def _send(self, data: bytes, until: float | None) -> None:
        """Raises TimeoutError at the end of the caller's time, ConnectionLost."""
        unsent, tries = memoryview(data), 0
        while unsent:
            sent = self._within_interval(partial(_send, data=unsent), until)
            tries = tries + 1 if sent is None else 0
            if tries == MAX_UNANSWERED:
                raise self._silent()
            unsent = unsent[sent or 0 :]

    def _more(self, until: float | None) -> bytes:
        """What the engine sent. While it sends nothing, it is pinged. Raises as `_send` does."""
        for unanswered in range(MAX_UNANSWERED + 1):
            if unanswered:
                self._send(_PING, until)
            if data := self._within_interval(_receive, until):
                return data
            if data is not None:
                raise self._lost(ConnectionError("end of stream"))
        raise self._silent()

    def _within_interval(self, work: Callable[[socket.socket], T], until: float | None) -> T | None:
        """None if it could not be done until the next ping is due. Raises as `_send` does."""
        connection = self._socket
        assert connection is not None
        if until is not None:
            left = until - time.monotonic()
            connection.settimeout(max(_INSTANT, min(self._ping_interval, left)))
        try:
            return work(connection)
        except OSError as error:
            if not isinstance(error, TimeoutError) or error.errno is not None:
                raise self._lost(error) from error
        if until is not None and time.monotonic() >= until:
            raise TimeoutError
        return None

    def _silent(self) -> ConnectionLost:
        silence = MAX_UNANSWERED * self._ping_interval
        return self._lost(ConnectionError("it is silent"), time.monotonic() - silence)

    def _lost(self, error: Exception, since: float | None = None) -> ConnectionLost:
        log.debug("lost the connection to %s: %s", self._address, error)
        self.close()
        return ConnectionLost(since)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _send(connection: socket.socket, data: memoryview) -> int:
    return connection.send(data[:_WRITE])


def _receive(connection: socket.socket) -> bytes:
    return connection.recv(_READ)


class LinkPool:
    """Up to `size` blocking connections, made as threads need them and used again."""

    def __init__(
        self,
        address: Address,
        token: str,
        reconnect_timeout: float | None = RECONNECT_TIMEOUT,
        size: int = 8,
        security: Security | None = None,
    ) -> None:
        self._links = [
            BlockingLink(address, token, reconnect_timeout, security) for _ in range(size)
        ]
        self._free = list(self._links)

    def run(self, work: Callable[[EngineApi], Coroutine[Any, Any, T]]) -> T:
        """Run `work`, which never suspends, over a connection of the calling thread's own.

        Raises AllInUse before it is begun if none is free, EngineUnavailable if the engine can't
        be reached in time.
        """
        try:
            link = self._free.pop()
        except IndexError:
            raise AllInUse from None
        try:
            work(link.api).send(None)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        except BaseException as error:
            if not isinstance(error, Exception):
                link.close()  # its answer may still come: the next call must not get it
            raise
        finally:
            self._free.append(link)
        raise AssertionError("a blocking call suspended")

    def close(self) -> None:
        """Calls under way may end; none is sent again."""
        for link in self._links:
            link.may_connect = False
        for link in self._free:
            link.close()


class AllInUse(Exception):
    """Every connection of a pool is in use."""


class Pulse:
    """A worker's heartbeat, from a thread with a connection of its own.

    A worker whose event loop is busy (a job that computes without ever awaiting) is not a dead
    worker. The pulse goes on as long as the process does, whatever its jobs do.
    """

    def __init__(
        self,
        address: Address,
        worker_id: str,
        *,
        token: str,
        interval: float,
        security: Security | None = None,
    ) -> None:
        self._address, self._interval, self._security = address, interval, security
        boot = security.boot if security is not None else 0
        self._hello = encoded(Hello(PROTOCOL, token, OLDEST_PROTOCOL, boot))
        self._beat = encoded(Pub(HEARTBEAT, [Heartbeat(worker_id)])) + _PING
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        connection: socket.socket | None = None
        unanswered = 0
        while not self._stop.is_set():
            try:
                if connection is None:
                    connection = open_socket(self._address, 5, self._security)
                    connection.sendall(self._hello)
                    connection.setblocking(False)
                    unanswered = 0
                unanswered = 0 if self._was_answered(connection) else unanswered + 1
                if unanswered * self._interval > MAX_UNANSWERED * PING_INTERVAL:
                    raise ConnectionError("the engine is silent")
                connection.sendall(self._beat)
            except (OSError, PenstockError):
                if connection is not None:
                    connection.close()
                connection = None
            self._stop.wait(self._interval)
        if connection is not None:
            connection.close()

    def _was_answered(self, connection: socket.socket) -> bool:
        """Whether anything came since the last time."""
        try:
            if not connection.recv(_READ):
                raise ConnectionError("end of stream")
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        return True


def open_socket(
    address: Address, timeout: float | None = None, security: Security | None = None
) -> socket.socket:
    """Raises NotRunning, and Misconfigured or NotAuthenticated if there can be no TLS."""
    address.check_private()
    try:
        if address.path is None:
            connection = socket.create_connection((address.host, address.port), timeout=timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(connection, CALLER_TIMEOUT)
            return _secured(connection, address, security) if address.tls else connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(str(address.path))
        except BaseException:
            connection.close()
            raise
        return connection
    except OSError as error:
        if isinstance(error, ssl.SSLError) and (told := explained(error, address)):
            raise told from error
        raise address.unreachable() from error


def _secured(
    connection: socket.socket, address: Address, security: Security | None
) -> socket.socket:
    try:
        known = needed(security, address)
        return known.context.wrap_socket(connection, server_hostname=known.hostname(address))
    except BaseException:
        connection.close()
        raise
