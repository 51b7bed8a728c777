"""Disks of a test's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(*words: str) -> None:
    """Without the right to, the test is skipped, and in CI it fails."""
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        message = f"a small disk needs the right to mount one: {done.stderr.strip()}"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


@contextmanager
def tmpfs(disk: Path, options: str) -> Iterator[Path]:
    disk.mkdir()
    mount("-t", "tmpfs", "-o", options, "tmpfs", str(disk))
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
