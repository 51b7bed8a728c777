"""Whose container is whose, when several processes on a machine run container jobs.

Each holds a lock file named by its owner id for as long as it lives, however it ends. A lock
that nobody holds tells of an owner that is gone: its containers and folders are nobody's.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from penstock.workloads.container.engine import OWNER_LABEL, Engine

_LOCK = ".lock"


class Owners:
    """The owners that work below one folder; this process is one of them from `enter` on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: TextIO | None = None
        self.me = f"w-{secrets.token_hex(8)}"

    def enter(self) -> Path:
        """Hold this owner's lock; returns a folder of its own."""
        mine = self._folder / self.me
        mine.mkdir(parents=True, mode=0o700)
        # Whoever sweeps takes a lock that nobody holds for that of one who died: it gets its
        # name only when it is held.
        new = self._folder / f".{self.me}"
        self._held = open(new, "w")  # noqa: SIM115 held for life
        fcntl.flock(self._held, fcntl.LOCK_EX)
        new.rename(self._folder / f"{self.me}{_LOCK}")
        return mine

    def leave(self) -> None:
        """Call it when nothing of this owner is left."""
        if self._held is not None:
            shutil.rmtree(self._folder / self.me, ignore_errors=True)
            (self._folder / f"{self.me}{_LOCK}").unlink(missing_ok=True)
            self._held.close()
            self._held = None

    async def sweep(self, engine: Engine) -> list[str]:
        """Remove what owners that are gone have left behind; returns the containers' names."""
        swept: list[str] = []
        for lock in sorted(self._folder.glob(f"w-*{_LOCK}")):
            with _taken_over(lock) as free:
                if not free:
                    continue
                gone = lock.name.removesuffix(_LOCK)
                for found in await engine.find({OWNER_LABEL: gone}):
                    await engine.remove(found.name)
                    swept.append(found.name)
                shutil.rmtree(self._folder / gone, ignore_errors=True)
                os.unlink(lock)
        return swept


@contextmanager
def _taken_over(lock: Path) -> Iterator[bool]:
    """Hold the lock of an owner that is gone; False if it isn't."""
    try:
        file = open(lock)  # noqa: SIM115 closed below
    except FileNotFoundError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
