"""Who waits for a file or for a process: told by the kernel, nothing is polled."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path

_CLOSE_WRITE, _MOVED_TO = 0x08, 0x80
_HEAD = struct.Struct("iIII")


class Watch:
    """Files that are complete in some folders: written and closed, or moved there."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._heard: dict[int, Callable[[str], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def add(self, folder: Path, heard: Callable[[str], None]) -> int:
        """From now on `heard` gets the name of each file. Returns what `forget` takes."""
        watch: int = self._libc.inotify_add_watch(
            self._fd, os.fsencode(folder), _CLOSE_WRITE | _MOVED_TO
        )
        if watch < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
        self._heard[watch] = heard
        return watch

    def forget(self, watch: int) -> None:
        """For a folder that will be deleted: the kernel drops its watch then, and to ask for
        it beforehand takes milliseconds."""
        self._heard.pop(watch, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
            at = 0
            while at < len(data):
                watch, _, _, length = _HEAD.unpack_from(data, at)
                name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
                at += _HEAD.size + length
                if heard := self._heard.get(watch):
                    heard(os.fsdecode(name))


async def process_end(fd: int, timeout: float | None = None) -> bool:
    """Until the process of this pidfd has ended; False if it has not within the time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(timeout):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True
