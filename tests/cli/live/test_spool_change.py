"""Ending, retrying and deleting the jobs of a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.support.cli.spooling import Spool

from penstock.lifecycles.spool import Status
from penstock.workloads.spool.disk.job import read_meta

NEVER = "1736700000_12345_0"


def aged(spool: Spool, status: Status, job_id: str, seconds: float) -> str:
    """The same job, as if it had ended so long ago."""
    then = time.time() - seconds
    os.utime(spool.workspace.of(status, job_id), (then, then))
    return job_id


def test_a_queued_job_is_cancelled_at_once(spool: Spool) -> None:
    job_id = spool.queued()
    assert spool("cancel", job_id, "--reason", "changed my mind").text == f"{job_id} cancelled"
    assert "CANCELLED: changed my mind" in spool("get", job_id, code=1).err


def test_a_job_whose_server_is_dead_is_cancelled_too(spool: Spool) -> None:
    job_id = spool.running()
    assert spool.json("cancel", job_id) == [
        {"job_id": job_id, "status": "FAILED", "cancelled": True}
    ]


def test_an_end_that_came_first_is_told_and_stays(spool: Spool) -> None:
    job_id = spool.done({"result.txt": b"x"})
    assert spool("cancel", job_id, code=4).text == f"{job_id} had ended already: DONE"
    assert spool("get", job_id).out == b"x"


def test_all_jobs_are_tried_and_the_first_trouble_is_the_exit_code(spool: Spool) -> None:
    queued, done = spool.queued(), spool.done({"result.txt": b"x"})
    said = spool("cancel", given=f"{NEVER} {done} {queued}".encode(), code=3)
    assert f"there is no job {NEVER}" in said.err
    assert said.text.splitlines() == [f"{done} had ended already: DONE", f"{queued} cancelled"]
    assert "say which jobs" in spool("cancel", code=2).err


def test_a_retried_job_is_a_new_one_with_the_same_files(spool: Spool) -> None:
    old = spool.submit("once more", "--max-tokens", "3", "--tag", "x")
    spool("cancel", old)
    new = spool("retry", old).text
    assert new != old
    assert spool.file(new, "prompt.txt") == b"once more"
    assert spool.options(new) == {"max_tokens": 3}
    assert read_meta(spool.workspace.of(Status.QUEUED, new)).retry_of == old
    assert spool("status", old).text == "FAILED"


def test_what_has_not_ended_can_not_be_retried(spool: Spool) -> None:
    job_id = spool.queued()
    assert f"job {job_id} is QUEUED" in spool("retry", job_id, code=4).err
    assert "there is no job" in spool("retry", NEVER, code=3).err


def test_old_jobs_are_deleted_and_young_ones_kept(spool: Spool) -> None:
    old = aged(spool, Status.DONE, spool.done({"result.txt": b"x"}), 8 * 86_400)
    dead = aged(spool, Status.FAILED, spool.failed(), 8 * 86_400)
    young, queued = spool.done({"result.txt": b"x"}), spool.queued()
    assert spool("prune", "--older-than", "7d", "--done").text == "deleted 1 job"
    assert spool("status", old, code=3).text == "MISSING"
    assert spool("status", dead).text == "FAILED"
    assert spool("prune", "--older-than", "7d").text == "deleted 1 job"
    assert spool("list", "-q").text.split() == [queued, young]


def test_all_but_the_last_are_deleted(spool: Spool) -> None:
    ids = [
        aged(spool, Status.DONE, spool.done({"result.txt": b"x"}), 10 - number)
        for number in range(4)
    ]
    assert spool.json("prune", "--keep", "1") == {"removed": ids[:3], "matched": ids[:3]}
    assert spool("list", "-q").text.split() == ids[3:]


def test_what_would_be_deleted_can_be_seen_before(spool: Spool) -> None:
    job_id = spool.done({"result.txt": b"x"})
    said = spool("prune", "--keep", "0", "--dry-run")
    assert said.text == job_id
    assert said.err == "penstock: 1 job would be deleted\n"
    assert spool.json("prune", "--keep", "0", "--dry-run") == {"removed": [], "matched": [job_id]}
    assert spool("status", job_id).text == "DONE"


def test_nothing_is_deleted_without_a_condition(spool: Spool) -> None:
    spool.done({"result.txt": b"x"})
    assert "say which: --older-than 7d, --keep 100, or both" in spool("prune", code=2).err
    assert spool.json("status")["DONE"] == 1


def test_a_workspace_of_the_original_can_be_worked_on(spool: Spool, tmp_path: Path) -> None:
    for folder in ("input/writing", "input/ready", "processing", "output", "failed"):
        (spool.path / folder).mkdir(parents=True)
    job = spool.path / "input" / "ready" / "00001736700000123456_00012345_000001"
    job.mkdir()
    (job / "prompt.txt").write_text("hello")
    assert spool("cancel", job.name).text == f"{job.name} cancelled"
    new = spool("retry", job.name).text
    assert spool.file(new, "prompt.txt") == b"hello"
    assert spool("prune", "--keep", "0").text == "deleted 1 job"
