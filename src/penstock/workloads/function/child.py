"""The child's side: a process that runs one job at a time, in its main thread.

A second thread listens to the parent, so that a job can be asked to end while it runs,
and so that the child dies with its parent. The child leads a session of its own: killing
its process group ends whatever the job has started, too.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import spawn
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, cast

from penstock.core.job import JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Outcome
from penstock.ports.token import Token
from penstock.workloads.function import frames, tree
from penstock.workloads.function.constraints import not_enforced
from penstock.workloads.function.context import LoggingBridge
from penstock.workloads.function.definition import JobFunction
from penstock.workloads.function.offline import leave_network
from penstock.workloads.function.options import Mode
from penstock.workloads.function.outcomes import bounded, perform
from penstock.workloads.function.signature import Signature

NOT_IMPORTABLE = "NOT_IMPORTABLE"
MAX_LINE = 1 << 20
_LET_IT = "the worker's machine must let its user make user namespaces (unshare -Un true tells)"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

preparing = False
"""True while this process is a child that imports its parent's `__main__`."""


class ChildContext:
    """The Context of a job in a child: everything goes to the parent's Context."""

    def __init__(self, run: frames.Run, send: Callable[[frames.Frame], None]) -> None:
        self.request: JobRequest = run.request
        self.job_id = run.request.job_id
        self.attempt = run.attempt
        self.cancel = Token()
        self.ended_as = JobState.CANCELLED
        self.world = None
        self._until = time.monotonic() + run.remaining
        self._send = send

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        known = None if fraction is None else float(fraction)
        self._send(frames.Progress(known, bounded(str(message), MAX_LINE)))

    def log(self, text: str, level: str = "info") -> None:
        self._send(frames.Log(bounded(str(text), MAX_LINE), str(level)))

    def stream(self, text: str) -> None:
        self._send(frames.Piece(bounded(str(text), MAX_LINE)))

    def remaining(self) -> float:
        return self._until - time.monotonic()


class Child:
    """Runs what the parent sends, until the parent hangs up."""

    def __init__(self, sock: socket.socket, online: str) -> None:
        self._sock = sock
        self._online = online
        """Why this process can still use the network; empty if it can't."""
        self._sending = threading.Lock()
        self._jobs: SimpleQueue[tuple[frames.Run, ChildContext] | None] = SimpleQueue()
        self._ctx: ChildContext | None = None
        self._main: dict[str, str] = {}
        self._functions: dict[tuple[str, str], tuple[Callable[..., Any], Signature]] = {}
        self._pid = os.getpid()

    def serve(self) -> None:
        LoggingBridge(last_resort=False).open()
        threading.Thread(target=self._listen, name="penstock-parent", daemon=True).start()
        while (job := self._jobs.get()) is not None:
            run, ctx = job
            self._send(frames.Began())
            outcome = self._run(run, ctx)
            if os.getpid() != self._pid:
                os._exit(0)  # a fork made by the job, which came back out of it
            self._ctx = None
            _flush()
            self._send(frames.Done(outcome, clean=not _leftovers()))

    def _run(self, run: frames.Run, ctx: ChildContext) -> Outcome:
        if run.offline and self._online:
            return not_enforced("network = []", Mode.PROCESS, _LET_IT, self._online)
        try:
            fn, signature = self._function(run.module, run.qualname)
        except Exception as error:
            name = f"{run.module}.{run.qualname}"
            return Outcome(
                JobState.FAILED,
                error_code=NOT_IMPORTABLE,
                error_message=f"a new process can't import {name}: {error!r}",
            )
        return perform(
            fn, signature, run.payload, ctx, run.max_result, memory_limited(run.memory_limit)
        )

    def _function(self, module: str, qualname: str) -> tuple[Callable[..., Any], Signature]:
        key = module, qualname
        if key not in self._functions:
            if module == "__main__" and self._main:
                import_main(self._main)
                self._main = {}
            found = attrgetter(qualname)(importlib.import_module(module))
            if isinstance(found, JobFunction):
                self._functions[key] = found.fn, found.signature
            else:  # a stage of a pipeline says itself how it is run here
                fn = getattr(found, "in_child", found)
                self._functions[key] = fn, Signature(fn)
        return self._functions[key]

    def _listen(self) -> None:
        buffer = frames.FrameBuffer()
        try:
            while data := self._sock.recv(1 << 16):
                for body in buffer.feed(data):
                    self._receive(frames.decode_to_child(body))
        except OSError:
            pass  # the job closed our socket: the parent notices, and sees to it
        else:
            if self._ctx is not None:  # the parent is gone
                os.killpg(0, signal.SIGKILL)
        self._jobs.put(None)

    def _receive(self, frame: frames.ToChild) -> None:
        if isinstance(frame, frames.Run):
            self._ctx = ChildContext(frame, self._send)
            self._jobs.put((frame, self._ctx))
        elif isinstance(frame, frames.Cancel):
            if (ctx := self._ctx) is not None:
                ctx.cancel.request(frame.reason)
        else:
            sys.argv[:] = frame.argv
            self._main = frame.main
            logging.getLogger().setLevel(frame.log_level)

    def _send(self, frame: frames.Frame) -> None:
        data = frames.encode(frame)
        with self._sending:
            self._sock.sendall(data)


def import_main(where: dict[str, str]) -> None:
    """Import the parent's `__main__` under another name, as multiprocessing does."""
    global preparing
    preparing = True
    try:
        spawn.prepare(where)
    finally:
        preparing = False


def memory_limited(limit: int | None) -> Any:
    """Let the process grow by `limit` bytes of address space, and no more, for a while."""
    return nullcontext() if limit is None else _address_space(limit)


@contextmanager
def _address_space(limit: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = tree.address_space() + limit
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _leftovers() -> bool:
    """Whether the job left something running: a process, or a thread that is no daemon."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass  # the dead, of which orphans come to this process too
    mine = threading.current_thread()
    return bool(tree.descendants(os.getpid())) or any(
        thread is not mine and not thread.daemon for thread in threading.enumerate()
    )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _tie_to_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, where it can (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(fd: int, parent: int, offline: int) -> None:
    """Where a child begins; `fd` is its socket."""
    online = leave_network() if offline else "its process was not told to leave it"
    _tie_to_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True, errors="replace")
    Child(socket.socket(fileno=fd), online).serve()
