"""A worker's connection to the shim of its engine's folder."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.workloads.container.engine import EngineUnavailable
from penstock.workloads.container.engines.oci import shim

_LONGEST = 10.0
"""Seconds for an answer."""
_PACKET = 1 << 12


class ShimClient:
    """`on_packet` gets each packet of the shim, with file descriptors that are its own from then
    on; `on_lost` is called when the shim has died."""

    def __init__(
        self, on_packet: Callable[[dict[str, Any], list[int]], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_packet, self._on_lost = on_packet, on_lost
        self._socket: socket.socket | None = None
        self._loop = asyncio.get_running_loop()
        self._connecting = asyncio.Lock()

    async def connect(self, folder: Path, hidden: str) -> None:
        """Start a shim if there is none, and take over its states. Raises EngineUnavailable."""
        async with self._connecting:
            if self._socket is not None:
                return
            for is_last in (False, True):
                try:
                    self._socket = await asyncio.to_thread(_connected, folder, hidden)
                    while not self._read():
                        pass
                    break
                except (OSError, subprocess.SubprocessError) as error:
                    self.close()
                    # A shim that was just ending may reset a connection; the next one is new.
                    if is_last or not isinstance(error, ConnectionResetError):
                        raise EngineUnavailable(
                            f"The shim of the containers can't be started: {error}."
                        ) from error
            assert self._socket is not None
            self._socket.setblocking(False)
            self._loop.add_reader(self._socket, self.receive)

    def send(self, fds: Sequence[int] = (), **packet: object) -> None:
        """Raises EngineUnavailable."""
        try:
            if self._socket is None:
                raise ConnectionResetError("the shim has ended")
            socket.send_fds(self._socket, [json.dumps(packet).encode()], fds)
        except OSError as error:
            raise EngineUnavailable(
                f"The shim of the containers can't be reached: {error}."
            ) from error

    def receive(self) -> None:
        """Everything that has been sent."""
        while self._socket is not None:
            try:
                self._read()
            except BlockingIOError:
                return
            except OSError:
                self.close()
                self._on_lost()

    def close(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _read(self) -> bool:
        """One packet; whether it is the last of those that a new connection gets."""
        assert self._socket is not None
        data, fds, _, _ = socket.recv_fds(self._socket, _PACKET, 2, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError("the shim has ended")
        packet = json.loads(data)
        if "ready" in packet:
            return True
        self._on_packet(packet, fds)
        return False


def _connected(folder: Path, hidden: str) -> socket.socket:
    with (folder / shim.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _connection(folder)
        except OSError:
            words = (sys.executable, "-I", "-S", shim.__file__, str(folder), hidden)
            null = subprocess.DEVNULL
            with (folder / "shim.log").open("ab") as errors:
                # It holds the lock until it listens: no second one is started if we die meanwhile.
                subprocess.run(
                    words, check=True, stdin=lock, stdout=null, stderr=errors, timeout=_LONGEST
                )
            return _connection(folder)


def _connection(folder: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made.settimeout(_LONGEST)
        shim.widen(made)
        # A path of any length: the kernel takes at most 107 bytes.
        made.connect(f"/proc/self/fd/{place}/{shim.SOCKET}")
    except BaseException:
        made.close()
        raise
    finally:
        os.close(place)
    return made
