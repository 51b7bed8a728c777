"""Functions in processes of their own: real processes, really killed."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.network import leaving_is_permitted

from penstock.core.job import JobRequest
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Outcome, Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.workloads.function.definition import make_function
from penstock.workloads.function.executor import FunctionExecutor

JOBS = str(Path(__file__).parents[2] / "support" / "jobs")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [JOBS, *sys.path])


class Processes:
    """An executor of every function in `process_jobs`."""

    def __init__(self, *, memory_limit: int | None = None, **options: Any) -> None:
        import process_jobs  # type: ignore[import-not-found]

        def submitter() -> Any:
            raise AssertionError

        functions = {
            f"job.{name}": make_function(
                fn, f"job.{name}", submitter, mode="process", memory_limit=memory_limit
            )
            for name, fn in vars(process_jobs).items()
            if getattr(fn, "__module__", "") == "process_jobs" and not isinstance(fn, type)
        }
        self.executor = FunctionExecutor(functions, **{"processes": 1, **options})

    async def run(
        self,
        name: str,
        ctx: RecordingContext | None = None,
        constraints: Constraints | None = None,
        **input: Any,
    ) -> Outcome:
        request = JobRequest(job_id="j", topic=f"job.{name}")
        task = Task(request, 1, msgspec.json.encode(input), math.inf, constraints)
        async with asyncio.timeout(50):
            return await self.executor.run(task, ctx or RecordingContext(request))

    async def result(self, name: str, constraints: Constraints | None = None, **input: Any) -> Any:
        outcome = await self.run(name, constraints=constraints, **input)
        assert outcome.status is JobState.SUCCEEDED, outcome
        return msgspec.json.decode(outcome.payload or b"")


@asynccontextmanager
async def processes(**options: Any) -> AsyncIterator[Processes]:
    them = Processes(**options)
    try:
        yield them
    finally:
        await them.executor.close()


async def started(ctx: RecordingContext) -> None:
    assert await asyncio.to_thread(ctx.wait_for_progress, "started")


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


async def dies(pid: int) -> bool:
    for _ in range(500):
        if not is_alive(pid):
            return True
        await asyncio.sleep(0.01)
    return False


@run_async
async def test_a_child_stays_warm_and_is_used_again() -> None:
    async with processes() as them:
        first = await them.result("my_pid")
        assert first != os.getpid()
        assert [await them.result("my_pid") for _ in range(5)] == [first] * 5


@run_async
async def test_there_are_no_more_children_than_allowed() -> None:
    async with processes(processes=2) as them:
        pids = await asyncio.gather(*[them.result("my_pid") for _ in range(10)])
        assert len(set(pids)) <= 2


@run_async
async def test_children_are_gone_after_close() -> None:
    async with processes() as them:
        pid = await them.result("my_pid")
    assert not is_alive(pid)


@run_async
async def test_failures_come_back_as_from_any_function() -> None:
    async with processes(max_result=1000) as them:
        ctx = RecordingContext()
        outcome = await them.run("fail", ctx)
        assert (outcome.error_code, outcome.error_message) == ("Mishap", "by design")
        assert {"Mishap", "process_jobs.Mishap", "ValueError"} <= set(outcome.error_kinds)
        assert "in fail" in ctx.logged("error")[0]
        assert (await them.run("ask_again")).retry_after == 7
        assert (await them.run("double", number="x")).error_code == "BAD_INPUT"
        assert (await them.run("unstorable")).error_code == "RESULT_NOT_STORABLE"
        assert (await them.run("letters", count=2000)).error_code == "RESULT_TOO_LARGE"


@run_async
async def test_everything_a_job_says_reaches_its_log() -> None:
    async with processes() as them:
        for _ in range(3):
            ctx = RecordingContext()
            await them.run("talk", ctx)
            assert sorted(ctx.lines) == [
                ("info", "to current()"),
                ("stderr", "to stderr"),
                ("stdout", "from a subprocess"),
                ("stdout", "to stdout"),
                ("stdout", "without an end"),
                ("warning", "to logging"),
            ]


@run_async
async def test_a_job_has_no_stdin_to_wait_for() -> None:
    async with processes() as them:
        assert await them.result("read_stdin") == ""


@run_async
async def test_large_payloads_cross_both_ways() -> None:
    big = "é" * (4 * MIB)
    async with processes() as them:
        assert await them.result("anything", value=big) == big


@run_async
async def test_sys_exit_fails_the_job_with_its_code() -> None:
    async with processes() as them:
        outcome = await them.run("exit_politely")
        assert (outcome.status, outcome.error_code) == (JobState.FAILED, "EXITED")
        assert "sys.exit(3)" in (outcome.error_message or "")


@run_async
async def test_an_abrupt_exit_fails_the_job_with_its_code_and_last_words() -> None:
    async with processes() as them:
        ctx = RecordingContext()
        outcome = await them.run("exit_abruptly", ctx)
        assert (outcome.status, outcome.error_code) == (JobState.FAILED, "EXITED")
        assert "code 4" in (outcome.error_message or "")
        assert ctx.logged("stdout") == ["last words"]
        assert await them.result("double", number=2) == 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_death_by_signal_is_named_and_the_child_replaced(number: signal.Signals) -> None:
    async def scenario() -> None:
        async with processes() as them:
            outcome = await them.run("die", number=int(number))
            assert (outcome.status, outcome.error_code) == (JobState.FAILED, "KILLED")
            assert number.name in (outcome.error_message or "")
            assert await them.result("double", number=2) == 4

    asyncio.run(scenario())


@run_async
async def test_the_death_of_one_child_does_not_touch_another() -> None:
    async with processes(processes=2) as them:
        ctx = RecordingContext()
        other = asyncio.create_task(them.run("until_asked", ctx))
        await started(ctx)
        assert (await them.run("die", number=9)).error_code == "KILLED"
        assert not other.done()
        ctx.cancel.request()
        assert (await other).status is JobState.CANCELLED


@run_async
async def test_too_much_memory_fails_the_job_and_the_child_lives_on() -> None:
    async with processes(memory_limit=256 * MIB) as them:
        pid = await them.result("my_pid")
        outcome = await them.run("eat", size=10 << 30)
        assert (outcome.status, outcome.error_code) == (JobState.FAILED, "OUT_OF_MEMORY")
        assert await them.result("eat", size=64 * MIB) == 64 * MIB
        assert await them.result("my_pid") == pid


@run_async
async def test_a_job_that_looks_at_its_token_ends_by_itself_and_keeps_its_child() -> None:
    async with processes(kill_grace=30) as them:
        pid = await them.result("my_pid")
        ctx = RecordingContext()
        running = asyncio.create_task(them.run("until_asked", ctx))
        await started(ctx)
        ctx.cancel.request("enough")
        outcome = await running
        assert (outcome.status, outcome.error_message) == (JobState.CANCELLED, "enough")
        assert await them.result("my_pid") == pid


@pytest.mark.parametrize(("name", "number"), [("deaf", "SIGTERM"), ("deafer", "SIGKILL")])
def test_a_job_that_ignores_its_token_is_killed_after_the_grace_time(
    name: str, number: str
) -> None:
    async def scenario() -> None:
        async with processes(kill_grace=0.1) as them:
            ctx = RecordingContext()
            running = asyncio.create_task(them.run(name, ctx))
            await started(ctx)
            ctx.cancel.request("enough")
            outcome = await running
            assert outcome.status is JobState.CANCELLED
            assert number in (outcome.error_message or "")
            assert not is_alive(int(ctx.progressed[0][1]))
            assert await them.result("double", number=2) == 4

    asyncio.run(scenario())


@run_async
async def test_a_cancelled_run_passes_the_cancellation_on_when_the_process_is_gone() -> None:
    async with processes(kill_grace=0.05) as them:
        ctx = RecordingContext()
        running = asyncio.create_task(them.run("deaf", ctx))
        await started(ctx)
        running.cancel()
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not is_alive(int(ctx.progressed[0][1]))


@run_async
async def test_a_kill_takes_everything_the_job_started() -> None:
    async with processes(kill_grace=0.05) as them:
        ctx = RecordingContext()
        running = asyncio.create_task(them.run("with_family", ctx))
        await started(ctx)
        family = [int(pid) for pid in ctx.logged("pids")[0].split()]
        assert all(is_alive(pid) for pid in family)
        ctx.cancel.request()
        await running
        assert not any(is_alive(pid) for pid in family)


@run_async
async def test_what_is_deaf_to_sigterm_does_not_outlive_the_job_that_is_not() -> None:
    async with processes(kill_grace=0.05) as them:
        ctx = RecordingContext()
        running = asyncio.create_task(them.run("with_deaf_family", ctx))
        await started(ctx)
        (away,) = map(int, ctx.logged("pids"))
        ctx.cancel.request()
        await running
        assert not is_alive(away)


@run_async
async def test_what_a_job_leaves_behind_is_ended_before_it_succeeds() -> None:
    async with processes() as them:
        ctx = RecordingContext()
        outcome = await them.run("leave_behind", ctx)
        assert outcome.status is JobState.SUCCEEDED
        assert not is_alive(msgspec.json.decode(outcome.payload or b"", type=int))
        assert "left processes" in ctx.logged("warning")[0]
        assert await them.result("leave_thread") == "done"
        assert await them.result("double", number=2) == 4


@run_async
async def test_a_fork_that_returns_from_the_job_is_not_mistaken_for_it() -> None:
    async with processes() as them:
        assert await them.result("fork_and_return") == "parent"
        assert await them.result("double", number=2) == 4


@run_async
async def test_a_job_that_closes_the_childs_socket_fails_and_nothing_hangs() -> None:
    async with processes() as them:
        outcome = await them.run("close_files")
        assert (outcome.status, outcome.error_code) == (JobState.FAILED, "EXITED")
        assert await them.result("double", number=2) == 4


@run_async
async def test_a_job_that_waits_for_a_child_can_be_cancelled() -> None:
    async with processes() as them:
        ctx = RecordingContext()
        first = asyncio.create_task(them.run("until_asked", ctx))
        await started(ctx)
        second = asyncio.create_task(them.run("double", number=1))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        ctx.cancel.request()
        await first


@run_async
async def test_a_child_that_died_while_idle_is_replaced_unnoticed() -> None:
    async with processes() as them:
        pid = await them.result("my_pid")
        os.kill(pid, signal.SIGKILL)
        assert await dies(pid)
        assert await them.result("my_pid") != pid


@run_async
async def test_a_function_that_cannot_be_imported_fails_clearly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import process_jobs

    monkeypatch.setattr(process_jobs.double, "__qualname__", "gone")
    async with processes() as them:
        outcome = await them.run("double", number=1)
        assert outcome.error_code == "NOT_IMPORTABLE"
        assert "process_jobs.gone" in (outcome.error_message or "")


SCRIPT = """
    import asyncio, math, os, sys
    from penstock.core.job import JobRequest
    from penstock.ports.executor import Context, Task
    from penstock.testing.context import RecordingContext
    from penstock.workloads.function.definition import make_function
    from penstock.workloads.function.executor import FunctionExecutor

    def work(ctx: Context, text: str) -> str:
        ctx.progress(message=str(os.getpid()))
        while text == "forever":
            pass
        return text.upper()

    job = make_function(work, "job.it", lambda: None, mode="process")

    class Announcing(RecordingContext):
        def progress(self, fraction=None, message=""):
            print(message, flush=True)

    async def main(payload):
        executor = FunctionExecutor({"job.it": job})
        task = Task(JobRequest(job_id="j", topic="job.it"), 1, payload, math.inf)
        outcome = await executor.run(task, Announcing())
        print(outcome.payload.decode() if outcome.payload else outcome.error_code, flush=True)
        await executor.close()

    if __name__ == "__main__":
        asyncio.run(main(sys.argv[1].encode()))
"""


def start_script(
    tmp_path: Path, text: str, *, guard: str = '__name__ == "__main__"'
) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace('__name__ == "__main__"', guard))
    return subprocess.Popen(
        [sys.executable, str(script), f'{{"text":"{text}"}}'],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_function_of_a_script_runs_in_a_child(tmp_path: Path) -> None:
    with start_script(tmp_path, "hello") as script:
        assert script.stdout is not None
        assert script.stdout.read().splitlines()[-1] == '"HELLO"'
    assert script.returncode == 0


def test_a_script_without_a_guard_does_not_start_processes_without_end(tmp_path: Path) -> None:
    with start_script(tmp_path, "hello", guard="True") as script:
        assert script.stdout is not None
        assert script.stdout.read().splitlines()[-1] == '"HELLO"'


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with start_script(tmp_path, "forever") as script:
        assert script.stdout is not None
        pid = int(script.stdout.readline())
        assert is_alive(pid)
        script.kill()
    until = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(pid)


# -- constraints --------------------------------------------------------------------------

OFFLINE = Constraints(network=())


@pytest.fixture
def _nobody_may_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """New processes have a thread from their start: the kernel lets none of them leave."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@run_async
async def test_the_rules_limit_of_memory_counts_where_the_function_has_none() -> None:
    async with processes() as them:
        tight = Constraints(max_memory=64 * MIB)
        outcome = await them.run("eat", constraints=tight, size=512 * MIB)
        assert outcome.error_code == "OUT_OF_MEMORY"
        assert await them.result("eat", tight, size=MIB) == MIB
        assert await them.result("eat", size=512 * MIB) == 512 * MIB


@run_async
async def test_of_two_limits_of_memory_the_lower_one_counts() -> None:
    async with processes(memory_limit=256 * MIB) as them:
        loose, tight = Constraints(max_memory=1024 * MIB), Constraints(max_memory=64 * MIB)
        over = await them.run("eat", constraints=loose, size=512 * MIB)
        assert over.error_code == "OUT_OF_MEMORY"
        assert await them.result("eat", loose, size=128 * MIB) == 128 * MIB
        over = await them.run("eat", constraints=tight, size=128 * MIB)
        assert over.error_code == "OUT_OF_MEMORY"


@run_async
async def test_a_process_that_left_the_network_stays_warm_for_its_like_only() -> None:
    async with processes(processes=2) as them:
        offline = await them.run("my_pid", constraints=OFFLINE)
        free = await them.result("my_pid")
        if leaving_is_permitted():
            assert msgspec.json.decode(offline.payload or b"") != free
            again = await them.run("my_pid", constraints=OFFLINE)
            assert again.payload == offline.payload
        else:
            assert offline.error_code == "CONSTRAINT_NOT_ENFORCED"
        assert await them.result("my_pid") == free


@run_async
async def test_there_is_never_more_than_one_warm_process_where_one_is_allowed() -> None:
    async with processes(processes=1) as them:
        pids = []
        for _ in range(3):
            pids.append(await them.result("my_pid"))
            await them.run("my_pid", constraints=OFFLINE)
            assert await dies(pids[-1])
        assert len(set(pids)) == 3


@run_async
async def test_who_left_the_network_is_who_it_was_and_may_write_where_it_might(
    tmp_path: Path,
) -> None:
    async with processes() as them:
        free = await them.result("who_am_i", path=str(tmp_path / "free"))
        outcome = await them.run("who_am_i", constraints=OFFLINE, path=str(tmp_path / "off"))
        assert free == [os.getuid(), os.getgid(), os.getuid()]
        if leaving_is_permitted():
            assert msgspec.json.decode(outcome.payload or b"") == free
        else:
            assert outcome.error_code == "CONSTRAINT_NOT_ENFORCED"


@pytest.mark.usefixtures("_nobody_may_leave")
@run_async
async def test_where_a_process_may_not_leave_the_network_the_function_is_not_called(
    tmp_path: Path,
) -> None:
    async with processes() as them:
        path = tmp_path / "file"
        for _ in range(2):
            outcome = await them.run("write", constraints=OFFLINE, path=str(path))
            assert outcome.error_code == "CONSTRAINT_NOT_ENFORCED"
            assert "network = []" in (outcome.error_message or "")
            assert "process mode" in (outcome.error_message or "")
            assert "user namespaces" in (outcome.error_message or "")
        assert not path.exists()
        await them.run("write", path=str(path))
        assert path.exists()


@run_async
async def test_a_process_that_never_left_refuses_even_if_it_is_asked_by_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with processes() as them:
        pool = them.executor._processes
        take = pool._take
        monkeypatch.setattr(pool, "_take", lambda offline: take(False))
        path = tmp_path / "file"
        outcome = await them.run("write", constraints=OFFLINE, path=str(path))
        assert outcome.error_code == "CONSTRAINT_NOT_ENFORCED"
        assert not path.exists()


@run_async
async def test_a_job_without_network_can_be_cancelled_with_all_it_started() -> None:
    async with processes(kill_grace=0.2) as them:
        ctx = RecordingContext()
        running = asyncio.create_task(them.run("with_family", ctx, OFFLINE))
        if not leaving_is_permitted():
            assert (await running).error_code == "CONSTRAINT_NOT_ENFORCED"
            return
        await started(ctx)
        ctx.cancel.request("enough")
        assert (await running).status is JobState.CANCELLED
        pids = ctx.logged("pids")[0].split()
        assert not any(is_alive(int(pid)) for pid in pids)
