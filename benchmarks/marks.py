"""Marks: how executions are counted without asking the engine that ran them.

Every job body appends one mark to a file in shared memory: the number it was sent with, the
time, and the process. The clock is the same in all processes of a machine.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from array import array
from pathlib import Path

_VARIABLE = "BENCH_MARKS"
_MARK = struct.Struct("<qqq")
_file: int | None = None
_pid = 0


def mark(sent: int = 0) -> None:
    """Called by a job's body."""
    global _file, _pid
    if _file is None:
        _pid = os.getpid()
        _file = os.open(os.environ[_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(_file, _MARK.pack(sent, time.monotonic_ns(), _pid))


class Marks:
    """The marks of one measurement, read from outside."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def given(cls) -> Marks:
        """Those of the measurement that this process takes part in."""
        return cls(Path(os.environ[_VARIABLE]))

    @classmethod
    def fresh(cls) -> Marks:
        shared = Path("/dev/shm")
        folder = shared if shared.is_dir() else None
        handle, name = tempfile.mkstemp(prefix="penstock-marks-", dir=folder)
        os.close(handle)
        return cls(Path(name))

    @property
    def environment(self) -> dict[str, str]:
        return {_VARIABLE: str(self.path)}

    def count(self) -> int:
        return self.path.stat().st_size // _MARK.size

    def clear(self) -> None:
        os.truncate(self.path, 0)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    def sent(self) -> array[int]:
        """The numbers that the executed jobs were sent with, in order of execution."""
        return self._read()[0::3]

    def delays(self) -> list[float]:
        """Seconds from the time that a job carried to its execution."""
        numbers = self._read()
        return [(at - sent) / 1e9 for sent, at in zip(numbers[0::3], numbers[1::3], strict=True)]

    def processes(self) -> int:
        """How many processes have executed something."""
        return len(set(self._read()[2::3]))

    def since_all_worked(self) -> tuple[int, int]:
        """How many marks there are since every process had made one, and when that was.

        If most were made before, one process did nearly all: then since the first mark.
        """
        numbers = self._read()
        times, pids = numbers[1::3], numbers[2::3]
        first: dict[int, int] = {}
        for at, pid in zip(times, pids, strict=True):
            first.setdefault(pid, at)
        for begin in (max(first.values()), min(first.values())):
            later = sum(at > begin for at in times)
            if later * 2 > len(times):
                break
        return later, begin

    def last(self) -> int:
        """When the last job was executed, in nanoseconds of the monotonic clock."""
        return max(self._read()[1::3])

    def _read(self) -> array[int]:
        numbers = array("q")
        numbers.frombytes(self.path.read_bytes()[: self.count() * _MARK.size])
        return numbers
