"""A real model at work on a folder, driven from the shell."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support.cli.commands import Penstock, said
from tests.support.waiting import eventually

from penstock.lifecycles.spool import Status
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import SpoolOptions

LONG = ("--max-tokens", "8000", "--temperature", "0", "--raw")
"""Of a job that is still running whenever one looks."""


@contextmanager
def serving(penstock: Penstock, model: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    common = ("--model", str(model), "--workers", "2", "--threads", "1")
    process = penstock.start("spool", "serve", "ws", *common, *args, stderr=subprocess.STDOUT)
    try:
        penstock.banner = said(process, "ready")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[Penstock]:
    shared = Penstock(tmp_path_factory.mktemp("spool"))
    with serving(shared, model_file) as process:
        yield shared
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def flow(penstock: Penstock) -> Flow:
    return Flow(penstock.folder / "ws")


def is_running(penstock: Penstock, job_id: str) -> bool:
    return flow(penstock).partial(job_id).text != ""


def test_the_banner_says_what_is_served(served: Penstock) -> None:
    assert "SmolLM2-135M-Instruct" in served.banner
    assert "what is DONE survives power loss" in served.banner
    assert "ready; Ctrl-C stops it" in served.banner


def test_submit_wait_and_get_go_together_in_a_pipe(served: Penstock) -> None:
    command = f"{sys.executable} -m penstock.cli spool"
    line = (
        f"{command} submit ws 'The capital of France is' --raw --max-tokens 4 --temperature 0"
        f" | {command} wait ws | {command} get ws"
    )
    done = subprocess.run(
        line, shell=True, cwd=served.folder, env=served.env, capture_output=True, check=True
    )
    assert done.stdout.startswith(b" Paris")
    assert done.stderr == b""


def test_submitting_and_waiting_prints_the_result(served: Penstock) -> None:
    args = ("spool", "submit", "ws", "Say hi.", "--max-tokens", "4", "--wait")
    told = served.json(*args)
    assert told["status"] == "DONE"
    assert told["completion_tokens"] == 4
    assert told["finish_reason"] == "length"
    assert told["result"]


def test_a_job_that_fails_while_it_is_waited_for_says_why(served: Penstock) -> None:
    prompt = "word " * 9000
    told = served.err("spool", "submit", "ws", "-", "--wait", given=prompt, code=1)
    assert "FAILED: CONTEXT_EXCEEDED" in told
    assert "9031 tokens" in told
    unknown = served.err("spool", "submit", "ws", "x", "--model", "gpt-9", "--wait", code=1)
    assert "FAILED: MODEL_NOT_FOUND: there is no model 'gpt-9'" in unknown


def test_a_running_job_can_be_watched_and_cancelled(served: Penstock) -> None:
    job_id = served.out("spool", "submit", "ws", "Once upon a time", *LONG)
    with served.start("spool", "watch", "ws", job_id) as watching:
        assert watching.stdout is not None
        assert watching.stdout.read(5)
        part = served.out("spool", "get", "ws", job_id, "--partial")
        assert part
        began = time.monotonic()
        assert served.out("spool", "cancel", "ws", job_id) == f"{job_id} cancelled"
        assert time.monotonic() - began < 10
        _, err = watching.communicate(timeout=20)
    assert watching.returncode == 5
    assert f"job {job_id} FAILED: CANCELLED" in err


def test_a_line_of_events_for_each_job_with_how_fast_it_was(
    penstock: Penstock, model_file: Path
) -> None:
    with serving(penstock, model_file, "--json") as process:
        ready = msgspec.json.decode(penstock.banner)
        assert ready["what"] == "ready"
        assert ready["model"]["name"] == "SmolLM2-135M-Instruct"
        job_id = Work(penstock.folder / "ws").submit("x", options=SpoolOptions(max_tokens=4))
        flow(penstock).wait(job_id, 40)
        process.send_signal(signal.SIGINT)
        lines = process.communicate(timeout=30)[0].splitlines()
    told = [msgspec.json.decode(line) for line in lines if line.startswith("{")]
    assert [(one["what"], one["job_id"]) for one in told] == [("claimed", job_id), ("done", job_id)]
    assert told[1]["tokens"] > 0
    assert process.returncode == 0


@pytest.mark.seed("004", "13.9")
def test_a_signal_lets_running_jobs_finish_and_a_second_queues_them_again(
    penstock: Penstock, model_file: Path
) -> None:
    with serving(penstock, model_file, "--drain-timeout", "60s") as process:
        job_id = penstock.out("spool", "submit", "ws", "Once upon a time", *LONG)
        eventually(lambda: is_running(penstock, job_id))
        process.send_signal(signal.SIGTERM)
        said(process, "finishing what runs")
        assert flow(penstock).status(job_id) is Status.RUNNING
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        last = process.communicate(timeout=30)[0]
        took = time.monotonic() - began
    assert process.returncode == 130
    assert "jobs that still ran are queued again" in last
    assert f"{job_id}  requeued" in last
    assert flow(penstock).status(job_id) is Status.QUEUED
    assert took < 10  # under two where nothing else runs


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--model", "nowhere.gguf"), 3, "there is no model 'nowhere.gguf'"),
        (("--model", "jobs.py"), 2, "jobs.py"),
        ((), 3, "penstock model pull smollm2"),
        (("--workers", "0"), 2, "--workers: expected int >= 1"),
        (("--memory", "lots"), 2, "'lots' is not a size; write 64m"),
        (("--keep", "-1"), 2, "--keep: expected int >= 0"),
    ],
    ids=["no-such-file", "no-model", "none-at-all", "workers", "memory", "keep"],
)
def test_what_keeps_it_from_starting_is_said_in_a_line(
    penstock: Penstock, args: tuple[str, ...], code: int, words: str
) -> None:
    place = ("--models-dir", str(penstock.folder / "models"))
    told = penstock.err("spool", "serve", "ws", *place, *args, code=code)
    assert told.startswith("penstock: ")
    assert words in told
