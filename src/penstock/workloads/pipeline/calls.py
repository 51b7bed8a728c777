"""One call of a stage's function: in the event loop, in a thread, or in a process.

A call never raises what the function raised; it returns it, so that nothing a function does
can be taken for something of ours. asyncio's cancellation of the caller passes.

A thread can't be killed. One whose call ran out of time, or was given up, is left to itself
and holds its place in the pool until it ends, or its run does.

The runs of one process share their threads and processes. So a call may wait for one of them;
its own time counts from when it begins.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from penstock import values
from penstock.core.job import IN_VAIN, Cancelled
from penstock.core.pointer import JSON
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task
from penstock.workloads.function.context import is_being_cancelled, running, traced
from penstock.workloads.function.outcomes import OUTPUT, leave
from penstock.workloads.function.processes import ProcessPool
from penstock.workloads.function.threads import Call, ThreadPool
from penstock.workloads.pipeline.context import RunOptions, RunScope, StageContext
from penstock.workloads.pipeline.definition import Stage
from penstock.workloads.pipeline.pacing import pause, release
from penstock.workloads.pipeline.payloads import TOO_MANY_OUTPUTS, Unfit

NOT_IMPORTABLE = "NOT_IMPORTABLE"
_LATE = "it ran out of time"

T = TypeVar("T")
Ended = bytes | BaseException
"""The function's output as JSON, or why there is none."""


class FailedElsewhere(Exception):
    """A failure that another process told of."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.error_message or str(outcome.status))
        self.code = outcome.error_code or "FAILED"
        self.kinds = outcome.error_kinds
        self.retry_after = outcome.retry_after
        self.in_vain = self.code in IN_VAIN


class CallSpec(msgspec.Struct, frozen=True):
    """What is to be called, and with what."""

    stage: Stage
    ctx: StageContext
    data: bytes | None
    """The input as JSON; None where it is `given` as it is."""
    given: Any = None

    @property
    def timeout(self) -> float | None:
        return self.stage.info.timeout

    @property
    def name(self) -> str:
        return f"{self.ctx.stage}/{self.ctx.key}"

    def begin(self) -> Any:
        """Call the function: its result, its coroutine or its generator."""
        shape, arguments = self.stage.shape, {}
        if shape.takes_input:
            value = self.given if self.data is None else self.stage.codec.input(self.data)
            arguments[shape.parameter] = value
        if shape.takes_ctx:
            arguments["ctx"] = self.ctx
        return self.stage.fn(**arguments)


class Pools:
    """The threads and processes of all runs of one process, made when they are first needed."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._threads: ThreadPool[Any] | None = None
        self._processes: ProcessPool | None = None

    def threads(self, least: int) -> ThreadPool[Any]:
        """`least`: as many as one stage may want at once."""
        if self._threads is None:
            self._threads = ThreadPool(self._options.threads)
        self._threads.grow_to(least)
        return self._threads

    def processes(self) -> ProcessPool:
        if self._processes is None:
            options = self._options
            self._processes = ProcessPool(
                options.processes or os.cpu_count() or 1,
                kill_grace=options.kill_grace,
                max_result=options.max_result,
            )
        return self._processes

    async def close(self) -> None:
        """End the processes and the threads that are idle; leave the others."""
        processes, self._processes = self._processes, None
        threads, self._threads = self._threads, None
        if processes is not None:
            await processes.close()
        if threads is not None:
            await threads.close(0.0)


class Calls:
    """The calls of one run."""

    def __init__(self, scope: RunScope) -> None:
        self._clock, self._options, self._pools = scope.clock, scope.options, scope.pools
        self._scope = scope
        self._grace = min(scope.options.kill_grace, scope.pipeline.cancel_grace)
        self._most = 0
        self._left: dict[str, Callable[[], bool]] = {}
        self._stuck: list[Call[Any]] = []
        OUTPUT.open()

    def run(self, spec: CallSpec) -> Coroutine[Any, Any, Ended]:
        info = spec.stage.info
        mode, timeout = info.mode, info.timeout
        if mode == "thread":
            return self._in_thread(spec)
        if mode == "process":
            return self._in_process(spec)
        return self._here(spec) if timeout is None else self._here_in_time(spec, timeout)

    async def in_thread(self, name: str, work: Callable[[], T]) -> T:
        """Have something done in a thread; given up, it is left under this name."""
        call = self._pool().submit(work)
        try:
            return cast(T, await call.done)
        finally:
            if not call.settled:
                self._drop(name, call)

    def abandoned(self) -> tuple[str, ...]:
        """`stage/key` of calls that were given up and still run."""
        return tuple(name for name, is_over in self._left.items() if not is_over())

    def close(self) -> None:
        """Give back what it has; what does not end is left to itself."""
        for call in self._stuck:
            self._pool().leave(call)
        OUTPUT.close()

    # -- in the event loop --------------------------------------------------------

    async def _here(self, spec: CallSpec) -> Ended:
        ctx: Any = spec.ctx
        token = running.set(ctx)
        try:
            with traced(ctx):
                result = spec.begin()
                if spec.stage.shape.is_generator:
                    value = await _drained(result, self._options.max_outputs)
                else:
                    value = await result
            return spec.stage.codec.output(value)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            return error
        except GeneratorExit:
            raise
        except BaseException as error:
            return error
        finally:
            leave(token, ctx)

    async def _here_in_time(self, spec: CallSpec, timeout: float) -> Ended:
        task = asyncio.ensure_future(self._here(spec))
        try:
            if await self._in_time(task, timeout):
                return task.result()
        except asyncio.CancelledError:
            task.cancel()
            try:
                await asyncio.wait((task,))
            finally:
                if not task.done():  # cancelled once more: nobody waits for it any longer
                    self.leave(spec.name, task.done)
            raise
        spec.ctx.cancel.request(_LATE)
        task.cancel()
        if not await self._in_time(task, self._grace):
            self.leave(spec.name, task.done)
        return _too_late(timeout)

    # -- in a thread --------------------------------------------------------------

    async def _in_thread(self, spec: CallSpec) -> Ended:
        work, timeout = partial(_perform, spec, self._options.max_outputs), spec.timeout
        if timeout is None:
            call = self._pool().submit(work)
        else:
            began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            call = self._pool().submit(partial(_begin, began, work))
        try:
            if timeout is None:
                return cast(Ended, await call.done)
            if not await self._in_time(began, timeout) and self._pool().drop(call):
                return _none_free("thread", timeout)
            spec.ctx.start_clock(timeout)
            if await self._in_time(call.done, timeout):
                return cast(Ended, await call.done)
        except asyncio.CancelledError:
            self._give_up(spec, call, "cancelled")
            raise
        self._give_up(spec, call, _LATE)
        return _too_late(timeout)

    def _give_up(self, spec: CallSpec, call: Call[Any], reason: str) -> None:
        spec.ctx.cancel.request(reason)
        call.done.cancel()
        self._drop(spec.name, call)

    def _drop(self, name: str, call: Call[Any]) -> None:
        """Stop waiting for a call. One that has not begun never will."""
        if not self._pool().drop(call):
            self.leave(name, lambda: call.settled)
            self._stuck.append(call)

    def _pool(self) -> ThreadPool[Any]:
        self._most = self._most or _most_threads(self._scope)
        return self._pools.threads(self._most)

    # -- in a process -------------------------------------------------------------

    async def _in_process(self, spec: CallSpec) -> Ended:
        stage, timeout = spec.stage, spec.timeout
        if (problem := _not_importable(stage)) is not None:
            return problem
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def begin() -> None:
            if timeout is not None:
                spec.ctx.start_clock(timeout)
            release((began,))

        task = asyncio.ensure_future(
            self._pools.processes().run(
                stage.fn,
                _as_task(spec),
                cast(Context, spec.ctx),
                kill_grace=self._grace,
                began=begin,
            )
        )
        late = False
        try:
            if timeout is not None and not await self._in_time(began, timeout):
                task.cancel()
                return _none_free("process", timeout)
            if timeout is not None and not await self._in_time(task, timeout):
                late = True
                spec.ctx.cancel.request(_LATE)
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()  # the pool asks, tells and kills; then it lets that pass
            await asyncio.wait((task,))
            raise
        return _too_late(timeout) if late else _ended(spec, outcome)

    # -- time ---------------------------------------------------------------------

    async def _in_time(self, work: asyncio.Future[Any], seconds: float) -> bool:
        await pause(self._clock, seconds, wake=work)
        return work.done()

    def leave(self, name: str, is_over: Callable[[], bool]) -> None:
        """Report a call, `stage/key`, that does not end."""
        if name not in self._left:
            self._scope.context.log(f"{name} does not end; it is left to itself", level="warning")
        self._left[name] = is_over


def _most_threads(scope: RunScope) -> int:
    """As many as one of its stages may want at once."""
    stages = [stage for stage in scope.pipeline.stages.values() if stage.info.mode == "thread"]
    return max((stage.concurrency(scope.config) for stage in stages), default=1)


def _begin(began: asyncio.Future[None], work: Callable[[], Ended]) -> Ended:
    """In its thread: say that it begins."""
    with suppress(RuntimeError):  # the loop is closed: nobody waits
        began.get_loop().call_soon_threadsafe(release, (began,))
    return work()


def _perform(spec: CallSpec, most: int) -> Ended:
    """A plain function's call, in its thread."""
    ctx: Any = spec.ctx
    token = running.set(ctx)
    try:
        with traced(ctx):
            value = spec.begin()
            if spec.stage.shape.is_generator:
                generator, value = value, list(islice(value, most + 1))
                generator.close()
                _check_count(value, most)
        return spec.stage.codec.output(value)
    except BaseException as error:
        return error
    finally:
        leave(token, ctx)


async def _drained(generator: Any, most: int) -> list[Any]:
    values: list[Any] = []
    async for value in generator:
        values.append(value)
        if len(values) > most:
            await generator.aclose()
            break
    _check_count(values, most)
    return values


def _check_count(outputs: list[Any], most: int) -> None:
    if len(outputs) > most:
        raise Unfit(TOO_MANY_OUTPUTS, f"it yielded more than {most:,} outputs")


def _too_late(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"it took longer than {timeout:g} s")


def _none_free(what: str, timeout: float) -> TimeoutError:
    return TimeoutError(f"no {what} was free for it within {timeout:g} s")


# -- what a process is told, and tells -------------------------------------------------


def _not_importable(stage: Stage) -> Unfit | None:
    """Why another process would not find the stage under its function's name."""
    fn = stage.fn
    name = f"{fn.__module__}.{fn.__qualname__}"
    try:
        found = attrgetter(fn.__qualname__)(sys.modules[fn.__module__])
    except (KeyError, AttributeError):
        found = None
    if found is stage:
        return None
    return Unfit(
        NOT_IMPORTABLE,
        f"a process can't import {name}: declare the stage with a decorator at the top of a module",
    )


def _as_task(spec: CallSpec) -> Task:
    ctx, data = spec.ctx, spec.data
    payload = msgspec.json.encode(
        {
            "given": msgspec.Raw(b"null" if data is None else data),
            "about": {
                "stage": ctx.stage,
                "key": ctx.key,
                "pipeline": ctx.pipeline,
                "trace_id": ctx.trace_id,
                "config": msgspec.to_builtins(ctx.config, str_keys=True),
            },
        }
    )
    request = replace(ctx.request, topic=f"stage.{ctx.stage}", context_ptr="")
    return Task(request, ctx.attempt, payload, deadline=sys.float_info.max)


def _ended(spec: CallSpec, outcome: Outcome) -> Ended:
    if outcome.status is JobState.SUCCEEDED:
        data = outcome.payload or b"null"
        if outcome.media_type != JSON:
            data = values.encode(data, "output")
        try:
            return spec.stage.codec.checked(data)
        except Unfit as error:
            return error
    if outcome.status is JobState.CANCELLED:
        return Cancelled(outcome.error_message or "cancelled")
    return FailedElsewhere(outcome)
