"""`.nrvnad.pid`: scripts take it for the sign that the model is loaded.

The original writes it and reads it nowhere; to us it also tells that an original server is at
work, whose jobs carry no claims.
"""

from __future__ import annotations

import os
from pathlib import Path

NAME = ".nrvnad.pid"
_PROGRAM = "nrvnad"


def write_pid(workspace: Path) -> None:
    """Unless an original server has its own there, by which we know that its jobs are its."""
    if original_runs(workspace):
        return
    new = workspace / f"{NAME}.{os.getpid()}.tmp"
    new.write_text(str(os.getpid()))
    os.replace(new, workspace / NAME)


def remove_pid(workspace: Path) -> None:
    """Unless another server has written its own meanwhile."""
    if _pid(workspace) == os.getpid():
        (workspace / NAME).unlink(missing_ok=True)


def original_runs(workspace: Path) -> bool:
    """Whether the pid is that of a living program by the original's name."""
    pid = _pid(workspace)
    if pid is None or pid == os.getpid():
        return False
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == _PROGRAM
    except OSError:
        return False


def _pid(workspace: Path) -> int | None:
    try:
        return int((workspace / NAME).read_bytes()[:32])
    except (OSError, ValueError):
        return None
