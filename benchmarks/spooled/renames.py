"""The bare loop: the same files, flushes and renames as a spooled job, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDERS = ("input/writing", "input/ready", "processing", "output")
PROMPT, META, RESULT = b"Hello.", b"{}" * 100, b"HELLO."


def rate(folder: Path, count: int, *, sync: bool) -> float:
    """Jobs a second, one after another."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    writing, ready, processing, output = (str(folder / name) for name in FOLDERS)
    begun = time.perf_counter()
    for n in range(count):
        place = f"{writing}/{n}"
        os.mkdir(place)
        _write(f"{place}/prompt.txt", PROMPT, sync)
        _write(f"{place}/meta.json", META, sync)
        _flush(place, sync)
        os.rename(place, f"{ready}/{n}")
        _flush(ready, sync)
        os.rename(f"{ready}/{n}", f"{processing}/{n}")
        place = f"{processing}/{n}"
        _replace(f"{place}/result.txt", RESULT, sync)
        _replace(f"{place}/meta.json", META, sync)
        _flush(place, sync)
        os.rename(place, f"{output}/{n}")
        _flush(output, sync)
    return count / (time.perf_counter() - begun)


def _write(path: str, data: bytes, sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    os.close(fd)


def _replace(path: str, data: bytes, sync: bool) -> None:
    _write(f"{path}.tmp", data, sync)
    os.rename(f"{path}.tmp", path)


def _flush(folder: str, sync: bool) -> None:
    if sync:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(fd)
        os.close(fd)
