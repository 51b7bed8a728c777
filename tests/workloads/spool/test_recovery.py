"""Orphans: which jobs in `processing` are nobody's, and what becomes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from penstock.lifecycles.spool import Status
from penstock.ports.clock import SystemClock
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.job import Attempts, Loss, count_attempt, read_meta
from penstock.workloads.spool.disk.peers import NAME, Claims, Peers
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server import recovery as module
from penstock.workloads.spool.server.recovery import Recovery

JOB = "1736700000_1_0"


class Later(SystemClock):
    """The same time for everybody, later by `ahead`."""

    ahead = 0.0

    def now(self) -> float:  # type: ignore[override]
        return time.time() + self.ahead


class Rig:
    def __init__(self, folder: Path) -> None:
        self.clock = Later()
        self.workspace = Workspace(folder, Sync.NONE)
        self.workspace.create()
        peers = Peers(self.workspace.private, 30.0, self.clock)
        self.recovery = Recovery(self.workspace, peers, 3, self.clock)

    def running(self, job_id: str = JOB, **files: str) -> Path:
        folder = self.workspace.folder(Status.RUNNING) / job_id
        folder.mkdir()
        for name, text in {"prompt.txt": "x", **files}.items():
            (folder / name).write_text(text)
        return folder

    def server(self, *jobs: str, alive: bool) -> Claims:
        claims = Claims(self.workspace.private)
        claims.enter()
        for job_id in jobs:
            claims.take(job_id)
        if not alive:
            assert claims._lock is not None
            os.close(claims._lock)
        return claims


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_a_dead_servers_job_is_queued_again_at_once_with_nothing_of_the_attempt(rig: Rig) -> None:
    ended = '{\n  "submitted_at": "x",\n  "status": "done",\n  "artifacts": ["result.txt"]\n}'
    rig.running(**{"partial.txt": "so", "result.txt": "far", "a.tmp": "", "meta.json": ended})
    dead = rig.server(JOB, alive=False)
    assert rig.recovery.look() == {JOB: Status.QUEUED}
    folder = rig.workspace.of(Status.QUEUED, JOB)
    assert sorted(os.listdir(folder)) == ["attempts.txt", "meta.json", "prompt.txt"]
    assert read_meta(folder).status == ""
    assert read_meta(folder).submitted_at == "x"
    assert not dead.folder.exists()


@pytest.mark.seed("004", "10.3")
def test_a_living_servers_job_is_left_even_if_a_dead_one_had_it_before(rig: Rig) -> None:
    rig.running()
    rig.server(JOB, alive=False)
    rig.server(JOB, alive=True)
    rig.clock.ahead = 3600.0
    assert rig.recovery.look() == {}
    assert rig.workspace.find(JOB) is Status.RUNNING


def test_a_job_that_nobody_claimed_has_a_little_time(rig: Rig) -> None:
    rig.running()
    assert rig.recovery.look() == {}
    rig.clock.ahead = module.GRACE + 1
    assert rig.recovery.look() == {JOB: Status.QUEUED}


@pytest.mark.seed("004", "10.2")
def test_the_last_attempt_fails_with_the_reason(rig: Rig) -> None:
    for _ in range(2):
        rig.running() if rig.workspace.find(JOB) is Status.MISSING else shutil.move(
            rig.workspace.of(Status.QUEUED, JOB), rig.workspace.of(Status.RUNNING, JOB)
        )
        rig.server(JOB, alive=False)
        assert rig.recovery.look() == {JOB: Status.QUEUED}
    shutil.move(rig.workspace.of(Status.QUEUED, JOB), rig.workspace.of(Status.RUNNING, JOB))
    rig.server(JOB, alive=False)
    assert rig.recovery.look() == {JOB: Status.FAILED}
    folder = rig.workspace.of(Status.FAILED, JOB)
    assert (folder / "error.txt").read_text() == "SERVER_LOST: the job lost its server 3 times"
    meta = read_meta(folder)
    assert (meta.status, meta.code, meta.attempts) == ("failed", "SERVER_LOST", 3)


def test_what_has_no_id_is_left_alone_and_reported_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.running("no id")
    rig.clock.ahead = 3600.0
    for _ in range(3):
        assert rig.recovery.look() == {}
    assert len(caplog.records) == 1


def test_a_link_is_left_alone_and_not_followed(rig: Rig, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "result.txt").write_text("mine")
    rig.workspace.of(Status.RUNNING, JOB).symlink_to(outside)
    rig.server(JOB, alive=False)
    assert rig.recovery.look() == {}
    assert rig.workspace.of(Status.RUNNING, JOB).is_symlink()
    assert os.listdir(outside) == ["result.txt"]


def test_a_dead_servers_folder_stays_while_its_job_cannot_be_moved(rig: Rig) -> None:
    rig.running()
    other = rig.workspace.of(Status.QUEUED, JOB)
    other.mkdir()
    dead = rig.server(JOB, alive=False)
    assert rig.recovery.look() == {JOB: Status.RUNNING}
    assert dead.folder.exists()
    other.rmdir()
    assert rig.recovery.look() == {JOB: Status.QUEUED}


@pytest.mark.parametrize("knows", ["its pid file", "its arguments"])
def test_unclaimed_jobs_of_a_living_original_server_are_left(
    knows: str, rig: Rig, tmp_path: Path
) -> None:
    """It removes its pid file before its last jobs have ended."""
    program = tmp_path / "nrvnad"
    program.write_text("#!/bin/sh\nexec 3<&0\nread -r line <&3\n")
    program.chmod(0o755)
    rig.running()
    rig.clock.ahead = 3600.0
    workspace = os.path.relpath(rig.workspace.path, tmp_path)
    command = [str(program), "model.gguf", *([workspace] if knows == "its arguments" else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path) as original:
        if knows == "its pid file":
            (rig.workspace.path / NAME).write_text(str(original.pid))
        try:
            end = time.monotonic() + 10
            while Path(f"/proc/{original.pid}/comm").read_text().strip() != "nrvnad":
                assert time.monotonic() < end
            assert rig.recovery.look() == {}
        finally:
            original.kill()
    assert rig.recovery.look() == {JOB: Status.QUEUED}


def test_an_orphan_that_breaks_the_recovery_is_left_and_the_others_are_not(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(workspace: Workspace, job_id: str, loss: Loss) -> Attempts:
        if job_id == JOB:
            raise RecursionError
        return count_attempt(workspace, job_id, loss)

    monkeypatch.setattr(module, "count_attempt", broken)
    rig.running()
    rig.running("1736700000_1_1")
    rig.server(JOB, "1736700000_1_1", alive=False)
    found = rig.recovery.look()
    assert found == {JOB: Status.RUNNING, "1736700000_1_1": Status.QUEUED}
