"""How often a job was tried in vain."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.spool.spooled import new_workspace, put

from penstock.lifecycles.spool import Status
from penstock.workloads.spool.disk.job import (
    ATTEMPTS,
    Attempts,
    Loss,
    count_attempt,
    read_attempts,
)

JOB = "1736700000_1_0"


def test_attempts_are_counted_by_their_cause(tmp_path: Path) -> None:
    workspace = new_workspace(tmp_path)
    folder = put(workspace, Status.RUNNING, JOB)
    assert read_attempts(folder) == Attempts()
    count_attempt(workspace, JOB, Loss.LOST)
    count_attempt(workspace, JOB, Loss.CRASHED)
    assert count_attempt(workspace, JOB, Loss.CRASHED) == Attempts(crashed=2, lost=1)
    assert read_attempts(folder).count == 3
    assert (folder / ATTEMPTS).read_text().splitlines().count(Loss.CRASHED) == 2


def test_what_somebody_else_wrote_there_counts_by_its_lines(tmp_path: Path) -> None:
    (tmp_path / ATTEMPTS).write_bytes(b"\xff\nnonsense\n")
    assert read_attempts(tmp_path) == Attempts(lost=2)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    workspace = new_workspace(tmp_path)
    folder = put(workspace, Status.RUNNING, JOB)
    (tmp_path / "other").write_text("x\n")
    (folder / ATTEMPTS).symlink_to(tmp_path / "other")
    assert read_attempts(folder) == Attempts()
    count_attempt(workspace, JOB, Loss.LOST)
    assert (tmp_path / "other").read_text() == "x\n"


@pytest.mark.parametrize(
    ("attempts", "suspect", "reason"),
    [
        (Attempts(), False, ""),
        (Attempts(lost=1), False, "lost its server once"),
        (Attempts(lost=2), True, "lost its server twice"),
        (Attempts(crashed=1), True, "crashed the engine once"),
        (Attempts(crashed=3), True, "crashed the engine 3 times"),
        (Attempts(2, 1), True, "crashed the engine twice and lost its server once"),
    ],
    ids=["none", "lost once", "lost twice", "crashed", "crashed often", "both"],
)
def test_a_job_that_crashed_or_was_lost_twice_is_suspect(
    attempts: Attempts, suspect: bool, reason: str
) -> None:
    assert attempts.is_suspect is suspect
    assert attempts.reason == reason
