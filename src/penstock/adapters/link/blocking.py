"""Connections to an engine for ordinary threads, without an event loop."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    MAX_FRAME,
    PROTOCOL,
    AnyFrame,
    Call,
    Failure,
    Frame,
    Hello,
    Pub,
    Reply,
    decode_frame,
    framed,
)
from penstock.adapters.link.proxy import Decode, remote_api
from penstock.adapters.link.renewal import (
    HANDSHAKE_TIMEOUT,
    RECONNECT_TIMEOUT,
    ConnectionLost,
    Sending,
    job_ids,
    pauses,
)
from penstock.core.errors import NotRunning, Unavailable
from penstock.ports.bus import HEARTBEAT, Heartbeat
from penstock.ports.engine_api import ONCE, EngineApi
from penstock.ports.forking import close_in_children

log = logging.getLogger(__name__)

T = TypeVar("T")
_READ = 1 << 16


class BlockingLink:
    """One connection that one thread at a time calls an engine over; made when it is needed.

    `call` is a coroutine function, as `EngineApi` wants it, but it never suspends.
    """

    def __init__(
        self, address: Address, token: str, reconnect_timeout: float | None = RECONNECT_TIMEOUT
    ) -> None:
        self._address, self._token = address, token
        self._reconnect_timeout = reconnect_timeout
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
            except ConnectionLost:
                sending.lost()
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
                self._open(HANDSHAKE_TIMEOUT if left is None else min(left, HANDSHAKE_TIMEOUT))
            except Unavailable:
                if not has_failed:
                    log.warning("lost the connection to %s; reconnecting", self._address)
                has_failed = True
            else:
                return
            time.sleep(pause if left is None else min(left, pause))

    def _open(self, patience: float) -> None:
        self._socket = open_socket(self._address, patience)
        try:
            self._send(Hello(PROTOCOL, self._token))
            if isinstance(frame := self._receive(), Failure):
                raise frame.revive()
            self._socket.settimeout(None)
        except (ConnectionLost, TimeoutError) as error:
            raise self._address.unreachable() from error
        except BaseException:
            self.close()
            raise

    def _is_stale(self, connection: socket.socket) -> bool:
        """Whether the engine has closed it: what is sent once must not be lost to that."""
        try:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _ask(self, frame: Frame, sending: Sending) -> AnyFrame:
        if (patience := sending.answer_timeout) is None:
            self._send(frame)
            return self._receive()
        assert self._socket is not None
        self._socket.settimeout(patience)
        try:
            self._send(frame)
            answer = self._receive()
        except TimeoutError:
            self.close()
            raise sending.unavailable() from None
        self._socket.settimeout(None)
        return answer

    def _send(self, frame: Frame) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(framed(frame))
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self) -> AnyFrame:
        """The next frame; the engine sends one for each of ours."""
        connection = self._socket
        assert connection is not None
        try:
            data = connection.recv(_READ)
            while len(data) < 4:
                data += _more(connection)
            size = 4 + int.from_bytes(data[:4], "big")
            if size > MAX_FRAME:
                raise ConnectionError(f"a frame of {size} bytes")
            if len(data) < size:
                whole = bytearray(data)
                while len(whole) < size:
                    whole += _more(connection)
                data = bytes(whole)
            frame: AnyFrame = decode_frame(data[4:])
            return frame
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> Exception:
        log.debug("lost the connection to %s: %s", self._address, error)
        self.close()
        return error if isinstance(error, TimeoutError) else ConnectionLost()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _more(connection: socket.socket) -> bytes:
    if not (data := connection.recv(_READ)):
        raise ConnectionError("end of stream")
    return data


class LinkPool:
    """Up to `size` blocking connections, made as threads need them and used again."""

    def __init__(
        self,
        address: Address,
        token: str,
        reconnect_timeout: float | None = RECONNECT_TIMEOUT,
        size: int = 8,
    ) -> None:
        self._links = [BlockingLink(address, token, reconnect_timeout) for _ in range(size)]
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

    def __init__(self, address: Address, worker_id: str, *, token: str, interval: float) -> None:
        self._address, self._interval = address, interval
        self._hello = framed(Hello(PROTOCOL, token))
        self._beat = framed(Pub(HEARTBEAT, [Heartbeat(worker_id)]))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        connection: socket.socket | None = None
        while not self._stop.is_set():
            try:
                if connection is None:
                    connection = open_socket(self._address, timeout=5)
                    connection.sendall(self._hello)
                connection.sendall(self._beat)
            except (OSError, NotRunning):
                if connection is not None:
                    connection.close()
                connection = None
            self._stop.wait(self._interval)
        if connection is not None:
            connection.close()


def open_socket(address: Address, timeout: float | None = None) -> socket.socket:
    """Raises NotRunning, and Misconfigured for an address on another machine."""
    address.check_local()
    try:
        if address.path is None:
            connection = socket.create_connection((address.host, address.port), timeout=timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(str(address.path))
        except BaseException:
            connection.close()
            raise
        return connection
    except OSError as error:
        raise address.unreachable() from error
