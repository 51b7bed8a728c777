"""Runs whose process, engine and worker in one, is killed: at every commit, and at any time."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chaos.pipelines import (
    KILLED,
    SECONDS,
    Stable,
    calls_in,
    ended_in,
    hook_kept_in,
    hooks_in,
    left_in,
    result_in,
)
from tests.support.waiting import eventually

import penstock
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.interface import CancelAnswer

AT_ONCE = 6
"""Folders that are hurt side by side."""


@pytest.fixture(scope="module")
def stable() -> Iterator[Stable]:
    with Stable() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(stable: Stable, tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert stable.run(folder) == 0
    calls = [name for name, _ in calls_in(folder)]
    assert len(calls) == len(set(calls)) == 13
    result = result_in(folder)
    assert result[0] is PipelineJobStatus.PARTIAL
    return result


def _goes_on(
    stable: Stable, folders: list[Path], undisturbed: object, seconds: float = SECONDS
) -> None:
    """Start again where a process died: the same result, and nothing twice that was done."""
    before = {folder: (ended_in(folder), len(calls_in(folder))) for folder in folders}
    again = [(folder, stable.start(folder, seconds=seconds)) for folder in folders]
    for folder, pid in again:
        assert stable.join(pid) == 0, folder.name
        ended, calls = before[folder]
        repeated = {name for name, _ in calls_in(folder)[calls:]} & ended
        assert not repeated, folder.name
        assert result_in(folder) == undisturbed, folder.name


@pytest.mark.seed("002", "8.15")
@pytest.mark.parametrize("where", ["before-commit", "after-commit"])
def test_a_job_whose_process_is_killed_at_any_commit_goes_on_from_there(
    stable: Stable, undisturbed: object, tmp_path: Path, where: str
) -> None:
    """Its hook is called once; twice where it dies after the call, before that is durable.

    Which commit that is differs from run to run, as items that end together share one (it was
    number 13 to 17 of 15 to 19): several of the runs here may die there, each at its own number.
    """
    twice: list[str] = []
    cut: list[str] = []
    """Those that died with their hook called and no word of that written."""
    for first in itertools.count(1, AT_ONCE):
        counts = range(first, first + AT_ONCE)
        folders = {count: tmp_path / f"{where}-{count}" for count in counts}
        pids = {
            count: stable.start(folder, failpoint=where, count=count)
            for count, folder in folders.items()
        }
        codes = {count: stable.join(pid) for count, pid in pids.items()}
        assert set(codes.values()) <= {0, KILLED}
        killed = [folders[count] for count, code in codes.items() if code]
        cut += [folder.name for folder in killed if hooks_in(folder) and not hook_kept_in(folder)]
        _goes_on(stable, killed, undisturbed)
        through = [folders[count] for count, code in codes.items() if not code]
        assert all(result_in(folder) == undisturbed for folder in through)
        for folder in folders.values():
            assert hooks_in(folder) in (["PARTIAL"], ["PARTIAL"] * 2), folder.name
            twice += [folder.name] * (len(hooks_in(folder)) == 2)
        if len(through) == AT_ONCE:
            break
    assert twice == cut, "a hook is called again where its call is not durable, and only there"
    assert where == "before-commit" or not cut, "its call is durable with the commit that follows"
    assert first > AT_ONCE, "it was never killed at most of its commits"


def test_a_job_whose_process_is_killed_at_any_time_goes_on_from_there(
    stable: Stable, undisturbed: object, tmp_path: Path
) -> None:
    chance = random.Random(4)
    folders = [tmp_path / str(n) for n in range(20)]
    while some := folders[:AT_ONCE]:
        del folders[:AT_ONCE]
        due = []
        for folder in some:
            pid = stable.start(folder, seconds=0.01)
            due.append((time.monotonic() + chance.uniform(0.0, 0.25), pid))
        for when, pid in sorted(due):
            time.sleep(max(0.0, when - time.monotonic()))
            os.kill(pid, signal.SIGKILL)
        assert {stable.join(pid) for _, pid in due} <= {0, KILLED}
        _goes_on(stable, some, undisturbed, 0.01)


def test_a_job_that_is_killed_again_and_again_gets_to_its_end_all_the_same(
    stable: Stable, undisturbed: object, tmp_path: Path
) -> None:
    ended: set[str] = set()
    for _ in range(20):
        calls = len(calls_in(tmp_path))
        code = stable.run(tmp_path, failpoint="after-commit", count=7)
        assert not {name for name, _ in calls_in(tmp_path)[calls:]} & ended
        ended = ended_in(tmp_path)
        if code == 0:
            break
        assert code == KILLED
    left = left_in(tmp_path)
    assert left is not None
    assert left.record.attempt >= 3
    assert result_in(tmp_path) == undisturbed


def test_one_of_the_others_takes_over_from_a_process_that_is_killed(
    stable: Stable, undisturbed: object, tmp_path: Path
) -> None:
    first = stable.start(tmp_path, seconds=0.05)
    eventually(lambda: len(calls_in(tmp_path)) >= 3, "the first has begun")
    others = [stable.start(tmp_path, seconds=0.05) for _ in range(2)]
    time.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    assert stable.join(first) == KILLED
    ended, calls = ended_in(tmp_path), len(calls_in(tmp_path))
    assert [stable.join(pid) for pid in others] == [0, 0]
    after = calls_in(tmp_path)[calls:]
    assert len({pid for _, pid in after}) == 1
    assert not {name for name, _ in after} & ended
    assert result_in(tmp_path) == undisturbed


def test_a_cancel_reaches_a_run_of_another_process(stable: Stable, tmp_path: Path) -> None:
    first = stable.start(tmp_path, seconds=60.0)
    eventually(lambda: len(calls_in(tmp_path)) == 2, "the first has begun")
    with penstock.connect(data=tmp_path / "data") as ps:
        (run,) = ps.pipelines.runs(penstock.RunQuery())
        answer = ps.pipelines.cancel(run.id, timeout=30)
    assert answer == CancelAnswer(True, PipelineJobStatus.CANCELLED)
    assert stable.join(first) == 0
    left = left_in(tmp_path)
    assert left is not None
    assert (left.record.status, left.record.cancel_effective) == ("CANCELLED", True)
    assert len(calls_in(tmp_path)) == 2
    assert hooks_in(tmp_path) == ["CANCELLED"]
