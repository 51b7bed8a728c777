"""How often a job was tried in vain."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.server.running import (
    FILE,
    Attempts,
    Loss,
    count_attempt,
    read_attempts,
)


def test_attempts_are_counted_by_their_cause(tmp_path: Path) -> None:
    assert read_attempts(tmp_path) == Attempts()
    count_attempt(tmp_path, Loss.LOST, Sync.NONE)
    count_attempt(tmp_path, Loss.CRASHED, Sync.NONE)
    assert count_attempt(tmp_path, Loss.CRASHED, Sync.FULL) == Attempts(crashed=2, lost=1)
    assert read_attempts(tmp_path).count == 3
    assert (tmp_path / FILE).read_text().splitlines().count(Loss.CRASHED) == 2


def test_what_somebody_else_wrote_there_counts_by_its_lines(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff\nnonsense\n")
    assert read_attempts(tmp_path) == Attempts(lost=2)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x\n")
    (tmp_path / FILE).symlink_to(tmp_path / "other")
    assert read_attempts(tmp_path) == Attempts()
    count_attempt(tmp_path, Loss.LOST, Sync.NONE)
    assert (tmp_path / "other").read_text() == "x\n"


@pytest.mark.parametrize(
    ("attempts", "suspect", "reason"),
    [
        (Attempts(), False, "crashed the engine 0 times"),
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
