"""The job that is running here, for code that was not handed its Context.

A context variable holds it, so that it is right in tasks, in threads of ours, and in
whatever a job awaits. The same variable leads the records of the `logging` module that
are made inside a job into the job's own log.
"""

from __future__ import annotations

import logging
import threading
from contextvars import ContextVar

from penstock.core.errors import Misconfigured
from penstock.ports.executor import Context

running: ContextVar[Context | None] = ContextVar("penstock_job", default=None)


def current() -> Context:
    """The Context of the job that is running here."""
    ctx = running.get()
    if ctx is None:
        raise Misconfigured(
            "no job is running here",
            hint="penstock.current() works inside a job, and not in threads it starts by itself",
        )
    return ctx


class JobLogHandler(logging.Handler):
    """Sends what is logged inside a job to that job's log, and nothing else anywhere.

    A root logger without handlers prints warnings through `logging.lastResort`; with
    this handler on it, it would not. So where this one is all there is, it passes them on.
    """

    def __init__(self, *, last_resort: bool = True) -> None:
        super().__init__()
        self._last_resort = last_resort

    def emit(self, record: logging.LogRecord) -> None:
        ctx = running.get()
        try:
            if ctx is not None:
                ctx.log(self.format(record), level=record.levelname.lower())
            last = logging.lastResort
            heeded = last is not None and record.levelno >= last.level
            if last and heeded and self._last_resort and self._is_alone(record):
                last.handle(record)
        except Exception:
            self.handleError(record)

    def _is_alone(self, record: logging.LogRecord) -> bool:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


class LoggingBridge:
    """Puts one JobLogHandler on the root logger for as long as anyone needs it."""

    def __init__(self, *, last_resort: bool = True) -> None:
        self._handler = JobLogHandler(last_resort=last_resort)
        self._users = 0
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            self._users += 1
            logging.getLogger().addHandler(self._handler)

    def close(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                logging.getLogger().removeHandler(self._handler)


BRIDGE = LoggingBridge()
"""Shared by all executors of a process, as the root logger is."""
