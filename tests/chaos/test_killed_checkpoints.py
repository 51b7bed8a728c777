"""Checkpoints of jobs whose worker, or whose engine, is killed while they write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.chaos.cluster import Cluster, cluster, kill
from tests.support.waiting import eventually

from penstock import JobHandle

COUNT = 300


def noted(notes: Path, word: str) -> list[tuple[int, int]]:
    """(n, attempt), in order."""
    lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    return [(int(n), int(attempt)) for said, n, attempt in lines if said == word]


def check(job: JobHandle[Any], notes: Path) -> None:
    """Every thing is kept, and nothing that was acknowledged is done twice."""
    assert [row.n for row in job.steps("thing")] == list(range(COUNT))
    kept: dict[int, int] = {}
    for n, attempt in noted(notes, "kept"):
        assert n not in kept, f"{n} was acknowledged to attempts {kept[n]} and {attempt}"
        kept[n] = attempt
    for n, attempt in noted(notes, "did"):
        assert attempt <= kept.get(n, attempt), f"attempt {attempt} did {n} again"


def begun(c: Cluster, notes: Path) -> None:
    eventually(lambda: len(noted(notes, "kept")) > COUNT // 3, "a third of the rows are kept")


def test_the_next_attempt_goes_on_after_the_last_row_that_was_kept(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = c.worker("first")
        with c.client() as ps:
            job = ps.submit("job.chaos.steps", {"count": COUNT, "notes": str(notes)})
            begun(c, notes)
            kill(first)
            c.worker("second")
            assert job.result(timeout=60) >= COUNT // 3
            check(job, notes)
            assert {row.attempt for row in job.steps()} == {1, 2}
        c.check_history()


@pytest.mark.parametrize("point", ["", "before-commit", "after-commit"])
def test_a_job_goes_on_when_the_engine_comes_back(tmp_path: Path, point: str) -> None:
    notes = tmp_path / "notes"
    with cluster(
        tmp_path,
        PENSTOCK_UNKNOWN_TOPICS="hold",
        PENSTOCK_TIMEOUTS__LEASE="20",
        PENSTOCK_TIMEOUTS__LOST_GRACE="20",
    ) as c:
        engine = c.up("--no-worker", **({"PENSTOCK_FAILPOINT": f"{point}:100"} if point else {}))
        c.worker("first")
        with c.client() as ps:
            job_id = ps.submit("job.chaos.steps", {"count": COUNT, "notes": str(notes)}).job_id
        if not point:
            begun(c, notes)
            kill(engine)
        engine.wait(60)
        c.up("--no-worker")
        with c.client() as ps:
            job = ps.get(job_id)
            job.result(timeout=60)
            check(job, notes)
            assert {row.attempt for row in job.steps()} == {1}
        c.check_history()
