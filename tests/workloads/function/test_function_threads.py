from __future__ import annotations

import asyncio
import math
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from penstock.core.job import JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.workloads.function.definition import make_function
from penstock.workloads.function.executor import FunctionExecutor
from penstock.workloads.function.threads import ThreadPool

TASK = Task(JobRequest(job_id="j", topic="job.it"), 1, b"", math.inf)


def executor_of(fn: Any, **options: Any) -> FunctionExecutor:
    job = make_function(fn, "job.it", lambda: None)  # type: ignore[arg-type, return-value]
    return FunctionExecutor({"job.it": job}, **options)


@run_async
async def test_no_more_threads_than_allowed_and_none_before_they_are_needed() -> None:
    pool: ThreadPool[bool] = ThreadPool(3)
    before = threading.active_count()
    gate = threading.Event()
    calls = [pool.submit(gate.wait) for _ in range(10)]
    assert threading.active_count() == before + 3
    gate.set()
    await asyncio.gather(*[call.done for call in calls])
    await pool.close(10)
    assert threading.active_count() == before


@run_async
async def test_an_idle_thread_is_used_again() -> None:
    pool: ThreadPool[int] = ThreadPool(8)
    used = {await pool.submit(threading.get_ident).done for _ in range(20)}
    assert len(used) == 1
    await pool.close(10)


@run_async
async def test_results_and_exceptions_come_back_to_their_own_callers() -> None:
    pool: ThreadPool[int] = ThreadPool(4)

    def work(n: int) -> int:
        if n % 7 == 0:
            raise ValueError(n)
        return n

    calls = [pool.submit(lambda n=n: work(n)) for n in range(500)]  # type: ignore[misc]
    ends = await asyncio.gather(*[call.done for call in calls], return_exceptions=True)
    for n, end in enumerate(ends):
        if n % 7 == 0:
            assert isinstance(end, ValueError)
        else:
            assert end == n
    await pool.close(10)


@run_async
async def test_context_variables_are_those_of_the_caller_and_changes_stay_inside() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=0)
    pool: ThreadPool[int] = ThreadPool(1)

    def work() -> int:
        seen = variable.get()
        variable.set(99)
        return seen

    variable.set(5)
    assert await pool.submit(work).done == 5
    assert variable.get() == 5
    await pool.close(10)


@run_async
async def test_work_that_no_thread_has_begun_can_be_dropped() -> None:
    pool: ThreadPool[bool] = ThreadPool(1)
    gate = threading.Event()
    busy = pool.submit(gate.wait)
    waiting = pool.submit(lambda: pytest.fail("it ran"))
    assert pool.drop(waiting)
    gate.set()
    await busy.done
    assert await pool.submit(lambda: True).done
    assert not pool.drop(busy)
    await pool.close(10)


@run_async
async def test_closing_leaves_a_stuck_thread_to_itself() -> None:
    pool: ThreadPool[bool] = ThreadPool(1)
    gate = threading.Event()
    pool.submit(gate.wait)
    await pool.close(0.01)
    gate.set()


@run_async
async def test_a_cancelled_job_that_waits_for_a_thread_never_runs() -> None:
    gate, ran = threading.Event(), []

    def work(ctx: Context) -> None:
        ran.append(ctx.job_id)
        gate.wait()

    executor = executor_of(work, threads=1)
    first = asyncio.create_task(executor.run(TASK, RecordingContext()))
    second_ctx = RecordingContext(JobRequest(job_id="second", topic="job.it"))
    second = asyncio.create_task(executor.run(TASK, second_ctx))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await first
    await executor.close()
    assert "second" not in ran


@run_async
async def test_a_cancel_ends_only_after_the_thread_has() -> None:
    began, ended = threading.Event(), threading.Event()

    def work(ctx: Context) -> None:
        began.set()
        ctx.cancel.wait()
        ended.set()

    executor, ctx = executor_of(work), RecordingContext()
    for _ in range(50):
        began.clear()
        ended.clear()
        ctx = RecordingContext()
        running = asyncio.create_task(executor.run(TASK, ctx))
        await asyncio.to_thread(began.wait)
        ctx.cancel.request()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended.is_set()
        assert ctx.lines == []
    await executor.close()


@run_async
async def test_a_thread_that_ignores_cancellation_is_waited_for_with_one_warning() -> None:
    began, gate = threading.Event(), threading.Event()

    def deaf() -> None:
        began.set()
        gate.wait()

    executor, ctx = executor_of(deaf, kill_grace=0.01), RecordingContext()
    running = asyncio.create_task(executor.run(TASK, ctx))
    await asyncio.to_thread(began.wait)
    ctx.cancel.request()
    running.cancel()
    while not ctx.lines:
        await asyncio.wait((running,), timeout=0.01)
    running.cancel()
    await asyncio.wait((running,), timeout=0.05)
    assert not running.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    (warning,) = ctx.logged("warning")
    assert "ignores cancellation" in warning
    await executor.close()


@run_async
async def test_cancel_and_finish_may_meet_at_any_moment() -> None:
    def quick() -> int:
        return 1

    executor = executor_of(quick, threads=2)
    for n in range(300):
        running = asyncio.create_task(executor.run(TASK, RecordingContext()))
        for _ in range(n % 5):
            await asyncio.sleep(0)
        running.cancel()
        (end,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(end, Outcome | asyncio.CancelledError)
    outcome = await executor.run(TASK, RecordingContext())
    assert outcome.status is JobState.SUCCEEDED
    await executor.close()
