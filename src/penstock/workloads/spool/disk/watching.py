"""Who waits for a name to appear in a folder is told by the kernel, where it tells.

It may not: another system, a limit on watches, a file system of another machine. So whoever
watches looks for himself now and then too, more often if `is_live` is False.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_MOVED_TO, _CREATE = 0x80, 0x100
_ONLY_FOLDERS = 0x01000000
_OVERFLOW, _IGNORED = 0x4000, 0x8000
_HEAD = struct.Struct("iIII")
NOT_WATCHED = -1


class _Events:
    """Names that were made in, or moved to, some folders."""

    def __init__(self) -> None:
        libc = _libc()
        self.fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK) if libc else NOT_WATCHED
        self.is_live = self.fd >= 0

    def add(self, folder: Path) -> int:
        if self.fd < 0:
            return NOT_WATCHED
        mask = ctypes.c_uint32(_MOVED_TO | _CREATE | _ONLY_FOLDERS)
        number: int = _libc().inotify_add_watch(self.fd, os.fsencode(folder), mask)
        self.is_live = self.is_live and number >= 0
        return number

    def read(self) -> Iterator[tuple[int, str | None]]:
        """What has happened: the number of a folder and a name in it. A name of None means that
        events were lost, or that the folder is gone."""
        with suppress(BlockingIOError):
            data = os.read(self.fd, 1 << 16)
            at = 0
            while at < len(data):
                number, mask, _, length = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                name = data[at : at + length].rstrip(b"\0")
                at += length
                yield number, None if mask & (_OVERFLOW | _IGNORED) else os.fsdecode(name)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = NOT_WATCHED


class FolderWatch:
    """For the running event loop: calls back with each name."""

    def __init__(self, overflowed: Callable[[], None] | None = None) -> None:
        """`overflowed` is called when something may have been missed: look for yourself."""
        self.overflowed = overflowed
        self._heard: dict[int, Callable[[str], None]] = {}
        self._events = _Events()
        self._loop = asyncio.get_running_loop()
        if self._events.is_live:
            self._loop.add_reader(self._events.fd, self._read)

    @property
    def is_live(self) -> bool:
        """Whether every folder that was added is watched."""
        return self._events.is_live

    def add(self, folder: Path, on_name: Callable[[str], None]) -> int:
        """Returns its number, NOT_WATCHED if it can't be watched."""
        number = self._events.add(folder)
        if number >= 0:
            self._heard[number] = on_name
        return number

    def close(self) -> None:
        if self._events.fd >= 0:
            self._loop.remove_reader(self._events.fd)
        self._events.close()

    def _read(self) -> None:
        for number, name in self._events.read():
            if name is None:
                if self.overflowed is not None:
                    self.overflowed()
            elif heard := self._heard.get(number):
                heard(name)


class Names:
    """For a program without an event loop. Open it, look, then wait: nothing falls between."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._events = _Events()
        for folder in folders:
            self._events.add(folder)

    @property
    def is_live(self) -> bool:
        return self._events.is_live

    def wait(self, timeout: float) -> set[str]:
        """The names since the last call, after `timeout` seconds at most; maybe none."""
        return {name for name in self._heard(timeout) if name is not None}

    def wait_for(self, name: str, timeout: float) -> None:
        """Until this name comes, or `timeout` seconds are over; other names don't count."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0 and not {name, None} & self._heard(left):
            pass

    def _heard(self, timeout: float) -> set[str | None]:
        ready = [self._events.fd] if self._events.is_live else []
        select.select(ready, [], [], max(0.0, timeout))
        return {name for _, name in self._events.read()} if ready else set()

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> Names:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@cache
def _libc() -> Any:
    """None where the system has no inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "inotify_init1") else None
