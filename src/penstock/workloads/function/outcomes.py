"""How a function's end becomes an Outcome. Job code may raise anything; none of it may
harm whoever runs it.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest
from penstock.core.policy import RETRY_REQUESTED
from penstock.core.signals import Cancelled, Retry
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome
from penstock.workloads.function.context import running
from penstock.workloads.function.options import kinds
from penstock.workloads.function.problems import JSON_TROUBLE, check_numbers, why_not
from penstock.workloads.function.signature import Signature

BAD_INPUT = "BAD_INPUT"
RESULT_NOT_STORABLE = "RESULT_NOT_STORABLE"
RESULT_TOO_LARGE = "RESULT_TOO_LARGE"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
EXITED = "EXITED"
KILLED = "KILLED"

MAX_MESSAGE = 4_000
MAX_TRACEBACK = 20_000

_PACKAGE = __name__.rpartition(".")[0]
_encode = msgspec.json.Encoder().encode


def perform(
    fn: Callable[..., Any],
    signature: Signature,
    payload: bytes,
    ctx: Context,
    max_result: int,
    limits: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it has no state
) -> Outcome:
    """Run a plain function to its end, in this thread. Never raises."""
    try:
        arguments = signature.decode(payload)
    except InvalidRequest as wrong:
        return bad_input(wrong)
    token = running.set(ctx)
    try:
        with limits:
            value = signature.call(fn, arguments, ctx)
        return stored(value, max_result)
    except BaseException as error:
        return failed(error, ctx)
    finally:
        running.reset(token)


def stored(value: Any, max_result: int) -> Outcome:
    """The Outcome of a function that returned."""
    try:
        payload = _encode(value)
        check_numbers("result", value, payload)
    except (*JSON_TROUBLE, InvalidRequest) as problem:
        return _not_storable(value, problem)
    if len(payload) > max_result:
        return Outcome(
            JobState.FAILED,
            error_code=RESULT_TOO_LARGE,
            error_message=f"the result is {len(payload)} bytes; at most {max_result} are allowed"
            " (store it elsewhere and return where it is)",
        )
    return Outcome(JobState.SUCCEEDED, payload)


def failed(error: BaseException, ctx: Context) -> Outcome:
    """The Outcome of a function that raised."""
    if isinstance(error, Cancelled) and ctx.cancel.requested:
        return cancelled(ctx)
    if isinstance(error, Retry):
        return _retry(error)
    code, message = type(error).__name__, text_of(error)
    if isinstance(error, MemoryError):
        code, message = OUT_OF_MEMORY, message or "the job ran out of memory"
    elif isinstance(error, SystemExit):
        code, message = EXITED, f"the job called sys.exit({error.code!r})"
    _log_traceback(error, ctx)
    return Outcome(
        JobState.FAILED,
        error_code=code,
        error_message=bounded(message, MAX_MESSAGE),
        error_kinds=kinds(type(error)),
    )


def cancelled(ctx: Context, how: str = "") -> Outcome:
    """The Outcome of a job that ended because it was asked to."""
    message = ctx.cancel.reason or "cancelled"
    return Outcome(JobState.CANCELLED, error_message=f"{message}; {how}" if how else message)


def bad_input(wrong: InvalidRequest) -> Outcome:
    return Outcome(
        JobState.FAILED,
        error_code=BAD_INPUT,
        error_message=bounded(str(wrong), MAX_MESSAGE),
        error_kinds=kinds(type(wrong)),
    )


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"(its message can't be shown: {type(error).__name__}.__str__ raised)"


def bounded(text: str, most: int) -> str:
    """Text that can be stored: at most so long, and without lone surrogates."""
    if len(text) > most:
        text = f"{text[: most - 40]}... ({len(text)} characters in all)"
    return text.encode("utf-8", "replace").decode()


def _retry(error: Retry) -> Outcome:
    return Outcome(
        JobState.FAILED,
        error_code=RETRY_REQUESTED,
        error_message=bounded(text_of(error), MAX_MESSAGE),
        error_kinds=kinds(type(error)),
        retry_after=_seconds(error.after),
    )


def _seconds(after: Any) -> float | None:
    """What a job said of when to retry, if it makes sense; else its policy says when."""
    if isinstance(after, int | float) and math.isfinite(after):
        return max(0.0, after)
    return None


def _not_storable(value: Any, problem: Exception) -> Outcome:
    if inspect.iscoroutine(value):
        value.close()
    name = type(value).__qualname__
    why = str(problem) if isinstance(problem, InvalidRequest) else why_not(problem)
    return Outcome(
        JobState.FAILED,
        error_code=RESULT_NOT_STORABLE,
        error_message=bounded(f"a result of type {name} can't be stored: {why}", MAX_MESSAGE),
    )


def _log_traceback(error: BaseException, ctx: Context) -> None:
    try:
        lines = traceback.format_exception(type(error), error, _from_the_job(error))
        text = "".join(lines).rstrip()
        if len(text) > MAX_TRACEBACK:
            text = "..." + text[-MAX_TRACEBACK:]
        ctx.log(bounded(text, MAX_TRACEBACK + 3), level="error")
    except Exception:
        ctx.log(f"{type(error).__name__}, whose traceback can't be shown", level="error")


def _from_the_job(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this package that lead to the job's code."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.tb_next
    return frame or error.__traceback__
