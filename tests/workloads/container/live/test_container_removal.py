"""A container of the engine without a daemon can be removed again, wherever a removal ended."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_runtime
from tests.workloads.container.live.test_container_oci import laboratory, root, traces

from penstock.testing.aio import run_async
from penstock.testing.container_engine import Lab, first_output
from penstock.workloads.container.engine import OWNER_LABEL, EngineError
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.oci.engine import OciEngine

__all__ = ["root"]


class Died(BaseException):
    """The worker did: nothing of it goes on."""


def dies_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is about to change the file system for the n-th time."""
    left = iter(range(step))

    def dying(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            if next(left, None) is None:
                raise Died
            real(*args, **kwargs)

        return call

    for name in ("unlink", "rmdir", "rename"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))


async def removed_by_the_next(root: Path, lab: Lab) -> None:
    """What a worker that starts does about containers whose jobs have ended."""
    engine = OciEngine(root, runtime="runc")
    for found in await engine.find({OWNER_LABEL: lab.owner}):
        await engine.remove(found.name)
    await engine.close()


@run_async
async def test_whenever_a_worker_dies_in_a_removal_the_next_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_runtime("runc")
    async with laboratory(root, "runc") as lab:
        for step in range(100):
            plan = lab.shell("true")
            await lab.begin(plan)
            await lab.engine.wait(plan.name)
            with monkeypatch.context() as mortal:
                dies_at(step, mortal)
                try:
                    await lab.engine.remove(plan.name)
                    break
                except Died:
                    pass
            await removed_by_the_next(root, lab)
            assert traces(root, plan.name) == [], f"died at step {step}"
        assert step > 5


@run_async
async def test_a_folder_that_can_not_be_deleted_is_told_and_goes_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with laboratory(root) as lab:
        plan = lab.plan("true")
        await lab.engine.create(plan)
        rmdir = os.rmdir

        def not_empty(path: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None or Path(path).parent == root / "live" / "run":
                raise OSError(errno.ENOTEMPTY, "Directory not empty")
            rmdir(path)

        with monkeypatch.context() as broken:
            broken.setattr(os, "rmdir", not_empty)
            broken.setattr(subprocess, "run", lambda *_, **__: None)
            with pytest.raises(EngineError, match="not empty"):
                await lab.engine.remove(plan.name)
            assert await lab.engine.find({OWNER_LABEL: lab.owner}) == []
        await lab.engine.remove(plan.name)
        await lab.engine.find({})
        assert traces(root, plan.name) == []


@run_async
async def test_a_removal_that_is_given_up_can_be_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with laboratory(root) as lab:
        plan = lab.shell("echo on; sleep 60")
        await first_output(await lab.begin(plan))
        ending = asyncio.Event()
        with monkeypatch.context() as stuck:
            stuck.setattr(Cgroups, "remove", lambda *_: ending.set())
            removal = asyncio.create_task(lab.engine.remove(plan.name))
            await ending.wait()
            removal.cancel()
            await asyncio.wait([removal])
        await lab.engine.remove(plan.name)
        assert traces(root, plan.name) == []


@run_async
async def test_what_nobody_can_be_making_is_cleared_while_the_engine_is_open(root: Path) -> None:
    async with laboratory(root) as lab:
        await lab.engine.facts()
        half, fresh = (root / "live" / "run" / name for name in ("penstock-half", "penstock-fresh"))
        for folder in (half, fresh):
            folder.mkdir()
            (folder / "config.json").touch()
        os.utime(half, (time.time() - 3600,) * 2)
        await lab.engine.find({})
        assert (half.exists(), fresh.exists()) == (False, True)
        os.utime(fresh, (time.time() - 3600,) * 2)
        await lab.engine.find({})
        assert not fresh.exists()
