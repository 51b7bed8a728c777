"""The shim: a process of its own that starts an engine's containers and outlives the worker.

It is the parent of the containers (a child subreaper), and holds their exit codes and the reading
ends of their streams. A worker may die and another take over: a container that has written more
than a pipe holds waits, and no byte and no exit code is lost.

It is run as a script, with the standard library only. It listens on `shim.sock` in the folder
that it is given. Each packet is a JSON object, some with file descriptors:

    worker: {"start": name, "command"}        with stdin, stdout and stderr for the container, and
                                              the reading ends of the last two
            {"forget": name}
    shim:   {"name", "pid", "code"}           to every worker, at each change and when it connects;
                                              the first one with the reading ends
            {"forgotten": name}               to every worker; no more of it comes

A container has no `pid` before the runtime has started it, and a `code` when it has ended; one
that has a code and no PID could not be started. The shim ends when it has no container and no
worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import sys
from pathlib import Path

SOCKET, LOCK, RUN = "shim.sock", "shim.lock", "run"
STARTED, PID, LOG = "started", "pid", "log"
_BUFFER, _SNDBUFFORCE = 8 << 20, 32
"""Bytes of packets that a worker may leave unread; one that does not read them is dropped."""
_PACKET = 1 << 16
_IDLE = 1.0
"""Seconds after which it tries again to end."""
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_CHILD_SUBREAPER = 36
_NEWNS, _MS_REC, _MS_SLAVE, _DETACH = 0x20000, 0x4000, 1 << 19, 2
_OOM_SCORE = "-500"
"""A container goes before the parent of all of them."""

_libc = ctypes.CDLL(None, use_errno=True)


class Container:
    def __init__(self, name: str, streams: list[int]) -> None:
        self.name, self.streams = name, streams
        self.runtime = 0
        self.pid: int | None = None
        self.code: int | None = None

    def state(self) -> dict[str, object]:
        return {"name": self.name, "pid": self.pid, "code": self.code}


class Shim:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._containers: dict[str, Container] = {}
        self._children: dict[int, Container] = {}
        """By the PID of the runtime that starts it, and then of its own first process."""
        self._early: dict[int, int] = {}
        """Exit codes of processes that ended before the runtime that had started them."""
        self._workers: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._woken, wake = socket.socketpair()
        self._woken.setblocking(False)
        wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)

    def serve(self) -> None:
        self._accept(self._listener)
        while (busy := self._workers or self._containers) or not self._may_end():
            for key, _ in self._selector.select(None if busy else _IDLE):
                try:
                    key.data(key.fileobj)
                except Exception:  # in its log; no container ends for it
                    sys.excepthook(*sys.exc_info())

    def _may_end(self) -> bool:
        """A worker that connects holds the lock meanwhile."""
        try:
            lock = os.open(LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # so is its folder
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._accept(self._listener)
        if self._workers:
            os.close(lock)
            return False
        os.unlink(SOCKET)
        return True

    # -- workers ----------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            worker, _ = listener.accept()
        except BlockingIOError:
            return
        worker.setblocking(False)
        widen(worker)
        self._workers.add(worker)
        self._selector.register(worker, selectors.EVENT_READ, self._receive)
        for one in self._containers.values():
            self._send(worker, one.state(), one.streams)
        self._send(worker, {"ready": True}, [])

    def _receive(self, worker: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(worker, _PACKET, 5, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, fds = b"", []
        if not data:
            self._drop(worker)
            return
        asked = json.loads(data)
        if (name := asked.get("start")) and name not in self._containers:
            self._start(name, asked["command"], fds)
            return
        if name := asked.get("forget"):
            if one := self._containers.pop(name, None):
                _kill(one.runtime)
                fds += one.streams
            for each in [*self._workers]:
                self._send(each, {"forgotten": name}, [])
        for fd in fds:
            os.close(fd)

    def _tell(self, one: Container, fds: list[int] | None = None) -> None:
        for worker in [*self._workers]:
            self._send(worker, one.state(), fds or [])

    def _send(self, worker: socket.socket, packet: object, fds: list[int]) -> None:
        try:
            socket.send_fds(worker, [json.dumps(packet).encode()], fds)
        except OSError:
            self._drop(worker)

    def _drop(self, worker: socket.socket) -> None:
        if worker in self._workers:
            self._workers.discard(worker)
            self._selector.unregister(worker)
            worker.close()

    # -- containers -------------------------------------------------------------

    def _start(self, name: str, command: list[str], fds: list[int]) -> None:
        one = self._containers[name] = Container(name, fds[3:])
        self._tell(one, one.streams)
        try:
            # Not before: who sees the mark knows the container from the shim, or the shim died.
            Path(RUN, one.name, STARTED).touch()
            one.runtime = os.posix_spawn(
                command[0],
                command,
                _ENV,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(fds[:3])],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them
            )
            self._children[one.runtime] = one
        except OSError:
            one.code = 127
            self._tell(one)
        for fd in fds[:3]:
            os.close(fd)

    def _reap(self, woken: socket.socket) -> None:
        woken.recv(_PACKET)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended(ended[0], os.waitstatus_to_exitcode(ended[1]))
        if not any(one.runtime for one in self._children.values()):
            self._early.clear()

    def _ended(self, pid: int, code: int) -> None:
        one = self._children.pop(pid, None)
        if one is None:
            self._early[pid] = code
            return
        if not one.runtime or code:
            one.code = code if code >= 0 else 128 - code
        else:
            try:
                one.pid = int(Path(RUN, one.name, PID).read_text())
                self._children[one.pid] = one
            except (OSError, ValueError):
                one.code = 1
        one.runtime = 0
        if self._containers.get(one.name) is one:
            self._tell(one)
        if one.pid in self._early:
            self._ended(one.pid, self._early.pop(one.pid))


def widen(connection: socket.socket) -> None:
    with contextlib.suppress(PermissionError):
        connection.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, _BUFFER)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _kill(runtime: int) -> None:
    """One that does not come to its end, and what it started."""
    if runtime:
        pids = [runtime]
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{runtime}/task/{runtime}/children").read_text()
            pids += map(int, children.split())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def main(folder: str, hidden: str) -> None:
    """`hidden` is a mount that the runtimes must not see: crun refuses a machine that has
    cgroups of version 1 and 2 side by side."""
    os.chdir(folder)
    if hidden:
        _check(_libc.unshare(_NEWNS), "unshare")
        _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")
        _check(_libc.umount2(os.fsencode(hidden), _DETACH), "umount")
    Path(SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    listener.bind(SOCKET)
    listener.listen(128)
    if os.fork():  # whoever started it may connect now
        os._exit(0)
    os.setsid()
    os.umask(0o022)
    _libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # two are open for each container
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    Shim(listener).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
