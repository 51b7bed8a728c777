"""The end of a job: final before it is seen, and nothing half whatever lies in the way."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.spool.spooled import files_of, new_workspace, put

from penstock.core.errors import Conflict, StoreFailed, StoreFull
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import files
from penstock.workloads.spool.disk.job import Meta, fail, finish, read_meta
from penstock.workloads.spool.disk.workspace import Workspace

JOB = "1736700000_12345_0"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return new_workspace(tmp_path, Sync.FULL)


@pytest.mark.seed("004", "5.4")
def test_a_finished_job_has_its_results_and_nothing_of_the_run(workspace: Workspace) -> None:
    running = {
        "prompt.txt": "p",
        "partial.txt": "fo",
        "progress.json": "{}",
        "result.txt.tmp": "f",
        "error.txt": "of an attempt before",
        "attempts.txt": "lost its server\n",
    }
    put(workspace, Status.RUNNING, JOB, running)
    (workspace.private / "cancel" / JOB).touch()
    finish(workspace, JOB, Meta(submitted_at="s", duration_s=1.0), {"result.txt": b"four"})
    done = workspace.of(Status.DONE, JOB)
    assert sorted(files_of(done)) == ["attempts.txt", "meta.json", "prompt.txt", "result.txt"]
    meta = read_meta(done)
    assert (meta.status, meta.artifacts, meta.submitted_at) == ("done", ("result.txt",), "s")
    assert not os.listdir(workspace.private / "cancel")
    assert not os.listdir(workspace.folder(Status.RUNNING))


@pytest.mark.seed("004", "6.5")
def test_a_failed_job_has_one_line_that_says_why_and_no_result(workspace: Workspace) -> None:
    put(workspace, Status.RUNNING, JOB, {"prompt.txt": "p", "result.txt": "half"})
    fail(workspace, JOB, Meta(code="X"), "X: it\n  went wrong\n")
    failed = workspace.of(Status.FAILED, JOB)
    assert files_of(failed)["error.txt"] == b"X: it went wrong"
    assert "result.txt" not in files_of(failed)
    meta = json.loads((failed / "meta.json").read_text())
    assert (meta["status"], meta["artifacts"]) == ("failed", ["error.txt"])  # as the original's


@pytest.mark.parametrize(
    "error", ["", " \n ", "\udc80", "x" * 100_000], ids=["none", "blank", "surrogate", "long"]
)
def test_any_error_can_be_told(workspace: Workspace, error: str) -> None:
    put(workspace, Status.RUNNING, JOB)
    fail(workspace, JOB, Meta(), error)
    assert 0 < len((workspace.of(Status.FAILED, JOB) / "error.txt").read_bytes()) <= 16_384


@pytest.mark.seed("004", "4.8", "14.6")
def test_everything_is_flushed_before_the_job_is_seen(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(workspace, Status.RUNNING, JOB)
    steps: list[str] = []
    fsync, rename = os.fsync, files.rename_exclusively  # type: ignore[attr-defined]

    def flushed(handle: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def renamed(source: str, target: str) -> None:
        steps.append(f"{Path(source).parent.name} -> {Path(target).parent.name}")
        rename(source, target)

    monkeypatch.setattr(files, "_file_system", lambda device: "ext4")
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(files, "rename_exclusively", renamed)
    finish(workspace, JOB, Meta(), {"result.txt": b"r"})
    assert steps == ["result.txt", "meta.json.tmp", JOB, "processing -> output", "output"]


# -- somebody's hands ---------------------------------------------------------------


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_a_job_that_was_moved_while_it_ran_is_not_ended(workspace: Workspace, end: str) -> None:
    folder = put(workspace, Status.RUNNING, JOB)
    folder.rename(workspace.of(Status.QUEUED, JOB))
    with pytest.raises(Conflict, match=r"not in .*processing any more"):
        if end == "finish":
            finish(workspace, JOB, Meta(), {"result.txt": b"r"})
        else:
            fail(workspace, JOB, Meta(), "e")
    assert list(files_of(workspace.of(Status.QUEUED, JOB))) == ["prompt.txt"]
    assert workspace.find(JOB) is Status.QUEUED
    assert not os.listdir(workspace.folder(Status.STAGING))


@pytest.mark.parametrize("step", range(3))
def test_a_job_that_is_moved_at_any_step_of_its_end_is_not_ended(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    folder = put(workspace, Status.RUNNING, JOB)
    steps, real = [0], os.fsync

    def moved(handle: int) -> None:
        if steps[0] == step:
            folder.rename(workspace.of(Status.QUEUED, JOB))
        steps[0] += 1
        real(handle)

    monkeypatch.setattr(os, "fsync", moved)
    with pytest.raises(Conflict):
        finish(workspace, JOB, Meta(), {"result.txt": b"r"})
    assert workspace.find(JOB) is Status.QUEUED
    assert not os.listdir(workspace.folder(Status.DONE))


def test_another_job_in_its_way_stays_and_the_job_can_still_fail(workspace: Workspace) -> None:
    put(workspace, Status.RUNNING, JOB)
    put(workspace, Status.DONE, JOB, {"result.txt": "another's"})
    with pytest.raises(Conflict, match="output already"):
        finish(workspace, JOB, Meta(), {"result.txt": b"r"})
    assert files_of(workspace.of(Status.DONE, JOB)) == {"result.txt": b"another's"}
    fail(workspace, JOB, Meta(), "two jobs had this id")
    assert (workspace.of(Status.FAILED, JOB) / "error.txt").exists()


_IMPOSTORS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, elsewhere: path.symlink_to(elsewhere),
    "a dead link": lambda path, elsewhere: path.symlink_to("nowhere"),
    "a file": lambda path, elsewhere: path.touch(),
    "a pipe": lambda path, elsewhere: os.mkfifo(path),
}


@pytest.mark.parametrize("place", _IMPOSTORS.values(), ids=_IMPOSTORS)
def test_what_is_no_folder_is_not_ended_and_what_it_points_to_is_untouched(
    workspace: Workspace, tmp_path: Path, place: Callable[[Path, Path], object]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "result.txt").write_text("precious")
    place(workspace.of(Status.RUNNING, JOB), elsewhere)
    with pytest.raises(Conflict):
        finish(workspace, JOB, Meta(), {"result.txt": b"r"})
    with pytest.raises(Conflict):
        fail(workspace, JOB, Meta(), "it is no folder")
    assert files_of(elsewhere) == {"result.txt": b"precious"}


@pytest.mark.parametrize(
    "name", ["result.txt", "result.txt.tmp", "meta.json", "error.txt", "partial.txt"]
)
def test_a_folder_or_link_in_place_of_a_file_is_out_of_the_way(
    workspace: Workspace, tmp_path: Path, name: str
) -> None:
    for number, place in enumerate((Path.mkdir, lambda path: path.symlink_to(tmp_path / "no"))):
        job_id = f"{JOB}{number}"
        place(put(workspace, Status.RUNNING, job_id) / name)
        finish(workspace, job_id, Meta(), {"result.txt": b"r"})
        done = workspace.of(Status.DONE, job_id)
        assert sorted(files_of(done)) == ["meta.json", "prompt.txt", "result.txt"]
    assert not (tmp_path / "no").exists()


def test_a_folder_without_any_right_is_ended_by_its_owner(workspace: Workspace) -> None:
    put(workspace, Status.RUNNING, JOB).chmod(0o000)
    fail(workspace, JOB, Meta(), "prompt.txt: can't be read: permission denied")
    assert workspace.of(Status.FAILED, JOB).stat().st_mode & 0o700 == 0o700


# -- the disk -----------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_job_that_can_t_be_flushed_is_not_seen_to_end(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, at: int, code: int
) -> None:
    put(workspace, Status.RUNNING, JOB)
    calls, real = [0], os.fsync

    def refuse(handle: int) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise OSError(code, os.strerror(code))
        real(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(StoreFull if code == errno.ENOSPC else StoreFailed):
            finish(workspace, JOB, Meta(), {"result.txt": b"r"})
    assert calls == [at]
    assert workspace.find(JOB) is Status.RUNNING
    finish(workspace, JOB, Meta(), {"result.txt": b"r"})
    assert sorted(files_of(workspace.of(Status.DONE, JOB))) == [
        "meta.json",
        "prompt.txt",
        "result.txt",
    ]
