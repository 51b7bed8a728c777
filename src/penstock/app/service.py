"""Processes that run until a signal ends them, and what Ctrl-C does.

A server: the first signal asks it to finish what it runs, the next stops it at once. A command
that started a job and waits for it: the first cancels the job, the next leaves at once. A command
that only watches leaves the job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

from penstock.config.loading import log_ignored
from penstock.config.settings import LogFormat
from penstock.core.errors import DEBUG
from penstock.core.text import harmless
from penstock.ports.executor import IN_JOB_LOG, JOB_LOGGER

T = TypeVar("T")

log = logging.getLogger("penstock.cli")

_GARBAGE = 20_000
"""New containers after which Python looks for rings of garbage; its own default is 700."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_COLOURS = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "1;31"}


def run_service(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, in the fastest loop there is here."""
    from penstock.app.portal import new_event_loop

    # What is loaded by now stays; and few of the many small things that a job leaves behind
    # refer to each other, so looking for rings among them so often is time lost.
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


class Stop:
    """Whether this process was asked to stop, by signals."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._hear, number)

    def _hear(self, number: int) -> None:
        if not self.asked.is_set():
            name = signal.Signals(number).name
            log.info("%s: finishing what runs; once more to stop at once", name)
            self.asked.set()
        else:
            self.urgent.set()

    async def first_of(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run until it is asked to stop, and say whether `work` ended before; raises what it
        raises before that."""
        return await _race(work, self.asked, settled=True)

    async def unless_urgent(self, work: Coroutine[Any, Any, None]) -> bool:
        """See it through unless it gets urgent before that; the answer says whether it ended."""
        return await _race(work, self.urgent, settled=False)


def leave_at_once(why: str, code: int = 130) -> NoReturn:
    """End this process without waiting for what it runs.

    A thread can't be made to end, so there is no tidier way; what was acknowledged is durable,
    and a job's own processes die with their parent.
    """
    log.warning("%s", why)
    logging.shutdown()
    os._exit(code)


async def _race(work: Coroutine[Any, Any, None], event: asyncio.Event, *, settled: bool) -> bool:
    """Whether the work ended before the event; raises what it raised.

    With `settled`, work that lost the race has ended when this returns; without, nobody waits.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        waiting.cancel()
        working.cancel()
        await asyncio.wait({waiting, working} if settled else {waiting})


@asynccontextmanager
async def cancelling(
    cancel: Callable[[str], Awaitable[Any]],
    notice: Callable[[str], None] | None = None,
) -> AsyncIterator[list[str]]:
    """While what this command started is waited for: the first Ctrl-C cancels it, the second
    leaves at once. What is given says by which signal. `cancel` takes the reason."""
    loop, heard, tasks = asyncio.get_running_loop(), list[str](), set[asyncio.Task[Any]]()

    async def cancel_it(reason: str) -> None:
        await cancel(reason)

    def hear(number: signal.Signals) -> None:
        if heard:
            leave_at_once("left at once; the cancellation was asked for")
        heard.append(number.name)
        (notice or _say)("cancelling; Ctrl-C once more leaves at once")
        tasks.add(loop.create_task(cancel_it(f"{number.name} at the terminal")))

    for number in _SIGNALS:
        loop.add_signal_handler(number, hear, number)
    try:
        yield heard
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        await asyncio.gather(*tasks, return_exceptions=True)


def _say(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr, flush=True)


async def poll(
    look: Callable[[], Awaitable[T | None]], timeout: float | None, pause: float
) -> T | None:
    """Look again and again until there is something, or the time is over (None)."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while True:
                if (found := await look()) is not None:
                    return found
                await asyncio.sleep(pause)
    return None


# -- the log of a server -----------------------------------------------------------


class LogLines(logging.Formatter):
    """`12:03:44 message`, the level if it is worth a look, and no stack trace unless asked."""

    def __init__(self, *, colour: bool) -> None:
        super().__init__("%(message)s", datefmt="%H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self.formatTime(record, self.datefmt)} "
        if record.levelno >= logging.WARNING:
            level = record.levelname.lower()
            code = _COLOURS.get(record.levelno, "0")
            text += f"\x1b[{code}m{level}\x1b[0m: " if self._colour else f"{level}: "
        if job_id := getattr(record, "job_id", ""):
            text += f"[{job_id}] "
        text += harmless(record.getMessage())
        if record.exc_info and record.exc_info[1] is not None:
            if os.environ.get(DEBUG):
                return f"{text}\n{harmless(self.formatException(record.exc_info))}"
            error = record.exc_info[1]
            text += harmless(f": {type(error).__name__}: {error}")
        return text


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger and message, for a job's line its id and that of
    its trace, and the exception with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(
                "T", "milliseconds"
            ),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("job_id", "trace_id"):
            if value := getattr(record, name, ""):
                line[name] = value
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(*, verbose: bool = False, log_format: LogFormat = LogFormat.TEXT) -> None:
    """Let this process's log, and those of the jobs that it runs, go to stderr."""
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    handler = logging.StreamHandler(sys.stderr)
    is_json = log_format is LogFormat.JSON
    handler.setFormatter(JsonLines() if is_json else LogLines(colour=colour))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("penstock").setLevel(logging.DEBUG if verbose else logging.INFO)
    # What jobs log and print is told once: as lines of their logs.
    handler.addFilter(lambda record: not hasattr(record, IN_JOB_LOG))
    jobs = logging.getLogger(JOB_LOGGER)
    jobs.addHandler(handler)
    jobs.propagate = False
    log_ignored()
