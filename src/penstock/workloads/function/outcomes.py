"""Calling a job's function: what it prints and logs, and the Outcome of every way to end.

Job code may raise anything; none of it may harm the worker. What the safety rules demand of
it (memory, network, file system) is enforced, or the function is not called.

While an executor is open, a record of `logging` that is made inside a job, and text that is
written to standard output or error there, goes to the log of that job. The context variable
`running` says which job that is, so it is right in tasks, in `asyncio.to_thread` and in threads of
ours; threads and executors that a job starts itself don't have it.

Two methods of `logging.Logger` are wrapped rather than a handler added to the root logger: levels
that the process has set keep INFO records from handlers, and must go on doing so. The streams'
own `write` is wrapped rather than `sys.stdout` replaced: many libraries take hold of a stream when
they are imported. Outside a job, nothing is different.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Token
from functools import partial
from types import TracebackType
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.job import RETRY_REQUESTED, Cancelled, Retry
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import IN_JOB_LOG, JOB_LOGGER, Context, Outcome
from penstock.workloads.function.context import running, traced
from penstock.workloads.function.definition import Signature, WrongResult
from penstock.workloads.function.options import Mode, kinds

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
        with limits, traced(ctx):
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


# -- output --------------------------------------------------------------------------

MAX_PART = 8192
"""Characters without an end of line that are held back."""

_job_logger = logging.getLogger(JOB_LOGGER)
_formatter = logging.Formatter()
_is_enabled = logging.Logger.isEnabledFor
_call_handlers = logging.Logger.callHandlers


class OutputCapture:
    """Leads the output of jobs to their logs for as long as anyone needs it."""

    def __init__(self) -> None:
        self.level = logging.INFO
        """Records below it don't go to the logs of jobs."""
        self._users = 0
        self._lock = threading.RLock()
        """Reentrant: a finalizer may print while it is held."""
        os.register_at_fork(after_in_child=self._forked)
        self._streams: list[Any] = []
        self._parts: dict[tuple[int, str], str] = {}
        """What a job wrote of a line that has no end yet, by job and stream."""
        self._thread = threading.local()

    def open(self, level: int | None = None, *, streams: bool = True) -> None:
        with self._lock:
            self._users += 1
            if level is not None:
                self.level = level
            if logging.Logger.callHandlers is _call_handlers:
                logging.Logger.isEnabledFor = _is_enabled_in_job  # type: ignore[method-assign]
                logging.Logger.callHandlers = _handle_in_job  # type: ignore[method-assign]
            if streams:
                self._wrap(sys.stdout, "stdout")
                self._wrap(sys.stderr, "stderr")

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for stream in self._streams:
                    with suppress(AttributeError):
                        del stream.write
                self._streams.clear()

    def _forked(self) -> None:
        self._lock = threading.RLock()  # the thread that held it is not here

    # -- records ------------------------------------------------------------------

    def takes(self, logger: logging.Logger, level: int) -> bool:
        """Whether a record that handlers don't get is for the log of a job all the same: the
        level that forbids it is that of the root logger, and not one set for this logger."""
        if level < self.level or self._users == 0 or running.get() is None or logger.disabled:
            return False
        if logger.manager.disable >= level or _is_ours(logger.name, level):
            return False
        while logger.parent is not None:
            if logger.level:
                return False
            logger = logger.parent
        return True

    def take(self, record: logging.LogRecord) -> bool:
        """Send the record to the log of the job that is running here, if there is one."""
        ctx = running.get()
        if ctx is None or self._users == 0 or record.levelno < self.level:
            return False
        if _is_ours(record.name, record.levelno):
            return False
        with self.paused(), suppress(Exception):
            ctx.log(_formatter.format(record), level=record.levelname.lower())
            setattr(record, IN_JOB_LOG, True)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What this thread writes meanwhile, as handlers do, is not taken."""
        before = getattr(self._thread, "paused", False)
        self._thread.paused = True
        try:
            yield
        finally:
            self._thread.paused = before

    # -- streams ------------------------------------------------------------------

    def _wrap(self, stream: Any, level: str) -> None:
        if stream is None or any(stream is other for other in self._streams):
            return
        with suppress(AttributeError):  # a stream that can't be wrapped is left alone
            stream.write = partial(self._write, stream.write, level)
            self._streams.append(stream)

    def _write(self, write: Any, level: str, text: Any, /) -> Any:
        ctx = running.get()
        if ctx is None or not isinstance(text, str) or getattr(self._thread, "paused", False):
            return write(text)
        self._take_text(ctx, level, text)
        if _job_logger.handlers:
            return len(text)  # they show it, with the job's id
        return write(text)

    def _take_text(self, ctx: Context, level: str, text: str) -> None:
        key = (id(ctx), level)
        with self._lock:
            *lines, part = (self._parts.pop(key, "") + text).split("\n")
            # A progress bar writes its line again and again.
            part = part[:-1].rpartition("\r")[2] + part[-1:]
            if len(part) > MAX_PART:
                lines.append(part)
            elif part:
                self._parts[key] = part
        self._send(ctx, level, lines)

    def _send(self, ctx: Context, level: str, lines: list[str]) -> None:
        with self.paused():
            for line in lines:
                with suppress(Exception):  # to print must not fail because a worker stops
                    ctx.log(line.rstrip("\r").rpartition("\r")[2], level=level)

    def end(self, ctx: Context) -> None:
        """The job has ended: its last line need not have an end."""
        for level in ("stdout", "stderr") if self._parts else ():
            with self._lock:
                part = self._parts.pop((id(ctx), level), "")
            if part:
                self._send(ctx, level, [part])


OUTPUT = OutputCapture()
"""Shared by all executors of a process, as loggers and streams are."""


def leave(token: Token[Context | None], ctx: Context) -> None:
    """Undo `running.set(ctx)`: the job's code has ended."""
    OUTPUT.end(ctx)
    try:
        running.reset(token)
    except ValueError:  # a coroutine may be closed from another context
        running.set(None)


def _is_ours(name: str, level: int) -> bool:
    """Whether it tells what we do for the job, which is not what the job does."""
    return name.startswith("penstock.") and level < logging.WARNING


def _is_enabled_in_job(self: logging.Logger, level: int) -> bool:
    return _is_enabled(self, level) or OUTPUT.takes(self, level)


def _handle_in_job(self: logging.Logger, record: logging.LogRecord) -> None:
    if record.name == JOB_LOGGER:  # it tells what a job's log has
        with OUTPUT.paused():
            _call_handlers(self, record)
    elif not OUTPUT.take(record):
        _call_handlers(self, record)
    elif _is_enabled(self, record.levelno):
        with OUTPUT.paused():
            _call_handlers(self, record)
