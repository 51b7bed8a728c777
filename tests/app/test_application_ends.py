"""How `app.run()` ends: normally, after an error, after Ctrl-C; in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.waiting import eventually

import penstock
from penstock.lifecycles.canonical import JobState

APP = """
import asyncio, os, sys, threading, time
from pathlib import Path
import penstock

app = penstock.App()
here = Path(sys.argv[1])

@app.job("job.slow", idempotent=True)
async def slow(n: int) -> int:
    (here / f"slow-{n}").touch()
    await asyncio.sleep(0 if (here / "go").exists() else 3600)
    return n

@app.job("job.once")
async def once(n: int) -> int:
    (here / f"once-{n}").touch()
    await asyncio.sleep(3600)

@app.job("job.stubborn")
def stubborn(n: int) -> None:
    (here / f"stubborn-{n}").touch()
    time.sleep(3600)

def began(name, count):
    while len(list(here.glob(f"{name}-*"))) < count:
        time.sleep(0.01)
"""
NOISE = (
    "Task was destroyed",
    "never retrieved",
    "Unclosed",
    "never awaited",
    "Event loop is closed",
    "Exception in",
    "RuntimeError",
)


class Script:
    """A program that embeds an engine."""

    def __init__(self, folder: Path, text: str, **env: str) -> None:
        self.folder = folder
        (folder / "script.py").write_text(APP + text)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "default", "script.py", "."],
            cwd=folder,
            text=True,
            stderr=subprocess.PIPE,
            env={**os.environ, "PENSTOCK_DATA_DIR": "data", "PENSTOCK_HTTP__LISTEN": "", **env},
        )

    def ended(self, within: float = 30.0) -> str:
        """What it wrote to stderr."""
        _, told = self.process.communicate(timeout=within)
        assert not [noise for noise in NOISE if noise in told], told
        return told


def states(folder: Path) -> list[JobState]:
    with penstock.App().run(folder / "data", unknown_topics="hold") as client:
        return sorted(job.record.state for job in client.jobs(limit=1000))


FAILS = """
with app.run():
    {job}.submit_many([(n,) for n in range(100)])
    began("{job}", 32)
    raise ValueError("boom")
"""


def test_an_error_ends_running_jobs_at_once(tmp_path: Path) -> None:
    before = time.monotonic()
    told = Script(tmp_path, FAILS.format(job="once")).ended()
    assert told.splitlines()[-1] == "ValueError: boom"
    assert "waiting" not in told
    assert time.monotonic() - before < 20  # and not the 30 seconds of a drain
    assert states(tmp_path).count(JobState.FAILED) == 32


def test_idempotent_jobs_that_an_error_interrupted_run_again_at_the_next_start(
    tmp_path: Path,
) -> None:
    Script(tmp_path, FAILS.format(job="slow")).ended()
    (tmp_path / "go").touch()
    again = """
with app.run() as client:
    done = [job.result(timeout=60) for job in client.jobs(limit=1000)]
    assert sorted(done) == list(range(100)), done
"""
    script = Script(tmp_path, again)
    assert script.ended(60).count("Error") == script.process.returncode == 0


def test_an_error_is_shown_before_threads_that_ignore_their_end_are_given_up(
    tmp_path: Path,
) -> None:
    told = Script(tmp_path, FAILS.format(job="stubborn"), PENSTOCK_TIMEOUTS__KILL_GRACE="1").ended()
    error, waits, left, again = (
        told.index("ValueError: boom"),
        told.index("running jobs were asked to end, and have not yet: 32 of job.stubborn"),
        told.index("jobs still run that can't be ended"),
        told.rindex("ValueError: boom"),
    )
    assert error < left < again
    assert waits < left


def test_callers_that_still_wait_when_the_application_is_closed_get_an_error(
    tmp_path: Path,
) -> None:
    told = Script(
        tmp_path,
        """
errors = []
def wait(job):
    try:
        job.result()
    except penstock.PenstockError as error:
        errors.append(str(error))

with app.run():
    jobs = once.options(delay=3600).submit_many([(n,) for n in range(200)])
    waiting = [threading.Thread(target=wait, args=(job,)) for job in jobs]
    for one in waiting:
        one.start()
    time.sleep(0.2)
for one in waiting:
    one.join()
assert errors == ["the application was closed"] * 200, errors
try:
    jobs[0].result()
except penstock.PenstockError as error:
    assert "closed" in str(error)
""",
    ).ended()
    assert told == ""


def test_a_normal_end_says_what_it_waits_for(tmp_path: Path) -> None:
    told = Script(
        tmp_path,
        """
with app.run(timeouts__drain=1):
    once.submit_many([(1,), (2,)])
    began("once", 2)
""",
    ).ended()
    assert "waiting up to 1 s for running jobs to end: 2 of job.once" in told
    assert states(tmp_path) == [JobState.FAILED] * 2


WAITS = {
    "with": """
with app.run(timeouts__drain=3600):
    {job}.submit(1)
    began("{job}", 1)
    {inside}
""",
    "async with": """
async def main():
    async with app.run(timeouts__drain=3600):
        await {job}.asubmit(1)
        await asyncio.to_thread(began, "{job}", 1)
        {inside}
asyncio.run(main())
""",
}
INSIDE = {"with": "time.sleep(3600)", "async with": "await asyncio.sleep(3600)"}


@pytest.mark.parametrize("how", WAITS)
@pytest.mark.parametrize("inside", [True, False], ids=["in-the-block", "at-its-end"])
def test_ctrl_c_ends_running_jobs_at_once(tmp_path: Path, how: str, inside: bool) -> None:
    text = WAITS[how].format(job="once", inside=INSIDE[how] if inside else "pass")
    script = Script(tmp_path, text)
    eventually((tmp_path / "once-1").exists)
    time.sleep(0.3)
    script.process.send_signal(signal.SIGINT)
    told = script.ended()
    assert told.splitlines()[-1] == "KeyboardInterrupt"
    assert script.process.returncode == -signal.SIGINT
    assert states(tmp_path) == [JobState.FAILED]


CALLS = {
    "result": "job.result()",
    "gather": "penstock.gather(job)",
    "as_completed": "list(penstock.as_completed([job]))",
    "follow": "list(job.follow())",
}


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_a_call_that_waits_without_noise(tmp_path: Path, call: str) -> None:
    text = f"""
with app.run(timeouts__drain=3600):
    job = once.submit(1)
    began("once", 1)
    {CALLS[call]}
"""
    script = Script(tmp_path, text)
    eventually((tmp_path / "once-1").exists)
    time.sleep(0.3)
    script.process.send_signal(signal.SIGINT)
    assert script.ended().splitlines()[-1] == "KeyboardInterrupt"
    assert states(tmp_path) == [JobState.FAILED]


@pytest.mark.parametrize("how", WAITS)
def test_a_second_ctrl_c_waits_for_nothing(tmp_path: Path, how: str) -> None:
    text = WAITS[how].format(job="stubborn", inside=INSIDE[how])
    script = Script(tmp_path, text, PENSTOCK_TIMEOUTS__KILL_GRACE="3000")
    eventually((tmp_path / "stubborn-1").exists)
    for _ in range(2):
        time.sleep(0.5)
        script.process.send_signal(signal.SIGINT)
    assert script.ended().splitlines()[-1] == "KeyboardInterrupt"
    with penstock.App().run(tmp_path / "data", unknown_topics="hold") as client:
        (job,) = client.jobs()
        assert job.wait(timeout=30).state is JobState.TIMEOUT  # as after any loss of its worker


def test_ctrl_c_ends_running_jobs_under_pytest_as_well(tmp_path: Path) -> None:
    text = """
def test_it():
    with app.run("data"):
        once.submit(1)
        began("once", 1)
        time.sleep(3600)
"""
    (tmp_path / "test_script.py").write_text(APP.replace("sys.argv[1]", "'.'") + text)
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_script.py"],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Loading the plugins that happen to be installed takes ten times as long as the rest.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    eventually((tmp_path / "once-1").exists)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=30)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, told
    assert not [noise for noise in NOISE if noise in told], told
    assert states(tmp_path) == [JobState.FAILED]
