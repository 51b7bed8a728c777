"""What job code logs and prints is in the job's log, and nothing else is."""

from __future__ import annotations

import asyncio
import io
import logging
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.core.job import JobRequest
from penstock.ports.executor import JOB_LOGGER, Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.workloads.function import outcomes
from penstock.workloads.function.context import current, running
from penstock.workloads.function.definition import make_function
from penstock.workloads.function.executor import FunctionExecutor
from penstock.workloads.function.outcomes import MAX_PART, OUTPUT

log = logging.getLogger("tests.job")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests of this process have left open."""
    monkeypatch.setattr(OUTPUT, "_users", 0)
    monkeypatch.setattr(OUTPUT, "_streams", [])
    jobs = logging.Logger(JOB_LOGGER)
    monkeypatch.setitem(logging.root.manager.loggerDict, JOB_LOGGER, jobs)
    monkeypatch.setattr(outcomes, "_job_logger", jobs)
    for stream in (sys.stdout, sys.stderr):
        vars(stream).pop("write", None)


@contextmanager
def bare_root(level: int = logging.WARNING) -> Iterator[logging.Logger]:
    """The root logger without pytest's handlers."""
    root = logging.getLogger()
    handlers, before = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(level)
    try:
        yield root
    finally:
        root.handlers[:] = handlers
        root.setLevel(before)


@contextmanager
def in_job(level: int | None = None) -> Iterator[RecordingContext]:
    ctx = RecordingContext()
    OUTPUT.open(level)
    token = running.set(ctx)
    try:
        yield ctx
    finally:
        OUTPUT.end(ctx)
        running.reset(token)
        OUTPUT.close()
        OUTPUT.level = logging.INFO


async def run(fn: Any, **options: Any) -> RecordingContext:
    job = make_function(fn, "job.it", lambda: None)  # type: ignore[arg-type, return-value]
    executor, ctx = FunctionExecutor({"job.it": job}, **options), RecordingContext()
    await executor.run(Task(JobRequest(job_id="j", topic="job.it"), 1, b"", math.inf), ctx)
    await executor.close()
    return ctx


# -- records --------------------------------------------------------------------------------------


@run_async
async def test_records_of_an_async_job_reach_its_log() -> None:
    async def talk() -> None:
        log.info("count %d", 1)
        await asyncio.create_task(deeper())
        await asyncio.to_thread(log.warning, "from a thread of its own")

    async def deeper() -> None:
        log.error("from a task of the job")

    ctx = await run(talk)
    assert ctx.lines == [
        ("info", "count 1"),
        ("error", "from a task of the job"),
        ("warning", "from a thread of its own"),
    ]


@run_async
async def test_records_of_a_job_in_a_thread_reach_its_log() -> None:
    def talk() -> None:
        log.info("from a thread")
        current().log("directly")

    assert (await run(talk)).lines == [("info", "from a thread"), ("info", "directly")]


@run_async
async def test_output_outside_a_job_reaches_no_job() -> None:
    async def quiet() -> None: ...

    ctx = await run(quiet)
    log.warning("not in a job")
    print("nor this")
    assert ctx.lines == []


def test_a_record_that_levels_keep_from_handlers_is_in_the_job_s_log_alone() -> None:
    seen = Seen()
    with bare_root(logging.WARNING) as root:
        root.addHandler(seen)
        with in_job() as ctx:
            log.debug("too low for both")
            log.info("for the job")
            log.warning("for both")
        log.info("outside")
    assert ctx.lines == [("info", "for the job"), ("warning", "for both")]
    assert seen.messages == ["for both"]


def test_the_level_of_a_job_s_log_can_be_set() -> None:
    for level, count in ((logging.DEBUG, 3), (logging.ERROR, 1)):
        with bare_root(), in_job(level) as ctx:
            log.debug("a")
            log.info("b")
            log.error("c")
        assert len(ctx.lines) == count


def test_a_level_set_for_a_logger_itself_is_respected() -> None:
    noisy = logging.getLogger("tests.job.noisy")
    noisy.setLevel(logging.ERROR)
    try:
        with bare_root(), in_job() as ctx:
            noisy.getChild("deep").info("chatter")
            noisy.error("trouble")
    finally:
        noisy.setLevel(logging.NOTSET)
    assert ctx.lines == [("error", "trouble")]


def test_loggers_that_are_switched_off_stay_so() -> None:
    with bare_root(), in_job() as ctx:
        logging.disable(logging.INFO)
        log.info("no")
        logging.disable(logging.NOTSET)
    assert ctx.lines == []


def test_a_logger_that_does_not_propagate_is_heard() -> None:
    alone = logging.getLogger("tests.job.alone")
    alone.propagate = False
    with bare_root(), in_job() as ctx:
        alone.warning("heard")
    assert ctx.lines == [("warning", "heard")]


def test_a_traceback_that_a_job_logs_is_in_its_log() -> None:
    with bare_root(), in_job() as ctx:
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("it broke")
    ((level, text),) = ctx.lines
    assert level == "error"
    assert text.startswith("it broke\nTraceback")


def test_what_penstock_itself_does_is_not_the_job_s_output() -> None:
    with bare_root(logging.INFO), in_job() as ctx:
        logging.getLogger("penstock.anything").info("connected")
        logging.getLogger("penstock.anything").warning("worth knowing")
    assert ctx.lines == [("warning", "worth knowing")]


def test_a_console_handler_s_own_output_is_not_taken_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bare_root(logging.INFO) as root:
        root.addHandler(logging.StreamHandler(sys.stderr))
        with in_job() as ctx:
            log.info("once")
    assert ctx.lines == [("info", "once")]
    assert capsys.readouterr().err == "once\n"


def test_an_unconfigured_root_logger_still_prints_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bare_root(), in_job() as ctx:
        log.info("not printed")
        log.warning("printed")
    assert capsys.readouterr().err == "printed\n"
    assert len(ctx.lines) == 2


# -- streams --------------------------------------------------------------------------------------


def test_prints_are_in_the_log_line_by_line_and_on_the_console(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with in_job() as ctx:
        print("one", "two")
        print("a", end="")
        print("b\nc")
        print("oh", file=sys.stderr)
        print()
        sys.stdout.writelines(["d\n", "no end"])
        assert ("stdout", "no end") not in ctx.lines
    assert ctx.lines == [
        ("stdout", "one two"),
        ("stdout", "ab"),
        ("stdout", "c"),
        ("stderr", "oh"),
        ("stdout", ""),
        ("stdout", "d"),
        ("stdout", "no end"),
    ]
    said = capsys.readouterr()
    assert (said.out, said.err) == ("one two\nab\nc\n\nd\nno end", "oh\n")


def test_what_is_printed_to_a_file_is_left_alone() -> None:
    file = io.StringIO()
    with in_job() as ctx:
        print("to the file", file=file)
    assert ctx.lines == []
    assert file.getvalue() == "to the file\n"


def test_a_progress_bar_is_one_line() -> None:
    with in_job() as ctx:
        for percent in range(0, 101, 10):
            sys.stderr.write(f"\r{percent}%")
        sys.stderr.write("\n")
        print("windows\r")
    assert ctx.lines == [("stderr", "100%"), ("stdout", "windows")]


def test_output_without_an_end_of_line_is_bounded() -> None:
    with in_job() as ctx:
        for _ in range(100):
            sys.stdout.write("x" * 1000)
        assert len(ctx.lines) >= 9
        assert all(len(text) <= MAX_PART + 1000 for _, text in ctx.lines)
    assert sum(len(text) for _, text in ctx.lines) == 100_000


@run_async
async def test_jobs_that_print_at_once_have_their_own_lines() -> None:
    async def talk(ctx: Any) -> None:
        for n in range(50):
            print(current().job_id, end=" ")
            await asyncio.sleep(0)
            print(n)

    job = make_function(talk, "job.it", lambda: None)  # type: ignore[arg-type, return-value]
    executor = FunctionExecutor({"job.it": job})
    contexts = [RecordingContext(JobRequest(job_id=name, topic="job.it")) for name in "abc"]
    tasks = [Task(ctx.request, 1, b"", math.inf) for ctx in contexts]
    await asyncio.gather(*(executor.run(*pair) for pair in zip(tasks, contexts, strict=True)))
    await executor.close()
    for ctx in contexts:
        assert ctx.logged("stdout") == [f"{ctx.job_id} {n}" for n in range(50)]


def test_threads_that_a_job_starts_itself_are_not_followed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with in_job() as ctx:
        thread = threading.Thread(target=print, args=("elsewhere",))
        thread.start()
        thread.join()
    assert ctx.lines == []
    assert capsys.readouterr().out == "elsewhere\n"


def test_a_finalizer_that_prints_while_a_line_is_taken_does_not_hang() -> None:
    with in_job() as ctx, OUTPUT._lock:
        print("from a finalizer")
    assert ctx.lines == [("stdout", "from a finalizer")]


def test_a_fork_can_print_though_another_thread_held_the_lock() -> None:
    with in_job():
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with OUTPUT._lock:
                held.set()
                done.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(10)
        with warnings.catch_warnings():  # newer Pythons warn of forks beside threads
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            sys.stdout.write("x")
            os._exit(7)
        done.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_to_print_does_not_fail_when_the_log_does() -> None:
    with in_job() as ctx:
        ctx.log = None  # type: ignore[assignment, method-assign]
        print("still fine")
        log.warning("this too")


def test_streams_are_as_before_when_nobody_needs_them() -> None:
    with in_job(), in_job():
        assert "write" in vars(sys.stdout)
    assert "write" not in vars(sys.stdout)


def test_what_the_worker_shows_with_the_job_s_id_is_not_printed_as_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs, seen = logging.getLogger(JOB_LOGGER), Seen()
    jobs.addHandler(seen)
    try:
        with in_job() as ctx:
            print("hello")
    finally:
        jobs.removeHandler(seen)
    assert ctx.lines == [("stdout", "hello")]
    assert capsys.readouterr().out == ""


# -- libraries ------------------------------------------------------------------------------------


def test_structlog_prints_into_the_log() -> None:
    structlog = pytest.importorskip("structlog")
    with in_job() as ctx:
        structlog.get_logger().info("hello", number=5)
    ((level, text),) = ctx.lines
    assert level == "stdout"
    assert "hello" in text
    assert "5" in text


def test_loguru_writes_into_the_log_though_it_took_its_stream_before() -> None:
    loguru = pytest.importorskip("loguru")
    stream = sys.stderr
    number = loguru.logger.add(stream, format="{message}")
    try:
        with in_job() as ctx:
            loguru.logger.info("hello")
    finally:
        loguru.logger.remove(number)
    assert ("stderr", "hello") in ctx.lines


class Seen(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
