"""Cancelling: at once where nobody runs the job, else its server is asked."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.spool.spooled import StoppedClock, files_of, new_workspace, put, queued

from penstock.core.errors import Conflict, InvalidRequest, Misconfigured, NotFound, StoreFull
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.client.changes import cancel
from penstock.workloads.spool.disk.job import read_meta
from penstock.workloads.spool.disk.peers import Claims
from penstock.workloads.spool.disk.workspace import Workspace

JOB = "1736700000_12345_0"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return new_workspace(tmp_path)


@pytest.fixture
def server(workspace: Workspace) -> Iterator[Claims]:
    claims = Claims(workspace.private)
    claims.enter()
    yield claims
    claims.leave()


def test_a_queued_job_is_failed_at_once(workspace: Workspace) -> None:
    job_id = queued(workspace)
    assert cancel(workspace, job_id, "not needed", clock=StoppedClock()) is Status.FAILED
    folder = workspace.of(Status.FAILED, job_id)
    assert files_of(folder)["error.txt"] == b"CANCELLED: not needed"
    meta = read_meta(folder)
    assert (meta.code, meta.status) == ("CANCELLED", "failed")
    assert meta.completed_at == "2025-01-12T16:40:00.000000Z"
    assert meta.submitted_at


def test_a_job_that_runs_is_its_server_s_to_end(workspace: Workspace, server: Claims) -> None:
    server.take(JOB)
    put(workspace, Status.RUNNING, JOB)
    assert cancel(workspace, JOB, "stop it") is Status.RUNNING
    assert files_of(workspace.private / "cancel") == {JOB: b"stop it"}
    assert workspace.find(JOB) is Status.RUNNING


def test_a_job_whose_server_is_dead_is_failed_at_once(workspace: Workspace) -> None:
    dead = Claims(workspace.private)
    dead.enter()
    dead.take(JOB)
    assert dead._lock is not None
    os.close(dead._lock)
    put(workspace, Status.RUNNING, JOB)
    assert cancel(workspace, JOB) is Status.FAILED
    assert not os.listdir(workspace.private / "cancel")


@pytest.mark.parametrize("status", [Status.DONE, Status.FAILED])
def test_a_job_that_ended_stays_as_it_is(workspace: Workspace, status: Status) -> None:
    put(workspace, status, JOB, {"result.txt": "r"})
    assert cancel(workspace, JOB) is status
    assert files_of(workspace.of(status, JOB)) == {"result.txt": b"r"}


def test_what_is_not_there_can_t_be_cancelled(workspace: Workspace, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        cancel(workspace, JOB)
    with pytest.raises(InvalidRequest):
        cancel(workspace, "../x")
    with pytest.raises(Misconfigured):
        cancel(Workspace(tmp_path / "none"), JOB)
    assert not (tmp_path / "none").exists()


def test_a_workspace_of_the_original_s_can_be_used(workspace: Workspace) -> None:
    job_id = queued(workspace)
    for name in os.listdir(workspace.private):
        (workspace.private / name).rmdir()
    workspace.private.rmdir()
    assert cancel(workspace, job_id) is Status.FAILED


def test_a_queued_job_that_can_t_be_ended_is_queued_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = queued(workspace)

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StoreFull):
            cancel(workspace, job_id)
    assert workspace.find(job_id) is Status.QUEUED
    assert sorted(files_of(workspace.of(Status.QUEUED, job_id))) == ["meta.json", "prompt.txt"]


def test_a_thing_that_is_no_job_can_t_be_cancelled(workspace: Workspace) -> None:
    workspace.of(Status.QUEUED, JOB).symlink_to("nowhere")
    with pytest.raises(Conflict, match="is not a folder"):
        cancel(workspace, JOB)
    assert os.path.lexists(workspace.of(Status.QUEUED, JOB))


def test_of_many_who_cancel_and_claim_each_job_has_one_end(workspace: Workspace) -> None:
    jobs = [queued(workspace) for _ in range(60)]
    claimed: list[str] = []

    def claim() -> None:
        for job_id in jobs:
            try:
                os.rename(workspace.of(Status.QUEUED, job_id), workspace.of(Status.DONE, job_id))
            except FileNotFoundError:
                continue
            claimed.append(job_id)

    ends: dict[str, Status] = {}
    threads = [threading.Thread(target=claim)]
    threads += [
        threading.Thread(
            target=lambda: [ends.update({one: cancel(workspace, one)}) for one in jobs]
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job_id in jobs:
        expected = Status.DONE if job_id in claimed else Status.FAILED
        assert workspace.find(job_id) is expected
        assert ends[job_id] is expected
