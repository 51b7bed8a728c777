"""What job code logs and prints, on its way to the job's log.

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
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import Token
from functools import partial
from typing import Any

from penstock.ports.executor import IN_JOB_LOG, JOB_LOGGER, Context
from penstock.workloads.function.context import running

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
