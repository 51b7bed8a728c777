"""The threads and processes of a worker: shared by all runs that it has."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests.support.jobs import pids

import penstock
from penstock.core.pointer import decode_data
from penstock.workloads.pipeline.context import RunOptions

THREADS = 32
"""The default of a worker."""


def app_of(*pipelines: penstock.Pipeline) -> penstock.App:
    app = penstock.App()
    app.add(*pipelines)
    return app


def test_many_runs_at_once_have_no_more_threads_than_one_may(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("many", single_flight=False)
    full, lock = threading.Event(), threading.Lock()
    used: set[threading.Thread] = set()

    @pipeline.map(over=lambda config: range(5), concurrency=5)
    def one(number: int) -> int:
        with lock:
            used.add(threading.current_thread())
            if len(used) >= THREADS:
                full.set()
        full.wait(20)
        return number

    with app_of(pipeline).run(tmp_path, concurrency=8) as ps:
        runs = [ps.pipelines.start("many") for _ in range(8)]
        for run in runs:
            assert ps.get(run.id).wait(timeout=30).state is penstock.JobState.SUCCEEDED
        assert len(used) == THREADS
        last = ps.pipelines.start("many")
        assert ps.get(last.id).wait(timeout=30).state is penstock.JobState.SUCCEEDED
        assert len(used) == THREADS


def test_threads_that_do_not_end_leave_room_for_later_runs(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("stuck", single_flight=False, cancel_grace=0.1)
    released, hangs = threading.Event(), [True]

    @pipeline.map(over=lambda config: range(THREADS), concurrency=THREADS, timeout=0.5)
    def one(number: int) -> int:
        if hangs:
            released.wait(30)
        return number

    with app_of(pipeline).run(tmp_path) as ps:
        first = ps.pipelines.start("stuck")
        ps.get(first.id).wait(timeout=30)
        assert len(ps.pipelines.get(first.id).abandoned_items) == THREADS
        hangs.clear()
        second = ps.pipelines.start("stuck")
        assert ps.get(second.id).wait(timeout=30).state is penstock.JobState.SUCCEEDED
        released.set()


def test_the_time_of_an_item_begins_when_it_has_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = penstock.Pipeline("queue", single_flight=False)

    @pipeline.map(over=lambda config: [1], concurrency=1, timeout=3.0)
    def one(number: int) -> None:
        time.sleep(1.8)

    one_thread = {"threads": 1}
    monkeypatch.setattr(
        "penstock.workloads.pipeline.executor.RunOptions",
        lambda **given: RunOptions(**{**given, **one_thread}),
    )
    with app_of(pipeline).run(tmp_path) as ps:
        runs = [ps.pipelines.start("queue") for _ in range(2)]
        for run in runs:
            assert ps.get(run.id).wait(timeout=30).state is penstock.JobState.SUCCEEDED


def test_runs_and_distributed_items_share_warm_processes(tmp_path: Path) -> None:
    with app_of(pids.near, pids.far).run(tmp_path) as ps:
        used: list[bytes] = []
        for name, stage in (("near", "pid_near"), ("near", "pid_near"), ("far", "pid_far")):
            run = ps.pipelines.start(name)
            assert ps.get(run.id).wait(timeout=30).state is penstock.JobState.SUCCEEDED
            used += [decode_data(item.output) for item in ps.pipelines.items(run.id, stage)]
        assert len(used) == 9
        assert len(set(used)) == 1
