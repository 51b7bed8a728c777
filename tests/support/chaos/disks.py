"""Disks of a test's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

import pytest

_CGROUPS = Path("/sys/fs/cgroup")


def mount(*words: str) -> None:
    """Without the right to, the test is skipped, and in CI it fails."""
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        _can_not(f"a small disk needs the right to mount one: {done.stderr.strip()}")


def _can_not(message: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def tmpfs(disk: Path, options: str) -> Iterator[Path]:
    disk.mkdir()
    mount("-t", "tmpfs", "-o", options, "tmpfs", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@contextmanager
def slow_writes(folder: Path, pid: int, a_second: int) -> Iterator[None]:
    """Let the disk that has `folder` take so few writes a second of a process and its children.

    The kernel's block layer delays them (a control group of block devices, version 1 or 2): a
    flush returns when all of its writes are done, so each lasts seconds, as on a disk that dies.
    """
    disk = _disk_of(folder)
    if (_CGROUPS / "blkio").is_dir():
        parent, limit = _CGROUPS / "blkio", f"{disk} {a_second}"
        file = "blkio.throttle.write_iops_device"
    else:
        parent, limit, file = _CGROUPS, f"{disk} wiops={a_second}", "io.max"
    group = parent / f"penstock-{token_hex(4)}"
    try:
        if parent is _CGROUPS:
            (parent / "cgroup.subtree_control").write_text("+io")
        group.mkdir()
        (group / file).write_text(limit)
    except OSError as error:
        _can_not(f"a slow disk needs the right to make a control group: {error}")
    try:
        _move(pid, group)
        yield
    finally:
        _move(pid, parent)
        group.rmdir()


def _disk_of(folder: Path) -> str:
    """The numbers of the whole disk: a part of one can't be limited."""
    device = folder.stat().st_dev
    found = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if not found.is_dir():
        _can_not(f"{folder} is on no disk that can be made slow")
    whole = found.parent if (found / "partition").exists() else found
    return (whole / "dev").read_text().strip()


def _move(pid: int, group: Path) -> None:
    """A process, and all that it started and goes on to start."""
    todo = [pid]
    while todo:
        one = todo.pop()
        with suppress(OSError):  # it ended while we looked
            (group / "cgroup.procs").write_text(str(one))
            todo += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
