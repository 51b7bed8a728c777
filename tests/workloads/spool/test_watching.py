"""Names that appear in folders are told, and what may have been missed is said to be."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from penstock.workloads.spool.disk import watching
from penstock.workloads.spool.disk.watching import NOT_WATCHED, FolderWatch, Names


async def _next(heard: asyncio.Queue[str]) -> str:
    async with asyncio.timeout(10):
        return await heard.get()


def test_what_is_moved_or_made_in_a_folder_is_told(tmp_path: Path) -> None:
    ready, cancel, other = (tmp_path / name for name in ("ready", "cancel", "other"))
    for folder in (ready, cancel, other):
        folder.mkdir()

    async def watch() -> list[str]:
        heard: asyncio.Queue[str] = asyncio.Queue()
        watch = FolderWatch()
        watch.add(ready, lambda name: heard.put_nowait(f"ready {name}"))
        watch.add(cancel, lambda name: heard.put_nowait(f"cancel {name}"))
        assert watch.is_live
        (other / "1_2_3").mkdir()
        (other / "1_2_3").rename(ready / "1_2_3")
        (cancel / "1_2_3").touch()
        told = [await _next(heard), await _next(heard)]
        watch.close()
        return told

    assert asyncio.run(watch()) == ["ready 1_2_3", "cancel 1_2_3"]


def test_a_folder_that_goes_away_means_look_for_yourself(tmp_path: Path) -> None:
    folder = tmp_path / "ready"
    folder.mkdir()

    async def watch() -> bool:
        missed = asyncio.Event()
        watch = FolderWatch(missed.set)
        watch.add(folder, lambda name: None)
        folder.rmdir()
        async with asyncio.timeout(10):
            await missed.wait()
        watch.close()
        return missed.is_set()

    assert asyncio.run(watch())


def test_an_overflow_means_look_for_yourself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def watch() -> bool:
        missed = asyncio.Event()
        watch = FolderWatch(missed.set)
        watch.add(tmp_path, lambda name: None)
        overflow = watching._HEAD.pack(-1, 0x4000, 0, 0)
        monkeypatch.setattr(watching.os, "read", lambda fd, size: overflow)  # type: ignore[attr-defined]
        (tmp_path / "x").touch()
        async with asyncio.timeout(10):
            await missed.wait()
        monkeypatch.undo()
        watch.close()
        return missed.is_set()

    assert asyncio.run(watch())


def test_what_can_t_be_watched_is_not_live(tmp_path: Path) -> None:
    async def watch() -> tuple[int, bool]:
        watch = FolderWatch()
        number = watch.add(tmp_path / "none", lambda name: None)
        live = watch.is_live
        watch.close()
        return number, live

    assert asyncio.run(watch()) == (NOT_WATCHED, False)


def test_a_system_without_inotify_is_not_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_libc", lambda: None)

    async def watch() -> bool:
        watch = FolderWatch()
        watch.add(tmp_path, lambda name: None)
        watch.close()
        return watch.is_live

    assert not asyncio.run(watch())
    with Names([tmp_path]) as names:
        assert not names.is_live
        assert names.wait(0.0) == set()


def test_what_came_between_opening_and_waiting_is_told(tmp_path: Path) -> None:
    with Names([tmp_path]) as names:
        (tmp_path / "1").mkdir()
        (tmp_path / "2").mkdir()
        assert names.wait(10) == {"1", "2"}
        assert names.wait(0) == set()


def test_other_names_don_t_end_the_wait_for_one(tmp_path: Path) -> None:
    with Names([tmp_path]) as names:
        (tmp_path / "other").mkdir()
        began = time.monotonic()
        names.wait_for("mine", 0.05)
        assert time.monotonic() - began >= 0.05
        (tmp_path / "mine").mkdir()
        began = time.monotonic()
        names.wait_for("mine", 30)
        assert time.monotonic() - began < 10
