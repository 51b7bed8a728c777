"""Real disks that are full, read-only or two, and folders that belong to somebody else."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.chaos.disks import mount, tmpfs

from penstock.core.errors import Misconfigured, PenstockError, StoreFailed, StoreFull
from penstock.lifecycles.spool import FOLDERS, Status
from penstock.workloads.spool.client.changes import cancel, clean
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.files import Unfit, move, read_file
from penstock.workloads.spool.disk.job import Meta, finish
from penstock.workloads.spool.disk.workspace import Workspace

_NOBODY = 65534


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "size=2m,nr_inodes=300") as disk:
        yield disk


def _files(workspace: Workspace) -> dict[str, set[str]]:
    return {
        job_id: set(os.listdir(workspace.of(Status.QUEUED, job_id)))
        for job_id in workspace.ids(Status.QUEUED)
    }


@pytest.mark.parametrize("size", [10, 100_000], ids=["no inode left", "no block left"])
def test_a_full_disk_refuses_a_job_whole_and_takes_one_when_there_is_room(
    disk: Path, size: int
) -> None:
    work = Work(disk / "w")
    told: set[str] = set()
    with pytest.raises(StoreFull, match="no space left"):
        while True:
            told.add(work.submit("p" * size))
    assert told
    assert _files(work.workspace) == {one: {"prompt.txt", "meta.json"} for one in told}
    assert not os.listdir(work.workspace.folder(Status.STAGING))
    for job_id in sorted(told)[:3]:
        move(
            work.workspace.of(Status.QUEUED, job_id),
            work.workspace.of(Status.DONE, job_id),
            sync=Sync.NONE,
        )
    assert len(clean(work.workspace, keep=0)) == 3
    assert work.submit("p" * size)


def test_a_full_disk_leaves_a_running_job_to_be_finished_later(disk: Path) -> None:
    workspace = Workspace(disk / "w")
    job_id = Work(workspace).submit("p")
    os.rename(workspace.of(Status.QUEUED, job_id), workspace.of(Status.RUNNING, job_id))
    with pytest.raises(StoreFull):
        finish(workspace, job_id, Meta(), {"result.txt": b"r" * (4 << 20)})
    assert workspace.find(job_id) is Status.RUNNING
    assert set(os.listdir(workspace.of(Status.RUNNING, job_id))) == {"prompt.txt", "meta.json"}
    finish(workspace, job_id, Meta(), {"result.txt": b"r"})


def test_a_read_only_disk_is_said_to_be_one(disk: Path) -> None:
    work = Work(disk / "w")
    job_id = work.submit("p")
    mount("-o", "remount,ro", str(disk))
    try:
        with pytest.raises(StoreFailed, match="read-only"):
            work.submit("p")
        for act in (lambda: Work(disk / "w"), lambda: cancel(work.workspace, job_id)):
            with pytest.raises(Misconfigured, match="may not be written to"):
                act()
        with pytest.raises(StoreFailed, match="read-only"):
            Work(disk / "other")
        assert work.workspace.find(job_id) is Status.QUEUED
    finally:
        mount("-o", "remount,rw", str(disk))


@pytest.mark.parametrize("status", FOLDERS)
def test_a_folder_on_another_disk_than_its_staging_is_refused(
    disk: Path, tmp_path: Path, status: Status
) -> None:
    workspace = Workspace(tmp_path / "w")
    workspace.create()
    folder = workspace.folder(status)
    mount("--bind", str(disk), str(folder))
    try:
        with pytest.raises(Misconfigured, match="another file system"):
            Work(workspace)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    Work(workspace).submit("p")


# -- another user -------------------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Where every user may write; the folders of tests belong to one."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def _as_nobody(act: Callable[[], object]) -> str:
    """What another user without rights gets: the error's type and message."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(_NOBODY)
                os.setuid(_NOBODY)
            try:
                os.write(writing, f"no error: {act()}".encode())
            except PenstockError as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        words = told.read().decode()
    os.waitpid(child, 0)
    return words


def test_a_workspace_of_another_user_is_refused_in_plain_words(open_folder: Path) -> None:
    workspace = Workspace(open_folder / "w")
    job_id = Work(workspace).submit("p")
    for folder in FOLDERS.values():
        (workspace.path / folder).chmod(0o555)
    told = _as_nobody(lambda: Work(workspace).submit("p"))
    assert told.startswith("Misconfigured: ")
    assert "may not be written to by this user" in told
    assert "Misconfigured" in _as_nobody(lambda: cancel(workspace, job_id))
    assert "no error: QUEUED" in _as_nobody(lambda: workspace.find(job_id))


def test_a_workspace_can_t_be_made_where_one_may_not_write(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    told = _as_nobody(lambda: Work(open_folder / "w"))
    assert told.startswith("StoreFailed: ")
    assert "permission denied" in told
    open_folder.chmod(0o777)


def test_a_file_that_may_not_be_read_is_unfit(open_folder: Path) -> None:
    (open_folder / "prompt.txt").write_text("p")
    (open_folder / "prompt.txt").chmod(0o000)
    told = _as_nobody(lambda: read_file(open_folder, "prompt.txt", 100))
    assert told == f"{Unfit.__name__}: prompt.txt: can't be read: permission denied"
