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

from msgspec import Struct

from penstock.workloads.container.engine import EngineUnavailable
from penstock.workloads.container.engines.oci import shim

_LONGEST = 10.0
"""Seconds for an answer."""
_PACKET = 1 << 12


class ShimState(Struct):
    """A container as the shim knows it."""

    name: str
    pid: int | None = None
    code: int | None = None


class ShimClient:
    """`on_state` gets each change, and reading ends of the container's output, which are its own
    from then on; `on_forgotten` gets the name of one of which nothing comes any more; `on_lost` is
    called when the shim has died."""

    def __init__(
        self,
        on_state: Callable[[ShimState, list[int]], None],
        on_forgotten: Callable[[str], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_state, self._on_forgotten, self._on_lost = on_state, on_forgotten, on_lost
        self._socket: socket.socket | None = None
        self._loop = asyncio.get_running_loop()
        self._connecting = asyncio.Lock()

    async def connect(self, folder: Path, hidden: str) -> None:
        """Start a shim if there is none, and take over its states. Raises EngineUnavailable."""
        async with self._connecting:
            if self._socket is not None:
                return
            try:
                self._socket = await asyncio.to_thread(_connected, folder, hidden)
                while not self._read():
                    pass
            except (OSError, subprocess.SubprocessError) as error:
                self.close()
                raise EngineUnavailable(
                    f"The shim of the containers can't be started: {error}."
                ) from error
            self._socket.setblocking(False)
            self._loop.add_reader(self._socket, self.receive)

    def start(self, name: str, command: Sequence[str], fds: Sequence[int]) -> None:
        self._send({"start": name, "command": command}, fds)

    def forget(self, name: str) -> None:
        self._send({"forget": name})

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
        """One packet; whether it is the last of the states that a new connection gets."""
        assert self._socket is not None
        data, fds, _, _ = socket.recv_fds(self._socket, _PACKET, 2, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError("the shim has ended")
        said = json.loads(data)
        if "name" in said:
            self._on_state(ShimState(**said), fds)
        elif "forgotten" in said:
            self._on_forgotten(said["forgotten"])
        return "ready" in said

    def _send(self, packet: object, fds: Sequence[int] = ()) -> None:
        """Raises EngineUnavailable."""
        try:
            if self._socket is None:
                raise ConnectionResetError("the shim has ended")
            socket.send_fds(self._socket, [json.dumps(packet).encode()], fds)
        except OSError as error:
            raise EngineUnavailable(
                f"The shim of the containers can't be reached: {error}."
            ) from error


def _connected(folder: Path, hidden: str) -> socket.socket:
    with (folder / shim.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return _connection(folder)
        except OSError:
            words = (sys.executable, "-I", "-S", shim.__file__, str(folder), hidden)
            null = subprocess.DEVNULL
            with (folder / "shim.log").open("ab") as errors:
                subprocess.run(
                    words, check=True, stdin=null, stdout=null, stderr=errors, timeout=_LONGEST
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
