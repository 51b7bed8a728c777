"""The examples run as a reader would run them, and so does the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conftest import needs_runtime

from penstock.testing.images import IMAGE
from penstock.workloads.container.engines.oci.images import ImageStore

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PRINTS = {
    "approvals.py": "approved by cy (2 of 2)",
    "async_app.py": "delayed: may start in",
    "hello.py": "HELLO!\n",
    "limits.py": "8 jobs, 2 at once\n",
    "pipeline_of_children.py": "step 3: job.film.edit SUCCEEDED",
    "process_mode.py": "CANCELLED - its process is gone: True",
    "progress_and_logs.py": "100% photo 4",
    "retries.py": "it took FAILED -> FAILED -> SUCCEEDED",
    "schedules.py": "by itself: a report for Berlin, made by tick\n",
    "staged_pipeline.py": "PARTIAL ['milk: 1.20', 'tea: 3.50']\n",
    "workflow.py": "a parent failed: CANCELLED CANCELLED SUCCEEDED\n",
}
"""What each example must print, among other things."""
NOT_RUN_ALONE = {
    "ask_a_model.py",
    "container_job.py",
    "demo.py",
    "folder_queue.py",
    "http_client.py",
    "openai_client.py",
    "tasks.py",
}
"""These have tests of their own; tasks.py is an application for `penstock up`."""

KINDS = [
    "success",
    "thread with progress",
    "delayed",
    "submitted twice",
    "parent and children",
    "wrong argument",
    "failure",
    "failure, then retry",
    "asks for a retry",
    "runs too long",
    "process killed",
    "cancelled by a user",
    "worker killed, replaced",
    "worker killed",
    "denied by a rule",
    "needs an approval",
    "allowed, constrained",
    "limit: 2 at once",
    "throttled by a rule",
    "too many would wait",
    "unique",
    "waits for two others",
    "its parent failed",
    "scheduled",
    "dead, retried in bulk",
    "another tenant's",
    "events, resumed",
    "a tool of an AI agent (MCP)",
    "a pipeline, retried in part",
    "a pipeline, cancelled",
    "the news pipeline",
    "a container",
    "a container, out of memory",
    "a container, out of time",
    "a question",
    "an answer in a shape",
    "through the OpenAI API",
    "a prompt that is too long",
    "a folder is the queue",
    "a model over two nodes",
    "a node is lost",
]


def run(script: str, folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words],
        cwd=folder,
        env={**os.environ, "PENSTOCK_DATA_DIR": str(folder / "data"), **environ},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("script", sorted(PRINTS))
def test_the_example_runs_and_prints_what_it_says(script: str, tmp_path: Path) -> None:
    ended = run(script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert PRINTS[script] in ended.stdout
    assert "Traceback" not in ended.stderr


def test_the_container_example_counts_words_and_runs_out_of_time(
    tmp_path: Path, busybox: Path
) -> None:
    needs_runtime("runc")
    store = ImageStore(tmp_path / "data" / "containers" / "oci" / "images")
    store.import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    ended = run("container_job.py", tmp_path)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == "0 8 b'8\\n'"
    assert second.startswith("TIMEOUT ran longer than 0.5 s")
    assert not ended.stderr


def test_the_http_client_needs_only_the_standard_library(tmp_path: Path) -> None:
    with penstock_up(tmp_path) as (url, token):
        ended = run("http_client.py", tmp_path, url, PENSTOCK_TOKEN=token)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "sent twice, one job: True",
        "SUCCEEDED HELLO!",
        "422 input.text - expected str, got int",
        *("1 PENDING", "2 SCHEDULED", "3 DISPATCHED", "4 RUNNING"),
        "5 SUCCEEDED after a pause",
    ]
    imported = {
        name.partition(".")[0]
        for line in (EXAMPLES / "http_client.py").read_text().splitlines()
        if line.startswith(("import ", "from "))
        for name in [line.split()[1]]
    }
    assert imported <= sys.stdlib_module_names


@pytest.mark.timeout(300)
def test_the_model_examples_ask_in_process_through_folders_and_as_openai_does(
    tmp_path: Path, model_file: Path
) -> None:
    shelf = {"PENSTOCK_MODELS__DIR": str(model_file.parent), "PENSTOCK_MODELS__CONTEXT": "1024"}
    ended = run("ask_a_model.py", tmp_path, **shelf)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        *("length 16 True", "True"),
        "the same greedy text: True",
    ]
    ended = run("folder_queue.py", tmp_path, **shelf)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        *("QUEUED QUEUED QUEUED", "DONE DONE DONE"),
        "['meta.json', 'prompt.txt', 'result.txt']",
    ]
    with penstock_up(tmp_path, "--model", str(model_file)) as (url, token):
        ended = run("openai_client.py", tmp_path, url, PENSTOCK_TOKEN=token)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["streamed as a whole: True", "alike: True"]


@contextmanager
def penstock_up(folder: Path, *words: str) -> Iterator[tuple[str, str]]:
    """An engine that serves examples/tasks.py, and a key to its HTTP API."""
    here = {"PENSTOCK_DATA_DIR": str(folder / "data"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-m", "penstock.cli"]
    with subprocess.Popen(
        [*command, "up", "--app", "tasks:app", "--http", "127.0.0.1:0", *words],
        cwd=EXAMPLES,
        env=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as engine:
        try:
            assert engine.stdout is not None
            url = next(
                word for line in engine.stdout for word in line.split() if word.startswith("http:/")
            )
            made = subprocess.run(
                [*command, "keys", "create", "me", "--role", "submit"],
                env=here,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            yield url, made.stdout.strip()
        finally:
            engine.kill()


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTS) | NOT_RUN_ALONE


@pytest.mark.timeout(300)
def test_the_demo_shows_every_kind_of_job_and_exits_0(tmp_path: Path, model_file: Path) -> None:
    ended = run("demo.py", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split("  ")[0].strip() for line in ended.stdout.splitlines()]
    assert [row for row in rows if row in KINDS] == KINDS
    assert "0 records that their log does not explain" in ended.stdout
    assert f"{len(KINDS)} kinds of jobs ended as they should." in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 100
    assert not ended.stderr


def test_the_demo_names_what_went_wrong_and_exits_1(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "from scenarios import SECTIONS, everyday\n"
        "import dataclasses\n"
        "wrong = dataclasses.replace(everyday.SCENARIOS[0], end='FAILED')\n"
        "SECTIONS.clear()\n"
        "SECTIONS['wrong'] = [wrong]\n"
        f"runpy.run_path({str(EXAMPLES / 'demo.py')!r}, run_name='__main__')\n"
    )
    ended = run(str(broken), tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "went wrong: success: ended SUCCEEDED, and should have ended FAILED" in ended.stdout


@pytest.mark.timeout(300)
def test_the_news_example_asks_a_real_model_and_the_auditor_judges_it(
    tmp_path: Path, model_file: Path
) -> None:
    pytest.importorskip("trafilatura")
    words = ("--sample", "--model", model_file.stem)
    limits = ("--set", "neutralize_limit=3", "--set", "classify_limit=4")
    ended = subprocess.run(
        [sys.executable, "-m", "examples.news", str(tmp_path), *words, *limits],
        cwd=EXAMPLES.parent,
        env={**os.environ, "PENSTOCK_MODELS__DIR": str(model_file.parent)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    lines = {line.split()[0]: line for line in ended.stdout.splitlines()}
    assert "total 4  success 4  llm 4" in lines["classify"]
    assert "total 3  success 3" in lines["neutralize"]
    assert "story_count" in lines["brief"]
    assert "slam" not in (tmp_path / "brief.md").read_text().casefold()
