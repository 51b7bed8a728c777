"""A child process that runs jobs: what it and its worker say to each other, and its own side.

A child runs one job at a time, in its main thread. A second thread listens to the worker, so that
a job can be asked to end while it runs, and so that the child dies with its worker. The child
leads a session of its own: killing its process group ends whatever the job has started, too.

They talk over a socket. A frame is four bytes of length and a msgpack message.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import spawn
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from penstock.core.artifact import Artifact, check_name
from penstock.core.errors import InvalidRequest
from penstock.core.job import JobRequest
from penstock.core.ledger import Step, artifact_of
from penstock.core.steps import check_notes, split_rows
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import PART, Source
from penstock.ports.bus import Refusal
from penstock.ports.executor import CancelToken, Outcome
from penstock.ports.frames import FrameBuffer, framed
from penstock.ports.steps import RunsSteps
from penstock.workloads.function import process_control
from penstock.workloads.function.definition import JobFunction, Signature
from penstock.workloads.function.options import Mode
from penstock.workloads.function.outcomes import OUTPUT, bounded, failure, not_enforced, perform

MAX_LINE = 1 << 20
_ALLOW = "allow user namespaces on the worker's machine (test with: unshare -Un true)"

preparing = False
"""True while this process is a child that imports its parent's `__main__`."""


# -- frames -----------------------------------------------------------------------


class Frame(Struct, frozen=True, array_like=True, tag=True):
    """One message."""


class Prepare(Frame, frozen=True):
    """To a child, first: how to be like its parent."""

    argv: tuple[str, ...]
    main: dict[str, str]
    """Where the parent's `__main__` comes from, as multiprocessing puts it."""
    root_level: int
    log_level: int
    """Of the records that go to a job's log."""


class Run(Frame, frozen=True):
    """To a child: run this function."""

    module: str
    qualname: str
    payload: bytes
    request: JobRequest
    attempt: int
    remaining: float
    memory_limit: int | None
    max_result: int
    offline: bool = False
    """Only in a process that has left the network."""


class Cancel(Frame, frozen=True):
    """To a child: the running job should end."""

    reason: str


class Reply(Frame, frozen=True):
    """To a child: the rows of Checkpoint `n` are durable, the rows that StepsWanted `n` asked for,
    or why not."""

    n: int
    rows: tuple[Step, ...] = ()
    more: bool = False
    """Whether there are rows after these."""
    refusal: Refusal | None = None


class Began(Frame, frozen=True):
    """From a child: from here on, the job's own code runs."""


class Report(Frame, frozen=True):
    """From a child: call this method of the job's Context."""

    method: Literal["log", "progress", "stream"]
    args: tuple[float | str | None, ...]


class Checkpoint(Frame, frozen=True):
    n: int
    rows: tuple[Step, ...]
    notes: tuple[str, ...] = ()


class Leave(Frame, frozen=True):
    """From a child: keep this file as an artifact. The Reply has its row."""

    n: int
    name: str
    path: str
    media_type: str | None


class StepsWanted(Frame, frozen=True):
    n: int
    name: str | None
    after: tuple[str, int] | None
    previous: bool = False


class Wait(Frame, frozen=True):
    """From a child: its job begins to wait for other jobs, or does so no more. A Reply says when
    it may go on, after `end`."""

    n: int
    what: Literal["begin", "leave", "end"]
    jobs: tuple[str, ...]


class Done(Frame, frozen=True):
    """From a child: the job has ended. `clean`: it left nothing running."""

    outcome: Outcome
    clean: bool


ToChild = Prepare | Run | Cancel | Reply
Asked = Checkpoint | Leave | StepsWanted | Wait
"""What has a Reply."""
FromChild = Began | Report | Checkpoint | Leave | StepsWanted | Wait | Done

encode = msgspec.msgpack.Encoder().encode
decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode


# -- the child --------------------------------------------------------------------


class ChildContext(RunsSteps):
    """The Context of a job in a child: everything goes to the worker's Context."""

    ended_as = JobState.CANCELLED
    environment = None

    def __init__(self, run: Run, send: Callable[[Frame], None]) -> None:
        self.request: JobRequest = run.request
        self.job_id = run.request.job_id
        self.attempt = run.attempt
        self.cancel = CancelToken()
        self.waits = ChildWaits(self)
        self._until = time.monotonic() + run.remaining
        self._send = send
        self._numbers = itertools.count(1)
        self._replies: dict[int, SimpleQueue[Reply]] = {}

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        known = None if fraction is None else float(fraction)
        self._send(Report("progress", (known, bounded(str(message), MAX_LINE))))

    def log(self, text: str, level: str = "info") -> None:
        self._send(Report("log", (bounded(str(text), MAX_LINE), str(level))))

    def stream(self, text: str) -> None:
        self._send(Report("stream", (bounded(str(text), MAX_LINE),)))

    def remaining(self) -> float:
        return self._until - time.monotonic()

    async def checkpoint(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        await asyncio.to_thread(self.checkpoint_sync, rows, notes)

    def checkpoint_sync(self, rows: Sequence[Step], notes: Sequence[str] = ()) -> None:
        checked = check_notes(notes)
        messages = split_rows(rows) or ([([], 0)] if checked else [])
        for place, (some, _) in enumerate(messages, 1):
            last = checked if place == len(messages) else ()
            self._ask(Checkpoint(next(self._numbers), tuple(some), last))

    async def artifact(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        return await asyncio.to_thread(self.artifact_sync, name, source, media_type)

    def artifact_sync(self, name: str, source: Source, media_type: str | None = None) -> Artifact:
        """The worker reads a file by its path; what is not in a file yet is written to one."""
        check_name(name)
        if isinstance(source, str | os.PathLike):
            return self._leave(name, os.path.abspath(source), media_type)
        with tempfile.NamedTemporaryFile(prefix="penstock-artifact-") as file:
            if isinstance(source, bytes | bytearray | memoryview):
                file.write(source)
            elif hasattr(source, "read"):
                shutil.copyfileobj(source, file, PART)
            else:
                kind = type(source).__name__
                raise InvalidRequest("source", f"must be a path, bytes or an open file, got {kind}")
            file.flush()
            return self._leave(name, file.name, media_type)

    def _leave(self, name: str, path: str, media_type: str | None) -> Artifact:
        return artifact_of(self._ask(Leave(next(self._numbers), name, path, media_type)).rows[0])

    async def steps(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> AsyncIterator[Step]:
        rows = self.steps_sync(name, after=after, previous=previous)
        while (row := await asyncio.to_thread(next, rows, None)) is not None:
            yield row

    def steps_sync(
        self,
        name: str | None = None,
        *,
        after: tuple[str, int] | None = None,
        previous: bool = False,
    ) -> Iterator[Step]:
        more = True
        while more:
            page = self._ask(StepsWanted(next(self._numbers), name, after, previous))
            for row in page.rows:
                yield row
                after = (row.name, row.n)
            more = page.more

    def wait(self, what: Literal["begin", "leave"], jobs: Sequence[str]) -> None:
        self._send(Wait(0, what, tuple(jobs)))

    def end_wait(self, jobs: Sequence[str]) -> None:
        self._ask(Wait(next(self._numbers), "end", tuple(jobs)))

    def _ask(self, frame: Asked) -> Reply:
        """Wait for the worker's reply. It kills this process if that lasts too long."""
        replies = self._replies[frame.n] = SimpleQueue()
        self._send(frame)
        reply = replies.get()
        del self._replies[frame.n]
        if reply.refusal is not None:
            raise reply.refusal.revive()
        return reply

    def take(self, reply: Reply) -> None:
        if (replies := self._replies.get(reply.n)) is not None:
            replies.put(reply)


class ChildWaits:
    """See `penstock.ports.executor.WaitContext`."""

    def __init__(self, ctx: ChildContext) -> None:
        self._ctx = ctx

    def begin(self, jobs: Sequence[str]) -> None:
        self._ctx.wait("begin", jobs)

    def leave(self, jobs: Sequence[str]) -> None:
        self._ctx.wait("leave", jobs)

    async def end(self, jobs: Sequence[str]) -> None:
        await asyncio.to_thread(self.end_sync, jobs)

    def end_sync(self, jobs: Sequence[str]) -> None:
        self._ctx.end_wait(jobs)


class Child:
    """Runs what the worker sends, until the worker hangs up."""

    def __init__(self, sock: socket.socket, online: str) -> None:
        self._sock = sock
        self._online = online
        """Why this process can still use the network; empty if it can't."""
        self._sending = threading.Lock()
        self._jobs: SimpleQueue[tuple[Run, ChildContext] | None] = SimpleQueue()
        self._ctx: ChildContext | None = None
        self._main: dict[str, str] = {}
        self._functions: dict[tuple[str, str], tuple[Callable[..., Any], Signature]] = {}
        self._pid = os.getpid()

    def serve(self) -> None:
        # Its output is a pipe to the worker. What a job's log has is not to be printed as well.
        logging.getLogger().addHandler(logging.NullHandler())
        OUTPUT.open(streams=False)
        threading.Thread(target=self._listen, name="penstock-parent", daemon=True).start()
        while (job := self._jobs.get()) is not None:
            run, ctx = job
            self._send(Began())
            outcome = self._run(run, ctx)
            if os.getpid() != self._pid:
                os._exit(0)  # a fork made by the job, which came back out of it
            self._ctx = None
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            self._send(Done(outcome, clean=not _leftovers()))

    def _run(self, run: Run, ctx: ChildContext) -> Outcome:
        if run.offline and self._online:
            return not_enforced("network = []", Mode.PROCESS, _ALLOW, self._online)
        try:
            fn, signature = self._function(run.module, run.qualname)
        except Exception as error:
            name = f"{run.module}.{run.qualname}"
            return failure("NOT_IMPORTABLE", f"a new process can't import {name}: {error!r}")
        limits = process_control.memory_limited(run.memory_limit)
        return perform(fn, signature, run.payload, ctx, run.max_result, limits)

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
        buffer = FrameBuffer()
        try:
            while data := self._sock.recv(1 << 16):
                for body in buffer.feed(data):
                    self._receive(decode_to_child(body))
        except OSError:
            pass  # the job closed our socket: the worker notices, and kills this process
        else:
            if self._ctx is not None:  # the worker is gone
                os.killpg(0, signal.SIGKILL)
        self._jobs.put(None)

    def _receive(self, frame: ToChild) -> None:
        ctx = self._ctx
        match frame:
            case Run():
                self._ctx = ctx = ChildContext(frame, self._send)
                self._jobs.put((frame, ctx))
            case Reply() if ctx is not None:
                ctx.take(frame)
            case Cancel() if ctx is not None:
                ctx.cancel.request(frame.reason)
            case Prepare():
                sys.argv[:] = frame.argv
                self._main = frame.main
                logging.getLogger().setLevel(frame.root_level)
                OUTPUT.level = frame.log_level

    def _send(self, frame: Frame) -> None:
        data = framed(encode(frame))
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


def _leftovers() -> bool:
    """Whether the job left something running: a process, or a thread that is no daemon."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass  # the dead, of which orphans come to this process too
    mine = threading.current_thread()
    return bool(process_control.descendants(os.getpid())) or any(
        thread is not mine and not thread.daemon for thread in threading.enumerate()
    )


def main(fd: int, parent: int, offline: int) -> None:
    """Where a child begins; `fd` is its socket."""
    online = process_control.leave_network() if offline else "its process was not told to leave it"
    process_control.tie_to_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True, errors="replace")
    Child(socket.socket(fileno=fd), online).serve()
