"""Calling a job's function, and the Outcome of every way in which that can end.

Job code may raise anything; none of it may harm whoever runs it. What the safety rules demand of
it (memory, network, file system) is enforced, or the function is not called.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.job import RETRY_REQUESTED, Cancelled, Retry
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome
from penstock.workloads.function.context import running
from penstock.workloads.function.definition import Mode, kinds
from penstock.workloads.function.output import leave
from penstock.workloads.function.signature import Signature, WrongResult

BAD_INPUT = "BAD_INPUT"
CONSTRAINT_NOT_ENFORCED = "CONSTRAINT_NOT_ENFORCED"
EXITED = "EXITED"
OUT_OF_MEMORY = "OUT_OF_MEMORY"
RESULT_NOT_STORABLE = "RESULT_NOT_STORABLE"
RESULT_TOO_LARGE = "RESULT_TOO_LARGE"
RESULT_WRONG_TYPE = "RESULT_WRONG_TYPE"

MAX_MESSAGE = 4_000
MAX_TRACEBACK = 8_000

_PACKAGE = __name__.rpartition(".")[0]
_SUCCEEDED = JobState.SUCCEEDED  # looking up a member of an enumeration is slow


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
        return returned(value, signature, max_result)
    except BaseException as error:
        return raised(error, ctx)
    finally:
        leave(token, ctx)


def returned(value: Any, signature: Signature, max_result: int) -> Outcome:
    """The Outcome of a function that returned."""
    try:
        payload, media_type = signature.encode_result(value)
    except WrongResult as wrong:
        return failure(RESULT_WRONG_TYPE, str(wrong))
    except InvalidRequest as wrong:
        kind = type(value).__qualname__
        return failure(RESULT_NOT_STORABLE, f"a result of type {kind} can't be stored: {wrong}")
    if len(payload) > max_result:
        return failure(
            RESULT_TOO_LARGE,
            f"the result is {len(payload)} bytes; at most {max_result} are allowed"
            " (store it elsewhere and return where it is)",
        )
    return Outcome(_SUCCEEDED, payload, media_type)


def raised(error: BaseException, ctx: Context) -> Outcome:
    """The Outcome of a function that raised."""
    if isinstance(error, Cancelled) and ctx.cancel.requested:
        return cancelled(ctx)
    code, message, retry_after = type(error).__name__, _text_of(error), None
    if isinstance(error, Retry):
        code, retry_after = RETRY_REQUESTED, _seconds(error.after)
    elif isinstance(error, MemoryError):
        code, message = OUT_OF_MEMORY, message or "the job ran out of memory"
    elif isinstance(error, SystemExit):
        code, message = EXITED, f"the job called sys.exit({error.code!r})"
    trace = None
    if code is not RETRY_REQUESTED:
        trace = _traceback(error)
        ctx.log(trace, level="error")
    return failure(code, message, kinds(type(error)), retry_after, trace)


def cancelled(ctx: Context, how: str = "") -> Outcome:
    """The Outcome of a job that ended because it was asked to."""
    message = ctx.cancel.reason or "cancelled"
    return Outcome(JobState.CANCELLED, error_message=f"{message}; {how}" if how else message)


def bad_input(wrong: InvalidRequest) -> Outcome:
    return failure(BAD_INPUT, str(wrong), kinds(type(wrong)))


def failure(
    code: str,
    message: str,
    kinds: tuple[str, ...] = (),
    retry_after: float | None = None,
    traceback: str | None = None,
) -> Outcome:
    return Outcome(
        JobState.FAILED,
        error_code=code,
        error_message=bounded(message, MAX_MESSAGE),
        error_kinds=kinds,
        retry_after=retry_after,
        traceback=traceback,
    )


def bounded(text: str, most: int) -> str:
    """Text that can be stored: at most so long, and without lone surrogates."""
    if len(text) > most:
        text = f"{text[: most - 40]}... ({len(text)} characters in all)"
    return text.encode("utf-8", "replace").decode()


def bounded_end(text: str, most: int) -> str:
    """The same, keeping the end."""
    text = text if len(text) <= most else "..." + text[3 - most :]
    return text.encode("utf-8", "replace").decode()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return f"(its message can't be shown: {type(error).__name__}.__str__ raised)"


def _seconds(after: Any) -> float | None:
    """What a job said of when to retry, if it makes sense; else its policy says when."""
    if isinstance(after, int | float) and math.isfinite(after):
        return max(0.0, after)
    return None


def _traceback(error: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(type(error), error, _from_the_job(error)))
        return bounded_end(text.rstrip(), MAX_TRACEBACK)
    except Exception:
        return f"{type(error).__name__}, whose traceback can't be shown"


def _from_the_job(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this package that lead to the job's code."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        frame = frame.tb_next
    return frame or error.__traceback__


# -- constraints ------------------------------------------------------------------


def refusal(constraints: Constraints, mode: Mode, platform: str = sys.platform) -> Outcome | None:
    """Why a function of this mode may not run within these constraints; None if it may.

    Time, retries, concurrency and the size of the result are enforced by the engine and worker.
    """
    if constraints.read_only:
        return not_enforced(
            "read_only", mode, "have the rule deny it, or require an approval, instead"
        )
    if constraints.network:
        return not_enforced(
            f"network = {list(constraints.network)}",
            mode,
            "have the rule allow no network at all (an empty list), or require an approval",
        )
    for demand, made in (
        ("max_memory", constraints.max_memory is not None),
        ("network = []", is_offline(constraints)),
    ):
        if made and mode is not Mode.PROCESS:
            return not_enforced(demand, mode, "run it in process mode (mode='process')")
        if made and platform != "linux":
            return not_enforced(demand, mode, "run it on a worker on Linux")
    return None


def is_offline(constraints: Constraints | None) -> bool:
    """Whether it may use no network at all."""
    return constraints is not None and constraints.network is not None and not constraints.network


def memory_within(limit: int | None, constraints: Constraints | None) -> int | None:
    """A function's own limit, or the rules' if that is less."""
    most = None if constraints is None else constraints.max_memory
    given = [size for size in (limit, most) if size is not None]
    return min(given, default=None)


def not_enforced(demand: str, mode: Mode, help: str, why: str = "") -> Outcome:
    return failure(
        CONSTRAINT_NOT_ENFORCED,
        f"the safety rules demand {demand}, which can't be enforced on a function in {mode} mode"
        f"{f' here ({why})' if why else ''}; it was not run: {help}",
    )
