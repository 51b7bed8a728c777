"""Schedules of an engine that is killed again and again: every time has one job."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest
from tests.support.chaos.cluster import Cluster, cluster, kill
from tests.support.waiting import eventually

from penstock.core.job import Job
from penstock.lifecycles.canonical import TERMINAL

EVERY_SECOND = ("* * * * * *", "job.chaos.quick", "--input", '{"n": 1}')


def jobs_of(c: Cluster, schedule: str) -> list[Job]:
    stored, _ = c.stored()
    found = [job for job in stored.values() if job.request.schedule == schedule]
    return sorted(found, key=lambda job: job.seq)


def times_of(jobs: list[Job], schedule: str) -> list[int]:
    """The times for which there are jobs, in the order in which they were accepted."""
    keys = [job.request.idempotency_key or "" for job in jobs]
    texts = [key.removeprefix(f"schedule:{schedule}:") for key in keys]
    return [int(datetime.fromisoformat(text).timestamp()) for text in texts]


def check_each_time_once(times: list[int], begin: float) -> None:
    assert len(times) == len({*times})
    assert times == sorted(times)
    missing = {*range(times[0], times[-1] + 1)} - {*times}
    assert missing == set()
    assert times[0] <= begin + 2


def finish(c: Cluster, schedule: str) -> list[Job]:
    assert c.run("schedule", "pause", schedule).returncode == 0
    eventually(
        lambda: all(job.state in TERMINAL for job in jobs_of(c, schedule)), "every job has ended"
    )
    return jobs_of(c, schedule)


def test_an_engine_killed_around_its_firings_fires_each_time_once(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_HTTP__LISTEN="127.0.0.1:0") as c:
        engine = c.up("--app", "jobs:app")
        put = c.run("schedule", "create", "tick", *EVERY_SECOND, "--catch-up", "all")
        assert put.returncode == 0, put.stderr
        begin = time.time()
        for turn in range(6):
            seen = len(jobs_of(c, "tick"))
            eventually(lambda seen=seen: len(jobs_of(c, "tick")) > seen, "it fires")  # type: ignore[misc]
            # A little earlier from turn to turn, so that one of them hits a firing.
            eventually(lambda turn=turn: time.time() % 1 > 0.98 - 0.002 * turn, "the moment")  # type: ignore[misc]
            if turn % 2:
                eventually(lambda: time.time() % 1 < 0.05, "the second")
            kill(engine)
            engine = c.up("--app", "jobs:app")
        jobs = finish(c, "tick")
        check_each_time_once(times_of(jobs, "tick"), begin)
        view = json.loads(c.run("schedule", "show", "tick", "--json").stdout)
        assert view["fired"] == len(jobs)
        c.check_history()


@pytest.mark.parametrize("point", ["before-commit", "after-commit"])
def test_an_engine_killed_between_submitting_and_remembering_fires_each_time_once(
    tmp_path: Path, point: str
) -> None:
    with cluster(tmp_path, PENSTOCK_HTTP__LISTEN="127.0.0.1:0") as c:
        engine = c.up("--app", "jobs:app")
        put = c.run("schedule", "create", "tick", *EVERY_SECOND, "--catch-up", "all")
        assert put.returncode == 0, put.stderr
        begin = time.time()
        kill(engine)
        for struck in range(1, 6):
            engine = c.start("up", "--app", "jobs:app", PENSTOCK_FAILPOINT=f"{point}:{struck}")
            eventually(lambda engine=engine: engine.poll() is not None, "it dies")  # type: ignore[misc]
        c.up("--app", "jobs:app")
        eventually(lambda: len(jobs_of(c, "tick")) > 3, "it fires")
        jobs = finish(c, "tick")
        check_each_time_once(times_of(jobs, "tick"), begin)
        c.check_history()
