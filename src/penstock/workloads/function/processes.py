"""Processes for functions that must be killable, or that need a core of their own.

Children (`penstock.workloads.function.child`) are started when they are first needed, stay warm,
run one job at a time and are replaced when they die. A job that should end is asked first, then
told (SIGTERM), then killed with everything it started.

A job that may use no network runs in a child that has left it; no other job does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from multiprocessing import spawn
from typing import IO, Any

import msgspec

from penstock.core.errors import PenstockError
from penstock.core.ledger import Step, artifact_row
from penstock.core.steps import MAX_PAGE_BYTES, MAX_PAGE_ROWS, size_of
from penstock.ports.bus import Refusal
from penstock.ports.executor import Context, Outcome, Task
from penstock.ports.frames import FrameBuffer, framed
from penstock.workloads.function import child, process_control
from penstock.workloads.function.outcomes import (
    CONSTRAINT_NOT_ENFORCED,
    EXITED,
    OUTPUT,
    cancelled,
    failure,
    is_offline,
    memory_within,
)

KILLED = "KILLED"
NO_PROCESS = "NO_PROCESS"

MAX_TERM_GRACE = 2.0
"""Seconds at most between SIGTERM and SIGKILL."""

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
_NOT_OURS = (msgspec.DecodeError, TypeError)
"""Raised for frames that no child sends."""

Ended = child.Done | int
"""How a job left a child: with a result, or with the child's exit status."""


class ProcessPool:
    """Up to `size` warm children, of both kinds together."""

    def __init__(self, size: int, *, kill_grace: float, max_result: int) -> None:
        self._size = size
        self._room = asyncio.Semaphore(size)
        self._lent: set[asyncio.Future[Any]] = set()
        """Room that was lent and is to be taken back when there is some."""
        self._idle: list[ChildProcess] = []
        self._busy: set[ChildProcess] = set()
        self._leaving: set[ChildProcess] = set()
        self._kill_grace = kill_grace
        self._max_result = max_result

    async def run(
        self,
        fn: Callable[..., Any],
        task: Task,
        ctx: Context,
        *,
        memory_limit: int | None = None,
        kill_grace: float | None = None,
        began: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """`fn` is found again by its name. `kill_grace` of this job, if it has its own; `began`
        is called when there is room."""
        async with self._room:
            began()
            grace = self._kill_grace if kill_grace is None else kill_grace
            while True:
                order = child.Run(
                    module=fn.__module__,
                    qualname=fn.__qualname__,
                    payload=task.payload,
                    request=task.request,
                    attempt=task.attempt,
                    remaining=ctx.remaining(),
                    memory_limit=memory_within(memory_limit, task.constraints),
                    max_result=self._max_result,
                    offline=is_offline(task.constraints),
                )
                try:
                    one = self._take(order.offline)
                except (OSError, RuntimeError) as problem:
                    why = f"no process could be started for the job: {problem}"
                    return failure(NO_PROCESS, why)
                outcome = await self._run_in(one, order, ctx, grace)
                if outcome is not None:
                    return outcome

    async def _run_in(
        self, one: ChildProcess, order: child.Run, ctx: Context, kill_grace: float
    ) -> Outcome | None:
        self._busy.add(one)
        outcome = None
        try:
            outcome = await ChildJob(one, ctx, kill_grace).run(order)
            return outcome
        finally:
            self._busy.discard(one)
            if one.is_idle and not one.gone.done():
                if outcome is not None and outcome.error_code == CONSTRAINT_NOT_ENFORCED:
                    self._retire(one)  # the next one may be let leave the network
                else:
                    self._idle.append(one)

    def lend(self, count: int) -> None:
        """Have one more, or one fewer again: what waits for the work of others does not count."""
        self._size += count
        if count > 0:
            self._room.release()
        else:
            taking_back = asyncio.ensure_future(self._room.acquire())
            self._lent.add(taking_back)
            taking_back.add_done_callback(self._lent.discard)

    async def close(self) -> None:
        """End every child: the idle by themselves, the rest by force."""
        for taking_back in self._lent:
            taking_back.cancel()
        children = [*self._idle, *self._busy, *self._leaving]
        for one in self._idle:
            one.hang_up()
        for one in self._busy:
            one.kill()
        if children:
            await asyncio.wait([one.gone for one in children], timeout=self._kill_grace)
        for one in children:
            if not one.gone.done():
                one.kill()
                await asyncio.wait((one.gone,))
        self._idle.clear()

    def _take(self, offline: bool) -> ChildProcess:
        if child.preparing:
            raise RuntimeError(
                "this process is itself one; guard what a script starts with"
                " if __name__ == '__main__'"
            )
        self._idle = [one for one in self._idle if one.is_alive]
        for one in reversed(self._idle):
            if one.offline == offline:
                self._idle.remove(one)
                return one
        if len(self._idle) + len(self._busy) >= self._size:
            self._retire(self._idle.pop(0))
        return ChildProcess(offline)

    def _retire(self, one: ChildProcess) -> None:
        """Let an idle child go."""
        self._leaving.add(one)
        one.gone.add_done_callback(lambda _: self._leaving.discard(one))
        one.hang_up()


class ChildJob:
    """One job in one child, from its start to its end, however it ends."""

    def __init__(self, one: ChildProcess, ctx: Context, kill_grace: float) -> None:
        self._child = one
        self._ctx = ctx
        self._clock = asyncio.get_running_loop().time
        self._kill_grace = kill_grace
        self._cancelled = False
        self._force = ""

    async def run(self, order: child.Run) -> Outcome | None:
        """The Outcome; None if the child had died idle, and the job has not begun."""
        ended = self._child.begin(order, self._ctx)
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[None] = loop.create_future()
        forget = self._ctx.cancel.when_requested(lambda: loop.call_soon_threadsafe(asked.cancel))
        await self._wait(ended, asked)
        forget()
        if not ended.done():
            await self._end(ended)
        outcome = await self._conclude(ended.result(), order.memory_limit)
        if self._cancelled:
            raise asyncio.CancelledError
        return outcome

    async def _end(self, ended: asyncio.Future[Ended]) -> None:
        self._child.ask(self._ctx.cancel.reason)
        await self._wait_all(ended, self._kill_grace)
        if not ended.done():
            self._force = "SIGTERM"
            self._child.terminate()
            await self._wait_all(ended, min(self._kill_grace, MAX_TERM_GRACE))
        if not ended.done():
            self._force = "SIGKILL"
            self._child.kill()
            await self._wait_all(ended, None)

    async def _conclude(self, end: Ended, memory_limit: int | None) -> Outcome | None:
        if isinstance(end, child.Done):
            if not end.clean or self._force:
                if not end.clean:
                    self._ctx.log(
                        "the job left processes or threads running; they were ended",
                        level="warning",
                    )
                self._child.kill()
                await self._wait_all(self._child.gone, None)
            return end.outcome
        await self._wait_all(self._child.gone, None)
        if self._force:
            return cancelled(self._ctx, f"it did not end by itself and was sent {self._force}")
        if self._child.is_used and not self._child.began:
            return None
        if self._child.is_cut_off:
            why = "the job's process cut its connection to the worker, and was killed"
            return failure(EXITED, why)
        return _died(end, memory_limit)

    async def _wait(self, *futures: asyncio.Future[Any], timeout: float | None = None) -> None:
        """Until one of them is done, the time is over, or the caller cancels."""
        try:
            await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._cancelled = True

    async def _wait_all(self, future: asyncio.Future[Any], timeout: float | None) -> None:
        """Wait out the whole time, however often the caller cancels."""
        until = None if timeout is None else self._clock() + timeout
        while not future.done():
            left = None if until is None else until - self._clock()
            if left is not None and left <= 0:
                return
            await self._wait(future, timeout=left)


def _died(status: int, memory_limit: int | None) -> Outcome:
    """The Outcome of a job whose process ended under it."""
    if status >= 0:
        return failure(EXITED, f"the job's process exited with code {status}")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    message = f"the job's process was killed by {name}"
    if -status == signal.SIGKILL:
        limit = "no memory_limit is" if memory_limit is None else f"a limit of {memory_limit} was"
        message += (
            ", which Penstock did not send: it did so itself, or the system ran out of memory"
            f" ({limit} set)"
        )
    return failure(KILLED, message)


class Lines:
    """What a child writes to one of its outputs, line by line."""

    def __init__(self, pipe: IO[bytes] | None, sink: Callable[[str], None]) -> None:
        assert isinstance(pipe, FileIO)
        self._pipe, self._sink = pipe, sink
        self._part = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe, self._read)

    def drain(self) -> None:
        """Pass on all that has been written, also a line without an end."""
        for _ in range(_READS):
            if not self._read():
                break
        if self._part:
            self._emit(self._part)
            self._part = b""

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe)
            self._pipe.close()

    def _read(self) -> bool:
        data = None if self._pipe.closed else self._pipe.read(_CHUNK)
        if not data:
            if data is not None:
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
        self._sink(line.decode("utf-8", "replace").rstrip("\r"))


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
        self._buffer = FrameBuffer()
        self._unsent = bytearray()
        self._replies: set[asyncio.Task[None]] = set()
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
        prepared = spawn.get_preparation_data("penstock")
        main = {key: value for key, value in prepared.items() if key.startswith("init_main_")}
        self._send(child.Prepare(tuple(sys.argv), main, logging.getLogger().level, OUTPUT.level))

    @property
    def is_idle(self) -> bool:
        return self._ended is None

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def begin(self, run: child.Run, ctx: Context) -> asyncio.Future[Ended]:
        """Give the idle child a job; the future says how it left it."""
        self._ctx = ctx
        self.began = False
        self._ended = self._loop.create_future()
        self._send(run)
        return self._ended

    def ask(self, reason: str) -> None:
        """Tell the job that it should end."""
        self._send(child.Cancel(reason))

    def terminate(self) -> None:
        self._below += process_control.terminate(self.pid)

    def kill(self) -> None:
        process_control.kill(self.pid)

    def hang_up(self) -> None:
        """Let an idle child end by itself."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def _start(self) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        numbers = (theirs.fileno(), os.getpid(), int(self.offline))
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(sys.path), *map(str, numbers)],
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()
        self._lines = (
            Lines(self._popen.stdout, partial(self._log, "stdout")),
            Lines(self._popen.stderr, partial(self._log, "stderr")),
        )

    def _send(self, frame: child.Frame) -> None:
        was_empty = not self._unsent
        self._unsent += framed(child.encode(frame))
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
            self._hear(data)
        except _NOT_OURS:
            self.kill()  # the job wrote into our socket: nothing it says counts now

    def _hear(self, data: bytes) -> None:
        for body in self._buffer.feed(data):
            self._receive(child.decode_from_child(body))

    def _receive(self, frame: child.FromChild) -> None:
        if isinstance(frame, child.Done):
            self._settle(frame)
        elif isinstance(frame, child.Began):
            self.began = self.is_used = True
        elif self._ctx is None:
            return
        elif isinstance(frame, child.Report):
            getattr(self._ctx, frame.method)(*frame.args)
        elif isinstance(frame, child.Wait) and frame.what != "end":
            if (waits := self._ctx.waits) is not None:
                getattr(waits, frame.what)(frame.jobs)
        else:
            task = self._loop.create_task(self._reply(frame, self._ctx))
            self._replies.add(task)
            task.add_done_callback(self._replies.discard)

    async def _reply(self, frame: child.Asked, ctx: Context) -> None:
        """Let the parent's Context do it, and tell the child how that went."""
        refusal, more, size = None, False, 0
        rows: list[Step] = []
        try:
            if isinstance(frame, child.Checkpoint):
                await ctx.checkpoint(frame.rows, frame.notes)
            elif isinstance(frame, child.Leave):
                left = await ctx.artifact(frame.name, frame.path, frame.media_type)
                rows.append(artifact_row(left))
            elif isinstance(frame, child.Wait):
                if ctx.waits is not None:
                    await ctx.waits.end(frame.jobs)
            else:
                rows_of = ctx.steps(frame.name, after=frame.after, previous=frame.previous)
                async for row in rows_of:
                    rows.append(row)
                    size += size_of(row)
                    if more := len(rows) == MAX_PAGE_ROWS or size > MAX_PAGE_BYTES:
                        break
        except PenstockError as error:
            refusal = Refusal.of(error)
        if ctx is self._ctx:  # the job has not ended
            self._send(child.Reply(frame.n, tuple(rows), more, refusal))

    def _log(self, level: str, text: str) -> None:
        if self._ctx is not None:
            self._ctx.log(text, level=level)

    def _settle(self, end: Ended) -> None:
        for lines in self._lines:
            lines.drain()
        ended, self._ended, self._ctx = self._ended, None, None
        for task in self._replies:
            task.cancel()
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
        self._close_pidfd()
        self._await_exit()

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _exited(self) -> None:
        self._close_pidfd()
        process_control.kill_group(self.pid)
        process_control.finish(self._below)
        status = self._popen.wait()
        with suppress(OSError, *_NOT_OURS):
            while data := self._sock.recv(_CHUNK):
                self._hear(data)
        self._settle(status)
        self._loop.remove_writer(self._sock)
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for lines in self._lines:
            lines.close()
        self.gone.set_result(status)
