"""The shim: a process of its own that starts an engine's containers and outlives the worker.

It is the parent of the containers (a child subreaper), and holds their exit codes and the reading
ends of their streams. A worker may die and another take over: a container that has written more
than a pipe holds waits, and no byte and no exit code is lost.

It is run as a script, with the standard library only. It listens on `shim.sock` in the folder
that it is given. Each packet is a JSON object, some with file descriptors:

    worker: {"create": name, "command", "gate"}   with stdin, stdout and stderr for the container,
                                                  and the reading ends of the last two
            {"start": name}
            {"signal": name, "number"}            SIGKILL also ends one that is being made
            {"forget": name}                      kill it, and forget it when it has ended
    shim:   {"name", "pid", "is_started", "code"} to every worker, when it runs and has ended, and
                                                  when a worker connects; others than the one that
                                                  made it get the reading ends with the first one
            {"forgotten": name}                   to every worker; the one that asked gets it only
                                                  if the container had not ended

`command` makes a container whose first process waits at `gate`, the FIFO of the runtimes that
`runtime start` would open; without a gate it also runs it, and is run at the start. A container has
no `pid` before it is made, and a `code` when it has ended; one that has a code and no PID could not
be made. The shim ends when it has no container and no worker, and when its folder was deleted.
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

SOCKET, LOCK, RUN = "shim.sock", "shim.lock", "run"
STARTED, PID, LOG = "started", "pid", "log"
_BUFFER, _SNDBUFFORCE = 8 << 20, 32
"""Bytes of packets that a worker may leave unread; one that does not read them is dropped."""
_PACKET = 1 << 16
_LOOK = 2.0
"""Seconds between two looks at whether it may end."""
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_CHILD_SUBREAPER = 36
_NEWNS, _MS_REC, _MS_SLAVE, _DETACH = 0x20000, 0x4000, 1 << 19, 2
_OOM_SCORE = "-500"
"""A container goes before the parent of all of them."""

_libc = ctypes.CDLL(None, use_errno=True)


class Container:
    def __init__(self, name: str, command: list[str], gate: str, fds: list[int]) -> None:
        self.name, self.command, self.gate = name, command, gate
        self.ends, self.streams = fds[:3], fds[3:]
        """For the runtime, until it has them; and for workers."""
        self.runtime = 0
        """The PID of the runtime as long as it makes the container."""
        self.pid: int | None = None
        self.is_started = False
        """Or will be, once it is made."""
        self.code: int | None = None
        self.is_forgotten = False
        self._opened: int | None = None

    def state(self) -> dict[str, object]:
        names = ("name", "pid", "is_started", "code")
        return {name: getattr(self, name) for name in names}

    def open_gate(self) -> None:
        """As `crun start` and `runc start` do: one of them writes to the FIFO, the other reads it.
        It stays open, so that what the first process writes to it does not fail."""
        if self.gate and self._opened is None:
            with contextlib.suppress(OSError):  # it was killed
                self._opened = os.open(self.gate, os.O_RDWR | os.O_CLOEXEC)
                os.write(self._opened, b"0")

    def signal(self, number: int) -> None:
        """No PID is given anew before it is waited for, and that happens only here."""
        if self.runtime and number == signal.SIGKILL:
            kill_family(self.runtime)
        elif self.pid and self.code is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        for fd in (*self.ends, *self.streams, *(() if self._opened is None else (self._opened,))):
            os.close(fd)


class Shim:
    def __init__(self, folder: str, listener: socket.socket) -> None:
        self._folder, self._listener = folder, listener
        self._containers: dict[str, Container] = {}
        self._children: dict[int, Container] = {}
        """By the PID of the runtime that makes it, and then of its own first process."""
        self._early: dict[int, int] = {}
        """Exit codes of processes that ended before the runtime that had started them."""
        self._workers: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ, self._reap)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)

    def serve(self) -> None:
        self._accept(self._listener)
        while not self._may_end():
            while ready := self._selector.select(_LOOK):
                for key, _ in ready:
                    try:
                        key.data(key.fileobj)
                    except Exception:  # in its log; no container ends for it
                        sys.excepthook(*sys.exc_info())
                if not self._workers and not self._containers:
                    break

    def _may_end(self) -> bool:
        try:
            if not os.path.samefile(self._folder, "."):
                raise FileNotFoundError(self._folder)
            if self._workers or self._containers:
                return False
            lock = os.open(LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # nobody will ever ask for these containers
            for one in self._containers.values():
                one.signal(signal.SIGKILL)
            return True
        try:
            # A worker that connects holds the lock meanwhile.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._accept(self._listener)
            if not self._workers:
                os.unlink(SOCKET)
                return True
        except BlockingIOError:
            pass
        os.close(lock)
        return False

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
        self._send(worker, {"ready": True})

    def _receive(self, worker: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(worker, _PACKET, 5, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            data, fds = b"", []
        if not data:
            self._drop(worker)
            return
        asked = json.loads(data)
        if name := asked.get("create"):
            new = Container(name, asked["command"], asked["gate"], fds)
            self._containers[name] = new
            for other in self._workers - {worker}:
                self._send(other, new.state(), new.streams)
            if new.gate:
                self._make(new)
        elif one := self._containers.get(asked.get("start")):
            # Not before: who sees the mark knows the container from the shim, or the shim died.
            os.close(os.open(f"{RUN}/{one.name}/{STARTED}", os.O_CREAT | os.O_CLOEXEC))
            one.is_started = True
            if one.pid is not None:
                one.open_gate()
                self._tell(one.state())
            elif not one.gate:
                self._make(one)
        elif one := self._containers.get(asked.get("signal")):
            one.signal(asked["number"])
        elif one := self._containers.get(asked.get("forget")):
            one.is_forgotten = True
            one.signal(signal.SIGKILL)
            if one.code is not None:
                self._forget(one, worker)
            elif not one.runtime and one.pid is None:
                self._forget(one)

    def _forget(self, one: Container, unless: socket.socket | None = None) -> None:
        if self._containers.pop(one.name, None):
            one.close()
            self._tell({"forgotten": one.name}, unless)

    def _tell(self, packet: object, unless: socket.socket | None = None) -> None:
        for worker in self._workers - {unless}:
            self._send(worker, packet)

    def _send(self, worker: socket.socket, packet: object, fds: list[int] | None = None) -> None:
        try:
            socket.send_fds(worker, [json.dumps(packet).encode()], fds or [])
        except OSError:
            self._drop(worker)

    def _drop(self, worker: socket.socket) -> None:
        if worker in self._workers:
            self._workers.discard(worker)
            self._selector.unregister(worker)
            worker.close()

    # -- containers -------------------------------------------------------------

    def _make(self, one: Container) -> None:
        try:
            one.runtime = os.posix_spawn(
                one.command[0],
                one.command,
                _ENV,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, n) for n, fd in enumerate(one.ends)],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them
            )
            self._children[one.runtime] = one
        except OSError:
            one.code = 127
            self._tell(one.state())
        while one.ends:
            os.close(one.ends.pop())

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
                with open(f"{RUN}/{one.name}/{PID}") as file:
                    one.pid = int(file.read())
                self._children[one.pid] = one
            except (OSError, ValueError):
                one.code = 1
        one.runtime = 0
        if one.pid in self._early and one.code is None:
            self._children.pop(one.pid)
            code = self._early.pop(one.pid)
            one.code = code if code >= 0 else 128 - code
        if one.is_forgotten:
            one.signal(signal.SIGKILL)
            if one.code is not None:
                self._forget(one)
        elif one.is_started or one.code is not None:
            if one.code is None:
                one.open_gate()
            self._tell(one.state())


def widen(connection: socket.socket) -> None:
    with contextlib.suppress(PermissionError):
        connection.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, _BUFFER)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def kill_family(pid: int) -> None:
    """A process and its children."""
    pids = [pid]
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        pids += map(int, file.read().split())
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def main(folder: str, hidden: str) -> None:
    """`hidden` is a mount that the runtimes must not see: crun refuses a machine that has
    cgroups of version 1 and 2 side by side."""
    os.chdir(folder)
    if hidden:
        _check(_libc.unshare(_NEWNS), "unshare")
        _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")
        _check(_libc.umount2(os.fsencode(hidden), _DETACH), "umount")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.setblocking(False)
    listener.bind(SOCKET)
    listener.listen(128)
    if os.fork():  # whoever started it may connect now
        os._exit(0)
    os.dup2(1, 0)  # the lock of who started it
    os.setsid()
    os.umask(0o022)
    _libc.prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # three are open for each container
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    Shim(folder, listener).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
