"""The output of jobs on its way through workers and engine, in every mode."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.jobs.talking_jobs import (
    app,
    flood,
    flood_in_process,
    ping,
    talk,
    talk_in_process,
    talk_in_thread,
)

from penstock.app.client import JobHandle

SAID = [
    ("stdout", "printed"),
    ("stderr", "complained"),
    ("info", "logged"),
    ("warning", "warned"),
    ("stdout", "no end"),
]


def lines_of(job: JobHandle[Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    after = 0
    while lines := job.logs(after):
        found += [(line.level, line.text) for line in lines]
        after = lines[-1].n
    return found


@pytest.mark.parametrize("job", [talk, talk_in_thread, talk_in_process])
def test_prints_and_records_are_in_the_job_s_log(job: Any, tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory"):
        handle = job.submit()
        handle.result(20)
        said = lines_of(handle)
        # A process has a pipe for each stream and a socket for records.
        assert sorted(said) == sorted(SAID)
        assert job is talk_in_process or said == SAID


def test_the_level_is_a_setting(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory", log_level="error"):
        for job in (talk, talk_in_process):
            handle = job.submit()
            handle.result(20)
            assert {level for level, _ in lines_of(handle)} == {"stdout", "stderr"}


@pytest.mark.parametrize("job", [flood, flood_in_process])
def test_a_job_that_prints_a_hundred_thousand_lines_does_not_starve_others(
    job: Any, tmp_path: Path
) -> None:
    with app.run(tmp_path, limits__max_log_lines=1000):
        loud = job.submit(100_000)
        slowest, count = 0.0, 0
        while not loud.refresh().is_final:
            began = time.monotonic()
            assert ping.submit().result(20) == "pong"
            slowest = max(slowest, time.monotonic() - began)
            count += 1
        assert loud.result(5) == 100_000
        assert count > 0
        assert slowest < 5
        said = lines_of(loud)
        assert len(said) == 1000
        assert said[0] == ("stdout", "line 0")
        assert said[-1] == ("warning", "cut off: a job may write 1000 lines")


def test_an_engine_in_memory_has_the_same_bound(tmp_path: Path) -> None:
    with app.run(tmp_path, durability="memory", limits__max_log_lines=10):
        loud = flood.submit(100)
        loud.result(20)
        assert lines_of(loud)[8:] == [
            ("stdout", "line 8"),
            ("warning", "cut off: a job may write 10 lines"),
        ]
