"""Runs functions: in the event loop, in threads, or in processes of their own.

Whatever the mode, `run` returns only when nothing of the job runs any more, and what a
job's code does wrong becomes an Outcome.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.ports.executor import SCHEMA, Context, Outcome, Task
from penstock.workloads.function.context import is_being_cancelled, running, traced
from penstock.workloads.function.definition import JobFunction
from penstock.workloads.function.options import Mode
from penstock.workloads.function.outcomes import (
    OUTPUT,
    bad_input,
    cancelled,
    failure,
    leave,
    perform,
    raised,
    refusal,
    returned,
)
from penstock.workloads.function.processes import ProcessPool
from penstock.workloads.function.threads import Call, ThreadPool

KILL_GRACE = 5.0
MAX_RESULT = 64 << 20
THREADS = 64
_ASYNC = Mode.ASYNC  # looking up a member of an enumeration is slow

IGNORED = (
    "the thread ignores cancellation: a thread can't be killed, so this job ends only when its"
    " function does (look at ctx.cancel in it, or use mode='process')"
)


class FunctionExecutor:
    """Executes the functions of an application, each under its topic."""

    resumable = False

    def __init__(
        self,
        functions: Mapping[str, JobFunction[..., Any]],
        *,
        kill_grace: float = KILL_GRACE,
        max_result: int = MAX_RESULT,
        threads: int = THREADS,
        processes: int | None = None,
        log_level: int | None = None,
    ) -> None:
        """`log_level`: from which on records of `logging` go to the logs of jobs."""
        self.topics = tuple(functions)
        self.topic_defaults = {topic: function.defaults for topic, function in functions.items()}
        self._functions = functions
        self._kill_grace = kill_grace
        self._max_result = max_result
        self._size = threads
        self._threads: ThreadPool[Outcome] | None = None
        self._processes = ProcessPool(
            processes or os.cpu_count() or 1, kill_grace=kill_grace, max_result=max_result
        )
        OUTPUT.open(log_level)
        self._schemas: Mapping[str, Any] | None = None
        self._open = True
        self._stubborn: set[Call[Outcome]] = set()
        """What was cancelled and still runs in its thread."""
        self._abandoned = False

    def check(self, topic: str, payload: bytes) -> None:
        function = self._functions.get(topic)
        if function is not None:
            function.signature.decode(payload)

    def facts(self) -> Mapping[str, Any]:
        """What each function takes and returns."""
        if self._schemas is None:
            self._schemas = {SCHEMA + t: _described(one) for t, one in self._functions.items()}
        return self._schemas

    async def run(self, task: Task, ctx: Context) -> Outcome:
        function = self._functions.get(task.request.topic)
        if function is None:
            why = f"no function of this application serves {task.request.topic}"
            return failure("UNKNOWN_TOPIC", why)
        if task.constraints is not None:
            refused = refusal(task.constraints, function.mode)
            if refused is not None:
                return refused
        if function.mode is not _ASYNC:
            if function.mode is Mode.THREAD:
                return await self._run_in_thread(function, task.payload, ctx)
            limit = function.memory_limit
            return await self._processes.run(function.fn, task, ctx, memory_limit=limit)
        signature = function.signature
        try:
            arguments = signature.decode(task.payload)
        except InvalidRequest as wrong:
            return bad_input(wrong)
        token = running.set(ctx)
        try:
            with traced(ctx):
                value = await signature.call(function.fn, arguments, ctx)
            return returned(value, signature, self._max_result)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return cancelled(ctx) if ctx.cancel.requested else raised(error, ctx)
        except GeneratorExit:
            raise
        except BaseException as error:
            return raised(error, ctx)
        finally:
            leave(token, ctx)

    def abandon(self) -> None:
        """Let jobs that are cancelled end before their threads do: the process is about to end."""
        self._abandoned = True
        for call in self._stubborn:
            call.done.cancel()

    def lend(self, topic: str, count: int) -> None:
        """Let others have the thread or process of jobs that wait for them."""
        mode = self._functions[topic].mode
        if mode is Mode.THREAD and self._threads is not None:
            self._threads.lend(count)
        elif mode is Mode.PROCESS:
            self._processes.lend(count)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        await self._processes.close()
        if self._threads is not None:
            await self._threads.close(self._kill_grace)
        OUTPUT.close()

    async def _run_in_thread(
        self, function: JobFunction[..., Any], payload: bytes, ctx: Context
    ) -> Outcome:
        if self._threads is None:
            self._threads = ThreadPool(self._size)
        work = partial(perform, function.fn, function.signature, payload, ctx, self._max_result)
        call = self._threads.submit(work)
        try:
            return await call.done
        except asyncio.CancelledError:
            if not self._threads.drop(call):
                await self._outwait(call, ctx)
            raise

    async def _outwait(self, call: Call[Outcome], ctx: Context) -> None:
        """Wait for a thread that was asked to end, however long that takes."""
        loop = asyncio.get_running_loop()
        warning = loop.call_later(self._kill_grace, ctx.log, IGNORED, "warning")
        self._stubborn.add(call)
        while not (call.settled or self._abandoned):
            with suppress(asyncio.CancelledError):  # asked again; the answer is the same
                await call.outlast()
        self._stubborn.discard(call)
        warning.cancel()


def _described(function: JobFunction[..., Any]) -> dict[str, Any]:
    return {"description": inspect.getdoc(function.fn) or "", **function.signature.schemas()}


def make(app: Any, options: Mapping[str, Any]) -> FunctionExecutor:
    """The executor of an application's functions (entry point `penstock.executors`)."""
    known = ("kill_grace", "max_result", "threads", "processes", "log_level")
    chosen = {name: options[name] for name in known if options.get(name) is not None}
    return FunctionExecutor(app.functions if app is not None else {}, **chosen)
