"""Servers of a spool that are killed, stopped or share a workspace: no job is lost, half done,
or done twice."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path

import msgspec
import pytest
from tests.support.chaos.spool_servers import Setting, server
from tests.support.waiting import eventually

from penstock.lifecycles.spool import Status
from penstock.workloads.llm.values import Sampling
from penstock.workloads.spool.client.work import Submission, Work
from penstock.workloads.spool.config import SpoolOptions, Sync
from penstock.workloads.spool.disk.job import RESULT, read_meta
from penstock.workloads.spool.disk.workspace import Workspace


class Observer:
    """Sees every result when it appears, and that it stays as it is."""

    def __init__(self, workspace: Workspace) -> None:
        self._output = workspace.folder(Status.DONE)
        self.seen: dict[str, tuple[int, int]] = {}

    def look(self) -> int:
        for name in os.listdir(self._output):
            if name not in self.seen:
                self.seen[name] = self._of(name)
        return len(self.seen)

    def check(self) -> None:
        assert {name: self._of(name) for name in self.seen} == self.seen

    def _of(self, name: str) -> tuple[int, int]:
        found = os.stat(self._output / name / RESULT)
        return found.st_ino, found.st_mtime_ns


def submitted(folder: Path, count: int, options: SpoolOptions | None = None) -> dict[str, str]:
    """The prompts of so many jobs, by their ids."""
    prompts = [f"job number {number} of {count}" for number in range(count)]
    jobs = [Submission(prompt=prompt, options=options or SpoolOptions()) for prompt in prompts]
    ids = Work(Workspace(folder, Sync.NONE)).submit_many(jobs)
    return dict(zip(ids, prompts, strict=True))


def run_and_kill(
    setting: Setting, workspace: Workspace, jobs: int, lives: Iterator[float], within: float = 110
) -> int:
    """Servers one after another, each killed after its life, until all jobs are DONE; how many."""
    observer, kills, end = Observer(workspace), 0, time.monotonic() + within
    while True:
        with server(setting) as process:
            life = time.monotonic() + next(lives)
            while observer.look() < jobs and time.monotonic() < life:
                time.sleep(0.002)
            if observer.look() == jobs:
                observer.check()
                return kills
            assert process.poll() is None
            process.kill()
            kills += 1
        assert time.monotonic() < end, workspace.counts()


def check_all_done(workspace: Workspace, prompts: dict[str, str]) -> None:
    counts = workspace.counts()
    assert counts[Status.DONE] == len(prompts)
    assert sum(counts.values()) == len(prompts), counts
    for job_id, prompt in prompts.items():
        folder = workspace.of(Status.DONE, job_id)
        assert (folder / "prompt.txt").read_text() == prompt
        meta = read_meta(folder)
        assert (meta.status, meta.artifacts) == ("done", (RESULT,))
        names = set(os.listdir(folder)) - {"attempts.txt", "options.json"}
        assert names == {"prompt.txt", "meta.json", RESULT}


@pytest.mark.seed("004", "13.4")
@pytest.mark.timeout(120)
def test_a_kill_9_loop_over_1000_jobs_loses_none_and_gives_each_one_whole_result(
    tmp_path: Path,
) -> None:
    prompts = submitted(tmp_path, 1000)
    workspace = Workspace(tmp_path)
    setting = Setting(workspace=str(tmp_path), delay=0.02, workers=16)
    chance = random.Random(6)
    # The jobs take 1.25 s at least, and the first three servers live for 0.64 s in all.
    lives = (chance.uniform(0.0, 0.2 + number / 8) for number in count())
    assert run_and_kill(setting, workspace, 1000, lives) >= 3
    check_all_done(workspace, prompts)
    for job_id, prompt in prompts.items():
        assert (workspace.of(Status.DONE, job_id) / RESULT).read_text() == prompt.upper()


@pytest.mark.seed("004", "10.1")
@pytest.mark.timeout(120)
def test_a_kill_9_loop_over_a_real_model_loses_no_job(tmp_path: Path, model_file: Path) -> None:
    options = SpoolOptions(max_tokens=2, sampling=Sampling(temperature=0))
    prompts = submitted(tmp_path, 100, options)
    workspace = Workspace(tmp_path)
    setting = Setting(workspace=str(tmp_path), model=str(model_file))
    lives = chain([0.7, 0.05, 1.3], repeat(60.0))
    assert run_and_kill(setting, workspace, 100, lives) == 3
    check_all_done(workspace, prompts)
    metas = [read_meta(workspace.of(Status.DONE, job_id)) for job_id in prompts]
    assert {meta.completion_tokens for meta in metas} <= {1, 2}
    assert max(meta.attempts or 0 for meta in metas) > 1


STEPS = (
    "spool-created",
    "spool-written",
    "spool-flushed",
    "spool-replaced",
    "spool-folder-flushed",
    "spool-moved",
    "spool-ended",
)


@pytest.mark.seed("004", "1.4")
@pytest.mark.parametrize("step", STEPS)
def test_a_server_killed_at_this_step_of_an_end_leaves_every_job_in_one_state(
    step: str, tmp_path: Path
) -> None:
    prompts = submitted(tmp_path, 12)
    workspace = Workspace(tmp_path)
    setting = Setting(workspace=str(tmp_path), workers=3)
    with server(setting, failpoint=f"{step}:7") as process:
        assert process.wait(20) == -signal.SIGKILL
    assert sum(workspace.counts().values()) == len(prompts)
    for job_id in workspace.ids(Status.DONE):
        result = workspace.of(Status.DONE, job_id) / RESULT
        assert result.read_text() == prompts[job_id].upper()
    with server(setting):
        eventually(lambda: workspace.counts()[Status.DONE] == len(prompts), "all are done")
    check_all_done(workspace, prompts)


@pytest.mark.parametrize("step", ["spool-returning", "spool-moved"])
def test_a_server_killed_while_it_recovers_orphans_loses_none(step: str, tmp_path: Path) -> None:
    prompts = submitted(tmp_path, 6)
    workspace = Workspace(tmp_path)
    setting = Setting(workspace=str(tmp_path), workers=4, delay=5.0)
    with server(setting) as process:
        eventually(lambda: workspace.counts()[Status.RUNNING] == 4, "they run")
        process.kill()
    quick = msgspec.structs.replace(setting, delay=0.0)
    with server(quick, failpoint=f"{step}:2") as process:
        assert process.wait(20) == -signal.SIGKILL
    assert sum(workspace.counts().values()) == len(prompts)
    with server(quick):
        eventually(lambda: workspace.counts()[Status.DONE] == len(prompts), "all are done")
    check_all_done(workspace, prompts)


@pytest.mark.seed("004", "4.4", "13.5", "14.5")
def test_two_servers_share_a_workspace_and_no_job_is_computed_twice(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    prompts = submitted(folder, 300)
    workspace, marks = Workspace(folder), tmp_path / "marks"
    setting = Setting(workspace=str(folder), marks=str(marks), delay=0.002, workers=4)
    with server(setting), server(setting):
        eventually(lambda: workspace.counts()[Status.DONE] == len(prompts), "all are done")
    check_all_done(workspace, prompts)
    begun = [line.split(" ", 1) for line in marks.read_text().splitlines()]
    assert Counter(prompt for _, prompt in begun) == Counter(prompts.values())
    assert len({who for who, _ in begun}) == 2


@pytest.mark.seed("004", "10.3")
def test_a_stopped_neighbour_keeps_its_jobs_and_a_dead_one_loses_them(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    prompts = submitted(folder, 8)
    workspace, marks = Workspace(folder), tmp_path / "marks"
    slow = Setting(workspace=str(folder), marks=str(marks), delay=30.0, workers=4)
    quick = msgspec.structs.replace(slow, delay=0.0, scan=0.05)
    with server(slow) as peer:
        eventually(lambda: workspace.counts()[Status.RUNNING] == 4, "the first has four")
        theirs = set(workspace.ids(Status.RUNNING))
        os.kill(peer.pid, signal.SIGSTOP)
        with server(quick):
            eventually(lambda: workspace.counts()[Status.DONE] == 4, "the second does the others")
            time.sleep(0.5)  # ten looks for orphans
            assert set(workspace.ids(Status.RUNNING)) == theirs
            peer.kill()
            eventually(lambda: workspace.counts()[Status.DONE] == 8, "the dead one's jobs too")
    check_all_done(workspace, prompts)
    attempts = {job_id: read_meta(workspace.of(Status.DONE, job_id)).attempts for job_id in prompts}
    assert attempts == {job_id: 2 if job_id in theirs else 1 for job_id in prompts}


def test_a_terminated_server_leaves_its_jobs_to_the_next_and_nothing_behind(
    tmp_path: Path,
) -> None:
    prompts = submitted(tmp_path, 5)
    workspace = Workspace(tmp_path)
    setting = Setting(workspace=str(tmp_path), delay=30.0, workers=4)
    with server(setting) as process:
        eventually(lambda: workspace.counts()[Status.RUNNING] == 4, "four run")
        assert (tmp_path / ".nrvnad.pid").read_text() == str(process.pid)
        began = time.monotonic()
        process.terminate()
        assert process.wait(20) == 0
        assert time.monotonic() - began < 2
    assert workspace.counts()[Status.QUEUED] == 5
    assert not (tmp_path / ".nrvnad.pid").exists()
    assert os.listdir(workspace.private / "servers") == []
    with server(msgspec.structs.replace(setting, delay=0.0)):
        eventually(lambda: workspace.counts()[Status.DONE] == 5, "all are done")
    check_all_done(workspace, prompts)
    for job_id in prompts:
        assert read_meta(workspace.of(Status.DONE, job_id)).attempts == 1
