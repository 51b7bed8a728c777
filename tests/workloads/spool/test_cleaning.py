"""Cleaning takes away jobs that ended, by age and by number, and what killed programs left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.support.spool.spooled import StoppedClock, new_workspace, put

from penstock.core.errors import InvalidRequest, Misconfigured, StoreFailed
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.client.changes import clean
from penstock.workloads.spool.disk import files
from penstock.workloads.spool.disk.workspace import Workspace


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return new_workspace(tmp_path)


def _ended(workspace: Workspace, status: Status, job_id: str, at: float) -> None:
    os.utime(put(workspace, status, job_id), (at, at))


@pytest.fixture
def clock(workspace: Workspace) -> StoppedClock:
    """Three of each, that ended 10, 20 and 30 seconds ago; the ids tell the opposite order."""
    clock = StoppedClock()
    for number, ago in enumerate((30, 20, 10)):
        _ended(workspace, Status.DONE, f"9{number}", clock.now() - ago)
        _ended(workspace, Status.FAILED, f"8{number}", clock.now() - ago)
    put(workspace, Status.QUEUED, "1")
    put(workspace, Status.RUNNING, "2")
    return clock


def _left(workspace: Workspace) -> set[str]:
    return {job_id for status in (Status.DONE, Status.FAILED) for job_id in workspace.ids(status)}


def test_by_age(workspace: Workspace, clock: StoppedClock) -> None:
    assert clean(workspace, older_than=15, clock=clock) == ["80", "81", "90", "91"]
    assert _left(workspace) == {"92", "82"}
    assert not os.listdir(workspace.private / "trash")


@pytest.mark.seed("004", "6.2")
def test_by_number_the_last_of_each_state_are_kept(
    workspace: Workspace, clock: StoppedClock
) -> None:
    clean(workspace, keep=1, clock=clock)
    assert _left(workspace) == {"92", "82"}


@pytest.mark.seed("004", "12.2")
def test_both_rules_together_take_what_either_takes(
    workspace: Workspace, clock: StoppedClock
) -> None:
    clean(workspace, older_than=25, keep=2, clock=clock)
    assert _left(workspace) == {"91", "92", "81", "82"}
    clean(workspace, older_than=15, keep=3, clock=clock)
    assert _left(workspace) == {"92", "82"}


def test_only_in_the_states_asked_for(workspace: Workspace, clock: StoppedClock) -> None:
    clean(workspace, keep=0, states=[Status.FAILED], clock=clock)
    assert _left(workspace) == {"90", "91", "92"}


@pytest.mark.seed("004", "5.7")
def test_without_a_rule_no_job_is_taken(workspace: Workspace, clock: StoppedClock) -> None:
    assert clean(workspace, clock=clock) == []
    assert len(_left(workspace)) == 6


def test_jobs_that_wait_or_run_are_never_taken(workspace: Workspace, clock: StoppedClock) -> None:
    with pytest.raises(InvalidRequest):
        clean(workspace, keep=0, states=[Status.QUEUED], clock=clock)
    clean(workspace, keep=0, older_than=0, clock=clock)
    assert workspace.find("1") is Status.QUEUED
    assert workspace.find("2") is Status.RUNNING


def test_what_a_killed_submitter_left_goes_after_a_day(
    workspace: Workspace, clock: StoppedClock
) -> None:
    for name, ago in (("5", 86_401), ("6", 86_399), ("7.tmp", 86_401)):
        folder = workspace.folder(Status.STAGING) / name
        (folder / "images").mkdir(parents=True)
        os.utime(folder, (clock.now() - ago,) * 2)
    assert clean(workspace, clock=clock) == []
    assert os.listdir(workspace.folder(Status.STAGING)) == ["6"]


def test_what_a_killed_cleaner_left_goes(workspace: Workspace, clock: StoppedClock) -> None:
    (workspace.private / "trash" / "90.x.tmp" / "deep").mkdir(parents=True)
    clean(workspace, clock=clock)
    assert not os.listdir(workspace.private / "trash")


def test_wishes_to_cancel_what_has_ended_go(workspace: Workspace, clock: StoppedClock) -> None:
    for name in ("2", "90", "12345", "nonsense"):
        (workspace.private / "cancel" / name).touch()
    clean(workspace, clock=clock)
    assert os.listdir(workspace.private / "cancel") == ["2"]


def test_what_has_no_id_for_its_name_is_nobody_s_to_take(
    workspace: Workspace, clock: StoppedClock
) -> None:
    (workspace.folder(Status.DONE) / "notes").mkdir()
    clean(workspace, keep=0, clock=clock)
    assert os.listdir(workspace.folder(Status.DONE)) == ["notes"]


def test_a_link_is_taken_away_and_what_it_points_to_stays(
    workspace: Workspace, tmp_path: Path, clock: StoppedClock
) -> None:
    (tmp_path / "precious").mkdir()
    workspace.of(Status.DONE, "99").symlink_to(tmp_path / "precious")
    clean(workspace, keep=0, clock=clock)
    assert _left(workspace) == set()
    assert (tmp_path / "precious").is_dir()


def test_a_disk_that_refuses_is_told(
    workspace: Workspace, clock: StoppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(files, "rename_exclusively", refuse)
    with pytest.raises(StoreFailed, match="read-only"):
        clean(workspace, keep=0, clock=clock)
    assert len(_left(workspace)) == 6


def test_a_mistyped_workspace_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured):
        clean(Workspace(tmp_path / "none"), keep=0)
    assert not (tmp_path / "none").exists()


def test_a_wish_to_cancel_goes_with_a_job_that_another_server_has_ended(
    workspace: Workspace,
) -> None:
    notes = workspace.private / "cancel"
    for status, job_id in ((Status.DONE, "1"), (Status.RUNNING, "2")):
        workspace.of(status, job_id).mkdir()
        (notes / job_id).write_text("enough")
    clean(workspace)
    assert os.listdir(notes) == ["2"]
