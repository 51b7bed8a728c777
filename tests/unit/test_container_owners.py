"""Whose containers are whose, when processes die."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.containers import FakeEngine, Script, image_of
from penstock.workloads.container.engine import OWNER_LABEL, Plan
from penstock.workloads.container.owners import Owners


def a_plan(name: str, owner: str) -> Plan:
    return Plan(
        name=f"penstock-{name}",
        image=image_of("alpine:latest").id,
        memory=1 << 24,
        cpus=1,
        pids=16,
        tmp=1 << 20,
        labels={OWNER_LABEL: owner},
    )


@run_async
async def test_what_a_living_owner_has_is_left_alone(tmp_path: Path) -> None:
    engine = FakeEngine(VirtualClock(), {"alpine:latest": Script()})
    one, other = Owners(tmp_path), Owners(tmp_path)
    folder = one.enter()
    other.enter()
    await engine.create(a_plan("a", one.me))
    assert await other.sweep(engine) == []
    assert folder.is_dir()
    assert len(engine.containers) == 1
    one.leave()
    other.leave()


@run_async
async def test_what_a_killed_owner_left_is_removed_once(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from penstock.workloads.container.owners import Owners\n"
        "owners = Owners(pathlib.Path(sys.argv[1]))\n"
        "(owners.enter() / 'input').mkdir()\n"
        "print(owners.me, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    gone = printed_by(script, tmp_path)
    engine = FakeEngine(VirtualClock(), {"alpine:latest": Script()})
    await engine.create(a_plan("a", gone))
    owners = Owners(tmp_path)
    owners.enter()
    assert await owners.sweep(engine) == ["penstock-a"]
    assert await owners.sweep(engine) == []
    assert engine.containers == {}
    assert sorted(os.listdir(tmp_path)) == [owners.me, f"{owners.me}.lock"]
    owners.leave()
    assert os.listdir(tmp_path) == []


@run_async
async def test_an_owner_that_is_just_entering_is_not_taken_for_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(VirtualClock(), {"alpine:latest": Script()})
    one, other = Owners(tmp_path), Owners(tmp_path)
    flock, enters = fcntl.flock, True

    def swept_before(file: IO[str], how: int) -> None:
        nonlocal enters
        if enters:  # no lock is held yet
            enters = False
            with ThreadPoolExecutor() as threads:
                threads.submit(asyncio.run, other.sweep(engine)).result()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", swept_before)
    folder = await asyncio.to_thread(one.enter)
    assert not enters
    assert folder.is_dir()
    assert (tmp_path / f"{one.me}.lock").exists()
    assert await other.sweep(engine) == []
    one.leave()


def printed_by(script: str, folder: Path) -> str:
    """What a process says before it kills itself."""
    argv = [sys.executable, "-c", script, str(folder)]
    died = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    return died.stdout.strip()
