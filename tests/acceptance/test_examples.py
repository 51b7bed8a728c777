"""The examples run as a reader would run them, and so does the demo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PRINTS = {
    "async_app.py": "it is delayed: it may start in",
    "hello.py": "HELLO!\n",
    "pipeline_of_children.py": "step 3: job.film.edit SUCCEEDED",
    "process_mode.py": "CANCELLED - its process is gone: True",
    "progress_and_logs.py": "100% photo 4",
    "retries.py": "it took FAILED -> FAILED -> SUCCEEDED",
}
"""What each example must print, among other things."""
NOT_RUN_ALONE = {"demo.py", "tasks.py"}
"""The demo has a test of its own; tasks.py is an application for `penstock worker`."""

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
    "denied by a rule",
    "worker killed, replaced",
    "worker killed",
]


def run(script: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script)],
        cwd=folder,
        env={**os.environ, "PENSTOCK_DATA_DIR": str(folder / "data"), **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("script", sorted(PRINTS))
def test_the_example_runs_and_prints_what_it_says(script: str, tmp_path: Path) -> None:
    ended = run(script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert PRINTS[script] in ended.stdout
    assert "Traceback" not in ended.stderr


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTS) | NOT_RUN_ALONE


def test_the_demo_shows_every_kind_of_job_and_exits_0(tmp_path: Path) -> None:
    ended = run("demo.py", tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line.split("  ")[0].strip() for line in ended.stdout.splitlines()]
    assert [row for row in rows if row in KINDS] == KINDS
    assert "0 records that their log does not explain" in ended.stdout
    assert f"{len(KINDS)} kinds of jobs ended as they should." in ended.stdout
    assert not ended.stderr


def test_the_demo_names_what_went_wrong_and_exits_1(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "from scenarios import everyday\n"
        "import scenarios, dataclasses\n"
        "wrong = dataclasses.replace(everyday.SCENARIOS[0], end='FAILED')\n"
        "scenarios.SCENARIOS[:] = [wrong]\n"
        f"runpy.run_path({str(EXAMPLES / 'demo.py')!r}, run_name='__main__')\n"
    )
    ended = run(str(broken), tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "went wrong: success: ended SUCCEEDED, and should have ended FAILED" in ended.stdout
