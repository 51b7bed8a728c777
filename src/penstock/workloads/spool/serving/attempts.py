"""How often a job was tried in vain: `attempts.txt`, one line for each time.

It is written when a job lost its server or the engine died under it, never on the normal path.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import Unfit, read_file, replace_file

FILE = "attempts.txt"
_MOST = 1 << 20


class Loss(StrEnum):
    """Why an attempt came to nothing."""

    CRASHED = "crashed the engine"
    LOST = "lost its server"


class Attempts(Struct, frozen=True):
    """What was tried before."""

    crashed: int = 0
    lost: int = 0

    @property
    def count(self) -> int:
        return self.crashed + self.lost

    @property
    def is_suspect(self) -> bool:
        """Whether it is to run alone, so that what it may break is nobody else's."""
        return self.crashed > 0 or self.lost > 1

    @property
    def reason(self) -> str:
        """Why it is not tried again, as a sentence's end."""
        if not self.lost:
            return f"crashed the engine {_times(self.crashed)}"
        if not self.crashed:
            return f"lost its server {_times(self.lost)}"
        return f"crashed the engine {_times(self.crashed)} and lost its server {_times(self.lost)}"


def read_attempts(folder: Path) -> Attempts:
    """What its file tells; one that can't be read is no file."""
    try:
        lines = read_file(folder / FILE, _MOST).decode(errors="replace").splitlines()
    except (OSError, Unfit):
        return Attempts()
    crashed = sum(line == Loss.CRASHED for line in lines)
    return Attempts(crashed, len(lines) - crashed)


def count_attempt(folder: Path, loss: Loss, sync: Sync) -> Attempts:
    """One more, durably; returns all so far."""
    before = read_attempts(folder)
    crashed, lost = before.crashed, before.lost
    after = Attempts(crashed + (loss is Loss.CRASHED), lost + (loss is Loss.LOST))
    lines = [Loss.CRASHED] * after.crashed + [Loss.LOST] * after.lost
    replace_file(folder, FILE, ("\n".join(lines) + "\n").encode(), sync)
    return after


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
