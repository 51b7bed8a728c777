"""A NATS server that the engine starts for itself: `penstock up --cluster`.

It lives in a folder of the data directory, is started again when it dies, and ends with the engine.
An engine that was killed leaves its server running. The server holds a lock through a file
descriptor that it inherited, so the next engine knows for certain whether the process that the
PID file names is that server, and ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from penstock.adapters.nats.connection import NatsOptions, is_local
from penstock.core.errors import Misconfigured, NotRunning
from penstock.ports.clock import backoff

log = logging.getLogger(__name__)

_PROGRAM = "nats-server"
_TIMEOUT = 10.0
"""Seconds within which it must listen, or have ended."""
_LOOK = 0.02
_LOG_SIZE = 10 << 20
"""Bytes after which its log is begun anew."""


class NatsServer:
    """One server process: `start`, then `run` until cancelled, then `stop`."""

    def __init__(self, folder: Path, options: NatsOptions) -> None:
        """Raises Misconfigured."""
        self._folder, self._options = folder, options
        (self._host, self._port), self._program = _address(options), _find_program()
        self._lock: BinaryIO | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when it listens. Raises Misconfigured, NotRunning."""
        self._folder.mkdir(0o700, parents=True, exist_ok=True)
        self._lock = await self._locked()
        try:
            socket.create_server((self._host, self._port)).close()
        except OSError as error:
            raise Misconfigured(
                f"can't start a NATS server at {self._host}:{self._port}: {error.strerror}",
                hint="choose another port with --bus nats://127.0.0.1:PORT, or leave --cluster out"
                " to use the server that is there",
            ) from error
        self._write_configuration()
        await self._start()

    async def run(self) -> None:
        """Start it again whenever it ends."""
        pauses = backoff(0.1, 5.0, jitter=0.5)
        while True:
            began = time.monotonic()
            if self._process is not None:
                code = await self._ended(self._process)
                log.error("the NATS server ended (%s); starting it again", _how(code))
            if time.monotonic() - began > _TIMEOUT:
                pauses = backoff(0.1, 5.0, jitter=0.5)
            await asyncio.sleep(next(pauses))
            try:
                await self._start()
            except (NotRunning, OSError) as error:
                log.error("%s; trying again", error)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                async with asyncio.timeout(_TIMEOUT):
                    await self._ended(process)
            except TimeoutError:
                process.kill()
                await self._ended(process)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # -- the process -------------------------------------------------------------------

    async def _locked(self) -> BinaryIO:
        """The lock that the server inherits; a server that an engine left behind is ended."""
        file = (self._folder / "server.lock").open("ab")
        has_pid, end = False, time.monotonic() + _TIMEOUT
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                pass
            if time.monotonic() > end:
                file.close()
                raise NotRunning(f"another process uses the NATS server in {self._folder}")
            if not has_pid and (pid := self._left_behind()):
                has_pid = True
                log.warning("ending the NATS server that an engine left behind (process %d)", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(_LOOK)

    def _left_behind(self) -> int:
        try:
            return int((self._folder / "server.pid").read_text())
        except (OSError, ValueError):
            return 0  # it has not written it yet

    def _write_configuration(self) -> None:
        """Only for who can read the data directory: it holds the token."""
        folder = self._folder.resolve()
        lines = [
            f"host: {json.dumps(self._host)}",
            f"port: {self._port}",
            f"pid_file: {json.dumps(str(folder / 'server.pid'))}",
            f"log_file: {json.dumps(str(folder / 'server.log'))}",
            f"logfile_size_limit: {_LOG_SIZE}",
            f"authorization {{ token: {json.dumps(self._options.token)} }}",
            # What JetStream acknowledges is on the disk.
            f"jetstream {{ store_dir: {json.dumps(str(folder))}, sync_interval: always }}",
        ]
        file = os.open(folder / "server.conf", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(file, "w") as written:
            written.write("\n".join(lines) + "\n")

    async def _start(self) -> None:
        assert self._lock is not None
        (self._folder / "server.pid").unlink(missing_ok=True)
        # A session of its own: Ctrl-C is for the engine, which still needs it while it drains.
        process = subprocess.Popen(  # noqa: ASYNC220  (a fork is all that it waits for)
            [self._program, "-c", self._folder / "server.conf"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(self._lock.fileno(),),
            start_new_session=True,
        )
        self._process = process
        end = time.monotonic() + _TIMEOUT
        while not await asyncio.to_thread(self._listens):
            if process.poll() is not None or time.monotonic() > end:
                raise NotRunning(f"the NATS server does not start: {self._last_words()}")
            await asyncio.sleep(_LOOK)

    def _listens(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), 1).close()
        except OSError:
            return False
        return True

    def _last_words(self) -> str:
        file = self._folder / "server.log"
        lines = file.read_text(errors="replace").splitlines() if file.is_file() else []
        return lines[-1][-500:] if lines else f"nothing is in {file}"

    async def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code; asyncio's own way to wait would need its child watcher."""
        while (code := process.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        return code


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _find_program() -> str:
    """Raises Misconfigured."""
    beside = Path(sys.executable).parent / _PROGRAM
    found = str(beside) if beside.is_file() else shutil.which(_PROGRAM)
    if found is None:
        raise Misconfigured(
            f"--cluster needs the program {_PROGRAM}", hint="pip install 'penstock[cluster]'"
        )
    return found


def _address(options: NatsOptions) -> tuple[str, int]:
    """Raises Misconfigured."""
    found = urlsplit(options.servers[0])
    plain = found.scheme == "nats" and not found.username and len(options.servers) == 1
    if not plain or not is_local(found.hostname or ""):
        raise Misconfigured(
            f"--cluster starts a server on this machine, and can't be at {options}",
            hint="give it an address as nats://127.0.0.1:4222, or leave --cluster out",
        )
    return found.hostname or "", found.port or 4222
