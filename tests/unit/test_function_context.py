from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.core.errors import Misconfigured
from penstock.core.job import JobRequest
from penstock.ports.executor import Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.workloads.function.context import JobLogHandler, LoggingBridge, current, running
from penstock.workloads.function.definition import make_function
from penstock.workloads.function.executor import FunctionExecutor

log = logging.getLogger("tests.job")


@contextmanager
def bare_root() -> Iterator[logging.Logger]:
    """The root logger without pytest's handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    try:
        yield root
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


async def run(fn: Any) -> RecordingContext:
    job = make_function(fn, "job.it", lambda: None)  # type: ignore[arg-type, return-value]
    executor, ctx = FunctionExecutor({"job.it": job}), RecordingContext()
    await executor.run(Task(JobRequest(job_id="j", topic="job.it"), 1, b"", math.inf), ctx)
    await executor.close()
    return ctx


def test_outside_a_job_there_is_no_current_one() -> None:
    with pytest.raises(Misconfigured, match="no job is running here"):
        current()


@run_async
async def test_records_of_an_async_job_reach_its_log() -> None:
    async def talk() -> None:
        log.warning("count %d", 1)
        await asyncio.create_task(deeper())

    async def deeper() -> None:
        log.error("from a task of the job")

    ctx = await run(talk)
    assert ctx.lines == [("warning", "count 1"), ("error", "from a task of the job")]


@run_async
async def test_records_of_a_job_in_a_thread_reach_its_log() -> None:
    def talk() -> None:
        log.warning("from a thread")
        current().log("directly")

    assert (await run(talk)).lines == [("warning", "from a thread"), ("info", "directly")]


@run_async
async def test_records_outside_a_job_reach_no_job() -> None:
    async def quiet() -> None: ...

    ctx = await run(quiet)
    log.warning("not in a job")
    assert ctx.lines == []


def test_the_bridge_is_one_handler_however_many_use_it() -> None:
    bridge = LoggingBridge()
    with bare_root() as root:
        bridge.open()
        bridge.open()
        assert len(root.handlers) == 1
        bridge.close()
        assert len(root.handlers) == 1
        bridge.close()
        assert root.handlers == []


def test_the_level_of_the_root_logger_is_respected() -> None:
    bridge, ctx = LoggingBridge(), RecordingContext()
    with bare_root() as root:
        bridge.open()
        token = running.set(ctx)
        root.setLevel(logging.WARNING)
        log.info("too low")
        root.setLevel(logging.INFO)
        log.info("heard")
        running.reset(token)
    assert ctx.lines == [("info", "heard")]


def test_an_unconfigured_root_logger_still_prints_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bare_root() as root:
        LoggingBridge().open()
        root.setLevel(logging.INFO)
        log.info("not printed")
        log.warning("printed")
    assert capsys.readouterr().err == "printed\n"


def test_a_configured_root_logger_prints_once() -> None:
    class Counter(logging.Handler):
        count = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.count += 1

    counter = Counter()
    with bare_root() as root:
        root.addHandler(counter)
        root.addHandler(JobLogHandler())
        log.warning("once")
    assert counter.count == 1
