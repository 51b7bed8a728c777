"""Processes for functions that must be killable, or that need a core of their own.

Children are started when they are first needed, stay warm, run one job at a time and
are replaced when they die. A job that should end is asked first, then told (SIGTERM),
then killed with everything it started.

A job that may use no network runs in a child that has left it; no other job does.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task
from penstock.workloads.function import child, frames
from penstock.workloads.function.children import ChildProcess, Ended
from penstock.workloads.function.constraints import (
    CONSTRAINT_NOT_ENFORCED,
    is_offline,
    memory_within,
)
from penstock.workloads.function.definition import JobFunction
from penstock.workloads.function.outcomes import EXITED, KILLED, cancelled

NO_PROCESS = "NO_PROCESS"

LOOK = 0.2
"""Seconds between looks at the cancel token, for callers that only set that."""
MAX_TERM_GRACE = 2.0
"""Seconds at most between SIGTERM and SIGKILL."""


class ProcessPool:
    """Up to `size` warm children, of both kinds together."""

    def __init__(self, size: int, *, kill_grace: float, max_result: int) -> None:
        self._size = size
        self._room = asyncio.Semaphore(size)
        self._idle: list[ChildProcess] = []
        self._busy: set[ChildProcess] = set()
        self._leaving: set[ChildProcess] = set()
        self._kill_grace = kill_grace
        self._max_result = max_result

    async def run(
        self,
        function: JobFunction[..., Any],
        task: Task,
        ctx: Context,
        *,
        kill_grace: float | None = None,
        began: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """`kill_grace` of this job, if it has its own; `began` is called when there is room."""
        async with self._room:
            began()
            grace = self._kill_grace if kill_grace is None else kill_grace
            while True:
                order = self._order(function, task, ctx)
                try:
                    one = self._take(order.offline)
                except (OSError, RuntimeError) as problem:
                    return _not_started(problem)
                outcome = await self._run_in(one, order, ctx, grace)
                if outcome is not None:
                    return outcome

    async def _run_in(
        self, one: ChildProcess, order: frames.Run, ctx: Context, kill_grace: float
    ) -> Outcome | None:
        self._busy.add(one)
        outcome = None
        try:
            outcome = await Attempt(one, ctx, kill_grace).run(order)
            return outcome
        finally:
            self._busy.discard(one)
            if one.is_idle and not one.gone.done():
                if outcome is not None and outcome.error_code == CONSTRAINT_NOT_ENFORCED:
                    self._retire(one)  # the next one may be let leave the network
                else:
                    self._idle.append(one)

    async def close(self) -> None:
        """End every child: the idle by themselves, the rest by force."""
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

    def _order(self, function: JobFunction[..., Any], task: Task, ctx: Context) -> frames.Run:
        return frames.Run(
            module=function.fn.__module__,
            qualname=function.fn.__qualname__,
            payload=task.payload,
            request=task.request,
            attempt=task.attempt,
            remaining=ctx.remaining(),
            memory_limit=memory_within(function.defaults.memory_limit, task.constraints),
            max_result=self._max_result,
            offline=is_offline(task.constraints),
        )


class Attempt:
    """One job in one child, from its start to its end, whoever brings that about."""

    def __init__(self, one: ChildProcess, ctx: Context, kill_grace: float) -> None:
        self._child = one
        self._ctx = ctx
        self._clock = asyncio.get_running_loop().time
        self._kill_grace = kill_grace
        self._cancelled = False
        self._force = ""

    async def run(self, order: frames.Run) -> Outcome | None:
        """The Outcome; None if the child had died idle, and the job has not begun."""
        ended = self._child.begin(order, self._ctx)
        while not ended.done() and not self._should_end:
            await self._wait(ended, LOOK)
        if not ended.done():
            await self._end(ended)
        outcome = await self._conclude(ended.result(), order.memory_limit)
        if self._cancelled:
            raise asyncio.CancelledError
        return outcome

    @property
    def _should_end(self) -> bool:
        return self._cancelled or self._ctx.cancel.requested

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
        if isinstance(end, frames.Done):
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
            return _cut_off()
        return _died(end, memory_limit)

    async def _wait(self, future: asyncio.Future[Any], timeout: float | None) -> None:
        try:
            await asyncio.wait((future,), timeout=timeout)
        except asyncio.CancelledError:
            self._cancelled = True

    async def _wait_all(self, future: asyncio.Future[Any], timeout: float | None) -> None:
        """Wait out the whole time, however often the caller cancels."""
        until = None if timeout is None else self._clock() + timeout
        while not future.done():
            left = None if until is None else until - self._clock()
            if left is not None and left <= 0:
                return
            await self._wait(future, left)


def _not_started(problem: Exception) -> Outcome:
    return Outcome(
        JobState.FAILED,
        error_code=NO_PROCESS,
        error_message=f"no process could be started for the job: {problem}",
    )


def _cut_off() -> Outcome:
    return Outcome(
        JobState.FAILED,
        error_code=EXITED,
        error_message="the job's process cut its connection to the worker, and was killed",
    )


def _died(status: int, memory_limit: int | None) -> Outcome:
    """The Outcome of a job whose process ended under it."""
    if status >= 0:
        return Outcome(
            JobState.FAILED,
            error_code=EXITED,
            error_message=f"the job's process exited with code {status}",
        )
    name = _signal_name(-status)
    message = f"the job's process was killed by {name}"
    if -status == signal.SIGKILL:
        limit = "no memory_limit is" if memory_limit is None else f"a limit of {memory_limit} was"
        message += (
            ", which Penstock did not send: it did so itself, or the system ran out of memory"
            f" ({limit} set)"
        )
    return Outcome(JobState.FAILED, error_code=KILLED, error_message=message)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
