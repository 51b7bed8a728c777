"""Whoever is killed while a job is submitted or ended: the job is whole, in one state, or the
id was never told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.lifecycles.spool import VISIBLE, Status
from penstock.ports import process
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client.changes import cancel, clean
from penstock.workloads.spool.client.flow import Flow
from penstock.workloads.spool.client.work import Submission, Work
from penstock.workloads.spool.config import JobKind, SpoolOptions, Sync
from penstock.workloads.spool.disk.job import Meta, fail, finish, read_kind, read_meta, read_options
from penstock.workloads.spool.disk.workspace import Workspace

PNG = b"\x89PNG\r\n\x1a\n" + bytes(1000)
PROMPT = "tell me " * 1000
OPTIONS = SpoolOptions(sampling=Sampling(seed=1))
POINTS = (
    "spool-made",
    "spool-created",
    "spool-written",
    "spool-flushed",
    "spool-replaced",
    "spool-folder-flushed",
    "spool-all-flushed",
    "spool-ended",
    "spool-moved",
    "spool-submitted",
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    workspace = Workspace(tmp_path / "w")
    workspace.create()
    return workspace


def _killed(point: str, at: int, act: Callable[[int], object]) -> tuple[bool, list[str]]:
    """Another process does it, and dies at this point; what it wrote before, line by line."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        process._ARMED, process._left = point, at
        try:
            act(writing)
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as told:
        lines = told.read().decode().split()
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, lines


def _strikes(act: Callable[[int], object]) -> Iterator[tuple[str, list[str]]]:
    """Kills it everywhere it can be killed, and lets it through once for each point."""
    for point in POINTS:
        for at in range(1, 100):
            killed, told = _killed(point, at, act)
            yield f"{point}:{at}", told
            if not killed:
                break


def _visible(workspace: Workspace) -> set[str]:
    return {job_id for status in VISIBLE for job_id in workspace.ids(status)}


def _assert_whole(workspace: Workspace, job_id: str, where: str) -> None:
    folder = workspace.of(Status.QUEUED, job_id)
    assert (folder / "prompt.txt").read_text() == PROMPT, where
    assert read_kind(folder) is JobKind.VISION, where
    assert read_options(folder) == OPTIONS, where
    assert (folder / "images" / "image_000000.png").read_bytes() == PNG, where
    assert read_meta(folder).tags == ("t",), where


@pytest.mark.seed("004", "1.4", "13.4")
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a group"])
def test_a_submitter_killed_anywhere_leaves_a_whole_job_or_none(
    workspace: Workspace, tmp_path: Path, together: bool
) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(PNG)
    job = Submission(prompt=PROMPT, options=OPTIONS, images=(image,), tags=("t",))

    def submit(out: int) -> None:
        work = Work(workspace)
        if together:
            ids = list(work.submit_many([job, job]))
        else:
            ids = [work.submit(PROMPT, options=OPTIONS, images=[image], tags=["t"])]
        os.write(out, "\n".join(ids).encode())

    known: set[str] = set()
    through = 0
    for where, told in _strikes(submit):
        new = _visible(workspace) - known
        assert set(told) <= new, f"{where}: an id was told of a job that is not there"
        for job_id in new:
            _assert_whole(workspace, job_id, where)
        known |= new
        through += bool(told)
    assert through >= len(POINTS) - 3
    assert set(workspace.ids(Status.QUEUED)) == known

    left = os.listdir(workspace.folder(Status.STAGING))
    assert left
    assert not clean(workspace)
    assert sorted(os.listdir(workspace.folder(Status.STAGING))) == sorted(left)
    for name in left:
        os.utime(workspace.folder(Status.STAGING) / name, (0, 0))
    clean(workspace)
    assert not os.listdir(workspace.folder(Status.STAGING))


@pytest.mark.seed("004", "5.5", "6.6", "8.8")
@pytest.mark.parametrize("end", ["finish", "fail", "cancel"])
def test_a_server_killed_anywhere_at_the_end_leaves_a_job_in_one_state(
    workspace: Workspace, end: str
) -> None:
    number = 0
    start = Status.QUEUED if end == "cancel" else Status.RUNNING
    after = Status.DONE if end == "finish" else Status.FAILED

    def act(out: int) -> None:
        job_id = f"1_2_{number}"
        if end == "finish":
            finish(workspace, job_id, Meta(seed=1), {"result.txt": b"r" * 10_000})
        elif end == "fail":
            fail(workspace, job_id, Meta(), "it went wrong")
        else:
            cancel(workspace, job_id)

    def new_job() -> None:
        folder = workspace.of(start, f"1_2_{number}")
        folder.mkdir()
        (folder / "prompt.txt").write_text("p")
        (folder / "partial.txt").write_text("half")

    new_job()
    for where, _ in _strikes(act):
        job_id = f"1_2_{number}"
        states = [status for status in VISIBLE if workspace.holds(status, job_id)]
        assert len(states) == 1, where
        if states != [after]:
            assert states[0] in (Status.QUEUED, Status.RUNNING), where
            if states == [Status.QUEUED]:
                os.rename(workspace.of(Status.QUEUED, job_id), workspace.of(Status.RUNNING, job_id))
            (fail if end != "finish" else _finish)(workspace, job_id, Meta(), "again")
        folder = workspace.of(after, job_id)
        assert read_meta(folder).status == ("done" if end == "finish" else "failed"), where
        names = {"result.txt"} if end == "finish" else {"error.txt"}
        assert set(os.listdir(folder)) == {"prompt.txt", "meta.json", *names}, where
        number += 1
        new_job()


def _finish(workspace: Workspace, job_id: str, meta: Meta, text: str) -> None:
    finish(workspace, job_id, meta, {"result.txt": text.encode()})


# -- a job that moves ---------------------------------------------------------------

_POLLS = 200_000
_IN_FLIGHT = 8


def _move_on(workspace: Workspace) -> None:
    """A server at its quickest: claims, puts some back, ends the others. For ever."""
    turn = 0
    while True:
        for job_id in workspace.ids(Status.QUEUED):
            turn += 1
            running = workspace.of(Status.RUNNING, job_id)
            os.rename(workspace.of(Status.QUEUED, job_id), running)
            if turn % 31:
                os.rename(running, workspace.of(Status.QUEUED, job_id))
            elif turn % 2:
                finish(workspace, job_id, Meta(seed=7), {"result.txt": b"whole"})
            else:
                fail(workspace, job_id, Meta(seed=7), "whole")


@pytest.mark.seed("004", "8.10", "13.7", "14.1")
def test_a_job_that_moves_is_never_missing_and_final_when_it_is_seen_to_have_ended(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path / "w", Sync.NONE)
    work, flow = Work(workspace), Flow(workspace)
    mover = os.fork()
    if not mover:
        try:
            _move_on(workspace)
        finally:
            os._exit(1)
    polls = ended = 0
    jobs: list[str] = []
    try:
        while polls < _POLLS:
            jobs += [work.submit("p") for _ in range(_IN_FLIGHT - len(jobs))]
            for job_id in list(jobs):
                status = flow.status(job_id)
                polls += 1
                assert status is not Status.MISSING, f"poll {polls}"
                if status in (Status.DONE, Status.FAILED):
                    found = flow.get(job_id)
                    assert (found.content == b"whole") is (status is Status.DONE)
                    assert (found.error == "whole") is (status is Status.FAILED)
                    assert found.meta.status == status.lower()
                    jobs.remove(job_id)
                    ended += 1
    finally:
        os.kill(mover, signal.SIGKILL)
        os.waitpid(mover, 0)
    assert ended > 100


# -- kills at any moment ------------------------------------------------------------


def _submit_for_ever(workspace: Workspace, out: int) -> None:
    try:
        work = Work(workspace)
        while True:
            os.write(out, (work.submit("p" * 5000) + "\n").encode())
    finally:
        os._exit(1)


@pytest.mark.seed("004", "2.8")
def test_submitters_killed_at_any_moment_lose_no_job_they_told_of(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "w")
    workspace.create()
    told: set[str] = set()
    for round_ in range(10):
        reading, writing = os.pipe()
        children = []
        for _ in range(2):
            child = os.fork()
            if not child:
                _submit_for_ever(workspace, writing)
            children.append(child)
        os.close(writing)
        time.sleep(0.02 + 0.013 * round_)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        with open(reading, "rb") as lines:
            told |= set(lines.read().decode().split())
    queued = set(workspace.ids(Status.QUEUED))
    assert told
    assert told <= queued
    for job_id in queued:
        assert (workspace.of(Status.QUEUED, job_id) / "prompt.txt").stat().st_size == 5000
        assert read_meta(workspace.of(Status.QUEUED, job_id)).submitted_at
