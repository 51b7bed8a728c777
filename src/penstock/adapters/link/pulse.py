"""A worker's heartbeat, from a thread with a connection of its own.

A worker whose event loop is busy (a job that computes without ever awaiting) is not a dead
worker. The pulse goes on as long as the process does, whatever its jobs do.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import PROTOCOL, Hello, Pub, framed
from penstock.ports.bus import HEARTBEAT, Heartbeat


class Pulse:
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
                    connection = self._connect()
                    connection.sendall(self._hello)
                connection.sendall(self._beat)
            except OSError:
                if connection is not None:
                    connection.close()
                connection = None
            self._stop.wait(self._interval)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def _connect(self) -> socket.socket:
        if self._address.path is not None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(5)
            connection.connect(str(self._address.path))
            return connection
        return socket.create_connection((self._address.host, self._address.port), timeout=5)
