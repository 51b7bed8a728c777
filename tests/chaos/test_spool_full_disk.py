"""A server of a spool whose disk is full or read-only keeps what it has, and goes on later."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chaos.disks import tmpfs
from tests.support.fake_llm import FakeRunner
from tests.support.waiting import soon

from penstock.lifecycles.spool import Status
from penstock.testing.aio import run_async
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import ServerConfig
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.server import Server


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", "size=8m") as disk:
        yield disk


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return filler


@run_async
async def test_jobs_wait_for_room_on_a_full_disk_and_are_done_then(small_disk: Path) -> None:
    workspace, runner = Workspace(small_disk / "workspace"), FakeRunner(delay=0.05)
    server = Server(ServerConfig(workspace=workspace.path, workers=2), runner)
    jobs = [Work(workspace).submit(f"words of job {number}") for number in range(4)]
    await server.start()
    await soon(lambda: runner.running == 2, "two run")
    filler = fill(small_disk)
    await soon(lambda: len(server.health.troubles) == 2, "both are in trouble")
    assert all("no space left" in why for why in server.health.troubles.values())
    assert set(server.running) == set(workspace.ids(Status.RUNNING)) == set(jobs[:2])
    filler.unlink()
    await soon(lambda: workspace.counts()[Status.DONE] == 4, "all are done")
    await soon(lambda: server.health.is_well, "the trouble is over")
    await server.stop()
    assert server.counts.done == 4
    assert len(runner.asked) == 4


@run_async
async def test_a_read_only_disk_keeps_jobs_running_and_a_stop_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("penstock.workloads.spool.server.server._LAST", 0.5)
    workspace, runner = Workspace(tmp_path), FakeRunner(delay=0.05)
    server = Server(ServerConfig(workspace=workspace.path, workers=1, drain=0.1), runner)
    first, second = (Work(workspace).submit(f"words of job {number}") for number in range(2))
    await server.start()
    await soon(lambda: runner.running == 1, "one runs")
    with monkeypatch.context() as patch:
        # A disk with an error becomes read-only though files are open; a test can't do that.
        patch.setattr("penstock.workloads.spool.disk.files.rename_exclusively", refused)
        await soon(lambda: f"job {first}" in server.health.troubles, "it is in trouble")
        assert "read-only" in server.health.troubles[f"job {first}"]
        began = time.monotonic()
        await server.stop()
        assert time.monotonic() - began < 8
    assert workspace.find(first) is Status.RUNNING
    assert workspace.find(second) is Status.QUEUED
    monkeypatch.setattr("penstock.workloads.spool.server.recovery.GRACE", 0.0)
    after = Server(ServerConfig(workspace=workspace.path), FakeRunner())
    await after.start()
    await soon(lambda: workspace.counts()[Status.DONE] == 2, "both are done")
    await after.stop()
