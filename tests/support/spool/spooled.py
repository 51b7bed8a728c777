"""A workspace to test with, and jobs in it in any state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.lifecycles.spool import Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.client.work import Work
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.workspace import Workspace


class StoppedClock(Clock):
    """Stands still until it is told otherwise."""

    def __init__(self, now: float = 1736700000.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds


def new_workspace(folder: Path, sync: Sync = Sync.NONE) -> Workspace:
    workspace = Workspace(folder / "w", sync)
    workspace.create()
    return workspace


def queued(workspace: Workspace, prompt: str = "a prompt") -> str:
    return Work(workspace).submit(prompt)


def put(
    workspace: Workspace,
    status: Status,
    job_id: str,
    files: Mapping[str, bytes | str] | None = None,
) -> Path:
    """A job with these files, made by hand."""
    folder = workspace.of(status, job_id)
    folder.mkdir()
    for name, data in (files or {"prompt.txt": "a prompt"}).items():
        folder.joinpath(name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
