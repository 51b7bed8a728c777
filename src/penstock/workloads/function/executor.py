"""Runs functions: in the event loop, in threads, or in processes of their own.

Whatever the mode, `run` returns only when nothing of the job runs any more, and what a
job's code does wrong becomes an Outcome.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.job import Offer
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task
from penstock.workloads.function.constraints import refusal
from penstock.workloads.function.context import BRIDGE, running
from penstock.workloads.function.definition import JobFunction
from penstock.workloads.function.options import Mode
from penstock.workloads.function.outcomes import bad_input, cancelled, failed, perform, stored
from penstock.workloads.function.processes import ProcessPool
from penstock.workloads.function.threads import Call, ThreadPool

KILL_GRACE = 5.0
MAX_RESULT = 64 << 20
THREADS = 64

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
    ) -> None:
        self.topics = tuple(functions)
        self.offers = {topic: _offer(function) for topic, function in functions.items()}
        self._functions = functions
        self._kill_grace = kill_grace
        self._max_result = max_result
        self._size = threads
        self._threads: ThreadPool[Outcome] | None = None
        self._processes = ProcessPool(
            processes or os.cpu_count() or 1, kill_grace=kill_grace, max_result=max_result
        )
        BRIDGE.open()
        self._open = True

    def check(self, topic: str, payload: bytes) -> None:
        function = self._functions.get(topic)
        if function is not None:
            function.signature.decode(payload)

    async def run(self, task: Task, ctx: Context) -> Outcome:
        function = self._functions.get(task.request.topic)
        if function is None:
            return _unknown(task.request.topic)
        if task.constraints is not None:
            refused = refusal(task.constraints, function.mode)
            if refused is not None:
                return refused
        if function.mode is Mode.ASYNC:
            return await self._run_here(function, task.payload, ctx)
        if function.mode is Mode.THREAD:
            return await self._run_in_thread(function, task.payload, ctx)
        return await self._processes.run(function, task, ctx)

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        await self._processes.close()
        if self._threads is not None:
            await self._threads.close(self._kill_grace)
        BRIDGE.close()

    async def _run_here(
        self, function: JobFunction[..., Any], payload: bytes, ctx: Context
    ) -> Outcome:
        signature = function.signature
        try:
            arguments = signature.decode(payload)
        except InvalidRequest as wrong:
            return bad_input(wrong)
        token = running.set(ctx)
        try:
            return stored(await signature.call(function.fn, arguments, ctx), self._max_result)
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            return cancelled(ctx) if ctx.cancel.requested else failed(error, ctx)
        except GeneratorExit:
            raise
        except BaseException as error:
            return failed(error, ctx)
        finally:
            try:
                running.reset(token)
            except ValueError:  # a coroutine may be closed from another context
                running.set(None)

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
        clock = asyncio.get_running_loop().time
        warn_at: float | None = clock() + self._kill_grace
        while not call.settled:
            try:
                await call.outlast(None if warn_at is None else max(0.0, warn_at - clock()))
            except asyncio.CancelledError:
                continue  # asked again; the answer is the same
            if warn_at is not None and clock() >= warn_at and not call.settled:
                warn_at = None
                ctx.log(IGNORED, level="warning")


def make(app: Any, options: Mapping[str, Any]) -> FunctionExecutor:
    """The executor of an application's functions (entry point `penstock.executors`)."""
    known = ("kill_grace", "max_result", "threads", "processes")
    chosen = {name: options[name] for name in known if options.get(name) is not None}
    return FunctionExecutor(app.functions if app is not None else {}, **chosen)


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _offer(function: JobFunction[..., Any]) -> Offer:
    defaults = function.defaults
    return Offer(defaults.timeout, defaults.retry, defaults.priority, defaults.idempotent)


def _unknown(topic: str) -> Outcome:
    return Outcome(
        JobState.FAILED,
        error_code="UNKNOWN_TOPIC",
        error_message=f"no function of this application serves {topic}",
    )
