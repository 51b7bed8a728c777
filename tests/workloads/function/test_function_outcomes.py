from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.core.job import Cancelled, JobRequest, Retry, may_retry
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.testing.samples import a_job
from penstock.workloads.function.context import current
from penstock.workloads.function.definition import JobFunction, make_function
from penstock.workloads.function.executor import FunctionExecutor, make


def job(fn: Any, **said: Any) -> JobFunction[..., Any]:
    return make_function(fn, "job.it", lambda: None, **said)  # type: ignore[arg-type, return-value]


def both(fn: Any) -> list[Any]:
    """A plain function, and the same as an async one."""

    async def as_async(ctx: Context) -> Any:
        return fn(ctx)

    def as_plain(ctx: Context) -> Any:
        return fn(ctx)

    return [as_async, as_plain]


async def run(
    fn: Any, payload: bytes = b"{}", ctx: RecordingContext | None = None, **options: Any
) -> Outcome:
    executor = FunctionExecutor({"job.it": job(fn)}, **options)
    request = JobRequest(job_id="j", topic="job.it")
    try:
        return await executor.run(Task(request, 1, payload, math.inf), ctx or RecordingContext())
    finally:
        await executor.close()


@run_async
async def test_a_result_is_json() -> None:
    async def point(x: int) -> dict[str, Any]:
        return {"x": x, "all": [1, None]}

    outcome = await run(point, b'{"x":1}')
    assert outcome == Outcome(JobState.SUCCEEDED, b'{"x":1,"all":[1,null]}')


@run_async
async def test_no_result_is_null() -> None:
    async def nothing() -> None: ...

    assert (await run(nothing)).payload == b"null"


@run_async
async def test_bad_input_names_the_argument_and_the_function_does_not_run() -> None:
    async def take(text: str) -> None:
        raise AssertionError

    outcome = await run(take, b'{"text":5}')
    assert outcome.status is JobState.FAILED
    assert outcome.error_code == "BAD_INPUT"
    assert outcome.error_message == "input.text: expected str, got int"


@run_async
async def test_an_exception_gives_its_class_message_and_kinds() -> None:
    def broken(ctx: Context) -> None:
        raise ConnectionResetError("the other side left")

    for fn in both(broken):
        ctx = RecordingContext()
        outcome = await run(fn, ctx=ctx)
        assert outcome.status is JobState.FAILED
        assert outcome.error_code == "ConnectionResetError"
        assert outcome.error_message == "the other side left"
        assert {"ConnectionResetError", "OSError", "builtins.OSError"} <= set(outcome.error_kinds)
        (trace,) = ctx.logged("error")
        assert "in broken" in trace
        assert trace.endswith("ConnectionResetError: the other side left")
        assert "penstock/workloads" not in trace


@run_async
async def test_what_retry_on_names_is_what_an_outcome_carries() -> None:
    async def broken() -> None:
        raise ConnectionResetError

    outcome = await run(broken)
    policy = job(broken, retries=1, retry_on=OSError).defaults.retry
    assert may_retry(a_job("j", retry=policy), outcome)  # type: ignore[arg-type]


@run_async
async def test_a_message_is_bounded_and_storable() -> None:
    async def verbose() -> None:
        raise ValueError("\ud800" + "x" * 100_000)

    outcome = await run(verbose)
    assert outcome.error_message is not None
    assert len(outcome.error_message) <= 4_000
    assert outcome.error_message.endswith("(100001 characters in all)")
    outcome.error_message.encode()


@run_async
async def test_an_exception_that_cannot_be_shown_is_still_an_outcome() -> None:
    class Shy(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    async def broken() -> None:
        raise Shy

    outcome = await run(broken)
    assert outcome.error_code == "Shy"
    assert "can't be shown" in (outcome.error_message or "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SystemExit(3), "EXITED", "the job called sys.exit(3)"),
        (KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (MemoryError(), "OUT_OF_MEMORY", "the job ran out of memory"),
        (Cancelled("of my own"), "Cancelled", "of my own"),
        (asyncio.CancelledError("mine"), "CancelledError", "mine"),
        (StopIteration(), "StopIteration", ""),
        (BaseException("bare"), "BaseException", "bare"),
        (ExceptionGroup("many", [ValueError()]), "ExceptionGroup", "many (1 sub-exception)"),
    ],
)
def test_whatever_is_raised_fails_the_job_and_nothing_else(
    error: BaseException, code: str, message: str
) -> None:
    def broken(ctx: Context) -> None:
        raise error

    for fn in both(broken):
        outcome = asyncio.run(run(fn))
        assert outcome.status is JobState.FAILED
        if not (code == "StopIteration" and asyncio.iscoroutinefunction(fn)):
            assert (outcome.error_code, outcome.error_message) == (code, message)


@run_async
async def test_recursion_without_end_fails_the_job() -> None:
    def forever(ctx: Context) -> None:
        forever(ctx)

    for fn in both(forever):
        outcome = await run(fn)
        assert outcome.error_code == "RecursionError"


@pytest.mark.parametrize(
    ("after", "expected"), [(5, 5), (None, None), (-1, 0), (math.nan, None), ("x", None)]
)
def test_a_job_may_ask_to_be_tried_again(after: Any, expected: float | None) -> None:
    def busy(ctx: Context) -> None:
        raise Retry("busy", after=after)

    for fn in both(busy):
        ctx = RecordingContext()
        outcome = asyncio.run(run(fn, ctx=ctx))
        assert (outcome.error_code, outcome.retry_after) == ("RETRY", expected)
        assert outcome.error_message == "busy"
        assert ctx.lines == []


@run_async
async def test_obeying_a_request_to_end_is_cancelled_and_no_failure() -> None:
    def obedient(ctx: Context) -> None:
        ctx.cancel.raise_if_requested()

    for fn in both(obedient):
        ctx = RecordingContext()
        ctx.cancel.request("enough")
        outcome = await run(fn, ctx=ctx)
        assert outcome.status is JobState.CANCELLED
        assert outcome.error_message == "enough"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        (math.nan, "float"),
        ({"a": [math.inf]}, "result.a[0]"),
        (1 + 2j, "complex"),
        ("\ud800", "str"),
        (iter([1]), "list_iterator"),
    ],
)
def test_a_result_that_cannot_be_stored_fails_and_names_the_type(value: Any, named: str) -> None:
    async def give() -> Any:
        return value

    outcome = asyncio.run(run(give))
    assert outcome.status is JobState.FAILED
    assert outcome.error_code == "RESULT_NOT_STORABLE"
    assert named in (outcome.error_message or "")


@run_async
async def test_a_forgotten_await_is_named() -> None:
    async def inner() -> None: ...

    def give() -> Any:
        return inner()

    outcome = await run(give)
    assert outcome.error_code == "RESULT_NOT_STORABLE"
    assert "coroutine" in (outcome.error_message or "")


@run_async
async def test_a_result_too_large_gives_both_sizes() -> None:
    async def give() -> str:
        return "x" * 98

    assert (await run(give, max_result=100)).status is JobState.SUCCEEDED
    outcome = await run(give, max_result=99)
    assert outcome.error_code == "RESULT_TOO_LARGE"
    assert "100 bytes; at most 99" in (outcome.error_message or "")


@run_async
async def test_a_cancelled_async_job_cleans_up_before_run_ends() -> None:
    began, cleaned = asyncio.Event(), False

    async def slow() -> None:
        nonlocal cleaned
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned = True

    ctx = RecordingContext()
    running = asyncio.create_task(run(slow, ctx=ctx))
    await began.wait()
    ctx.cancel.request()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned


@run_async
async def test_a_cancellation_from_within_is_cancelled_only_when_asked_for() -> None:
    async def gives_up() -> None:
        raise asyncio.CancelledError

    ctx = RecordingContext()
    ctx.cancel.request("please")
    assert (await run(gives_up, ctx=ctx)).status is JobState.CANCELLED
    assert (await run(gives_up)).status is JobState.FAILED


@run_async
async def test_a_pending_job_whose_loop_is_abandoned_is_closed_quietly() -> None:
    async def slow() -> None:
        await asyncio.Event().wait()

    pending = run(slow)
    pending.send(None)
    pending.close()


@run_async
async def test_every_job_sees_its_own_context() -> None:
    async def who() -> str:
        await asyncio.sleep(0)
        return current().job_id

    executor = FunctionExecutor({"job.it": job(who)})
    requests = [JobRequest(job_id=f"j{n}", topic="job.it") for n in range(20)]
    runs = [
        asyncio.create_task(executor.run(Task(r, 1, b"", math.inf), RecordingContext(r)))
        for r in requests
    ]
    found = [msgspec.json.decode(o.payload or b"") for o in await asyncio.gather(*runs)]
    assert found == [r.job_id for r in requests]
    await executor.close()


@run_async
async def test_the_entry_point_serves_an_applications_functions() -> None:
    async def nothing() -> None: ...

    app = SimpleNamespace(functions={"job.it": job(nothing)})
    executor = make(app, {"kill_grace": 1.0, "unrelated": 5, "threads": None})
    assert executor.topics == ("job.it",)
    await executor.close()
    empty = make(None, {})
    assert empty.topics == ()
    await empty.close()
