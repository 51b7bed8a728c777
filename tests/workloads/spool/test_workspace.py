"""A workspace is five folders on one file system, and is refused if it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.core.errors import InvalidRequest, Misconfigured, StoreFailed
from penstock.lifecycles.spool import FOLDERS, Status
from penstock.workloads.spool.disk import files
from penstock.workloads.spool.disk.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path / "deep" / "work")
    workspace.create()
    return workspace


def test_all_folders_are_made_with_their_parents(workspace: Workspace) -> None:
    for name in FOLDERS.values():
        assert (workspace.path / name).is_dir()
    assert sorted(os.listdir(workspace.private)) == ["cancel", "servers", "trash"]
    workspace.create()


def test_the_folder_is_the_state(workspace: Workspace) -> None:
    assert workspace.of(Status.QUEUED, "1_2_3") == workspace.path / "input" / "ready" / "1_2_3"


@pytest.mark.parametrize("bad", ["../x", "a/b", "", "7" * 5000, "1\x002", "_1", "1__2"])
def test_no_path_is_made_of_what_is_no_id(workspace: Workspace, bad: str) -> None:
    with pytest.raises(InvalidRequest):
        workspace.of(Status.QUEUED, bad)
    with pytest.raises(InvalidRequest):
        workspace.find(bad)


def test_what_is_no_workspace_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="is not a workspace"):
        Workspace(tmp_path).check()
    assert not list(tmp_path.iterdir())


def test_a_path_that_can_t_be_one_is_refused() -> None:
    with pytest.raises(Misconfigured, match="null byte"):
        Workspace("a\0b")


def test_a_workspace_stays_where_it_was_when_the_program_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = Workspace("w")
    monkeypatch.chdir("/")
    workspace.create()
    assert (tmp_path / "w" / "output").is_dir()


def test_a_link_in_place_of_a_folder_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    output = workspace.folder(Status.DONE)
    output.rename(tmp_path / "elsewhere")
    output.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Misconfigured, match="output is a symbolic link"):
        workspace.create()


def test_a_file_in_place_of_a_folder_is_refused(workspace: Workspace) -> None:
    workspace.folder(Status.DONE).rmdir()
    workspace.folder(Status.DONE).touch()
    with pytest.raises(Misconfigured, match="output is no folder"):
        workspace.create()


def test_a_file_in_place_of_the_workspace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises((Misconfigured, StoreFailed), match="file"):
        Workspace(tmp_path / "file").create()


def test_folders_on_two_file_systems_are_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, output = os.lstat, workspace.folder(Status.DONE)

    def lstat(path: Path) -> os.stat_result:
        found = real(path)
        return os.stat_result((*found[:2], found.st_dev + (path == output), *found[3:]))

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(Misconfigured, match="another file system"):
        workspace.check()


def test_a_folder_that_may_not_be_written_to_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != workspace.folder(Status.FAILED))
    with pytest.raises(Misconfigured, match="failed may not be written to"):
        workspace.check()


def test_only_ids_count_and_none_is_looked_into(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1_2_3", "1_2_4", "notes", ".hidden", "1__2"):
        workspace.folder(Status.QUEUED).joinpath(name).mkdir()
    workspace.of(Status.DONE, "5").mkdir()
    monkeypatch.setattr(os, "stat", lambda *args, **more: pytest.fail("looked into a job"))
    monkeypatch.setattr(os, "lstat", lambda *args, **more: pytest.fail("looked into a job"))
    assert workspace.counts() == {
        Status.QUEUED: 2,
        Status.RUNNING: 0,
        Status.DONE: 1,
        Status.FAILED: 0,
    }


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "anywhere"])
def test_a_thing_under_an_id_is_seen_whatever_it_points_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    monkeypatch.setattr(files, "_has_quick_access", lambda: quick)
    workspace = Workspace(tmp_path)
    workspace.folder(Status.QUEUED).mkdir(parents=True)
    workspace.of(Status.QUEUED, "1").symlink_to("nowhere")
    assert workspace.find("1") is Status.QUEUED
    assert workspace.find("2") is Status.MISSING


def test_a_workspace_that_is_not_there_has_no_jobs(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "none")
    assert sum(workspace.counts().values()) == 0
    assert workspace.find("1_2_3") is Status.MISSING
