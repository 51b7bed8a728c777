"""The parent's side: one child process, what it says, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn

import msgspec

from penstock.ports.executor import Context
from penstock.workloads.function import frames, tree

_BOOT = (
    "import json, sys; _, path, *numbers = sys.argv; sys.path[:] = json.loads(path);"
    " from penstock.workloads.function.child import main; main(*map(int, numbers))"
)
_CHUNK = 1 << 16
_READS = 256
_LINE = 1 << 16
_POLL = 0.02
_LINGER = 1.0
"""Seconds that a child which hung up may take to be gone."""

Ended = frames.Done | int
"""How a job left a child: with a result, or with the child's exit status."""


class Lines:
    """What a child writes to one of its outputs, line by line."""

    def __init__(self, fd: int, level: str, sink: Callable[[str, str], None]) -> None:
        self._fd: int | None = fd
        self._level = level
        self._sink = sink
        self._part = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._read)

    def drain(self) -> None:
        """Pass on all that has been written, also a line without an end."""
        for _ in range(_READS):
            if not self._read():
                break
        if self._part:
            self._emit(self._part)
            self._part = b""

    def close(self) -> None:
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _read(self) -> bool:
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        *lines, self._part = (self._part + data).split(b"\n")
        if len(self._part) > _LINE:
            lines.append(self._part)
            self._part = b""
        for line in lines:
            self._emit(line)
        return True

    def _emit(self, line: bytes) -> None:
        self._sink(line.decode("utf-8", "replace").rstrip("\r"), self._level)


class ChildProcess:
    """A running child; idle, or at work on one job."""

    def __init__(self, offline: bool = False) -> None:
        self.offline = offline
        """It was told to leave the network, and never runs what may use it."""
        self._loop = asyncio.get_running_loop()
        self._ctx: Context | None = None
        self._ended: asyncio.Future[Ended] | None = None
        self.began = False
        """Whether the code of the job it was given last has begun to run."""
        self.is_used = False
        self._buffer = frames.FrameBuffer()
        self._unsent = bytearray()
        self.gone: asyncio.Future[int] = self._loop.create_future()
        """Done, with the exit status, when nothing is left of the child."""
        self._start()
        self.pid = self._popen.pid
        self._below: list[int] = []
        """Holds on the processes below it that were told to end."""
        self._hung_up_at: float | None = None
        self.is_cut_off = False
        """It lived on without its socket, and had to be killed."""
        self._pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._leader_ended)
        self._loop.add_reader(self._sock, self._readable)
        self._send(_likeness())

    @property
    def is_idle(self) -> bool:
        return self._ended is None

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def begin(self, run: frames.Run, ctx: Context) -> asyncio.Future[Ended]:
        """Give the idle child a job; the future says how it left it."""
        self._ctx = ctx
        self.began = False
        self._ended = self._loop.create_future()
        self._send(run)
        return self._ended

    def ask(self, reason: str) -> None:
        """Tell the job that it should end."""
        self._send(frames.Cancel(reason))

    def terminate(self) -> None:
        self._below += tree.terminate(self.pid)

    def kill(self) -> None:
        tree.kill(self.pid)

    def hang_up(self) -> None:
        """Let an idle child end by itself."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _start(self) -> None:
        self._sock, theirs = socket.socketpair()
        out, out_theirs = os.pipe()
        err, err_theirs = os.pipe()
        try:
            self._popen = subprocess.Popen(
                [
                    *(sys.executable, "-c", _BOOT),
                    *(json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())),
                    str(int(self.offline)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out_theirs,
                stderr=err_theirs,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._sock.close()
            os.close(out)
            os.close(err)
            raise
        finally:
            theirs.close()
            os.close(out_theirs)
            os.close(err_theirs)
        self._sock.setblocking(False)
        self._lines = (Lines(out, "stdout", self._log), Lines(err, "stderr", self._log))

    def _send(self, frame: frames.Frame) -> None:
        was_empty = not self._unsent
        self._unsent += frames.encode(frame)
        if was_empty:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError:
            self._unsent.clear()  # it is dying, and its death will be told
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._sock)
            self._hung_up_at = self._loop.time()
            self._await_exit()
            return
        try:
            for body in self._buffer.feed(data):
                self._receive(frames.decode_from_child(body))
        except msgspec.DecodeError:
            self.kill()  # the job wrote into our socket: nothing it says counts now

    def _receive(self, frame: frames.FromChild) -> None:
        if isinstance(frame, frames.Done):
            self._settle(frame)
        elif isinstance(frame, frames.Began):
            self.began = self.is_used = True
        elif isinstance(frame, frames.Log):
            self._log(frame.text, frame.level)
        elif self._ctx is None:
            return
        elif isinstance(frame, frames.Piece):
            self._ctx.stream(frame.text)
        else:
            self._ctx.progress(frame.fraction, frame.message)

    def _log(self, text: str, level: str) -> None:
        if self._ctx is not None:
            self._ctx.log(text, level=level)

    def _settle(self, end: Ended) -> None:
        for lines in self._lines:
            lines.drain()
        ended, self._ended, self._ctx = self._ended, None, None
        if ended is not None and not ended.done():
            ended.set_result(end)

    def _await_exit(self) -> None:
        """Look until it is gone: it closes its socket a little before its end."""
        if self.gone.done():
            return
        if not self.is_alive:
            self._exited()
            return
        if self._hung_up_at and self._loop.time() > self._hung_up_at + _LINGER:
            self.is_cut_off = True
            self.kill()
        self._loop.call_later(_POLL, self._await_exit)

    def _leader_ended(self) -> None:
        """The kernel tells of the main thread's end; others may still be ending.

        To kill the group now would change the way in which the process ended.
        """
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        self._await_exit()

    def _exited(self) -> None:
        if self.gone.done():
            return
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        tree.kill_group(self.pid)
        tree.finish(self._below)
        status = self._popen.wait()
        self._hear_last_words()
        self._settle(status)
        self._loop.remove_writer(self._sock)
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for lines in self._lines:
            lines.close()
        self.gone.set_result(status)

    def _hear_last_words(self) -> None:
        with suppress(OSError, msgspec.DecodeError):
            while data := self._sock.recv(_CHUNK):
                for body in self._buffer.feed(data):
                    self._receive(frames.decode_from_child(body))


def _likeness() -> frames.Prepare:
    """How a child becomes like this process."""
    prepared = spawn.get_preparation_data("penstock")
    main = {key: value for key, value in prepared.items() if key.startswith("init_main_")}
    return frames.Prepare(tuple(sys.argv), main, logging.getLogger().level)
