"""Ends running jobs that somebody wants cancelled: tools leave a note for it."""

from __future__ import annotations

import os
from contextlib import suppress

from penstock.core.errors import PenstockError
from penstock.workloads.spool.disk import read_file
from penstock.workloads.spool.serving.running import Running, Why
from penstock.workloads.spool.workspace import Workspace

NOTES = "cancel"
_MOST = 4096


class Cancelling:
    """Notes are small and few; they are read where they are found."""

    def __init__(self, workspace: Workspace, running: dict[str, Running]) -> None:
        self.folder = workspace.private / NOTES
        self._running = running

    def came(self, name: str) -> None:
        """A note has appeared."""
        running = self._running.get(name)
        if running is not None and not running.ended:
            running.end(Why.CANCELLED, self._reason(name))

    def look(self) -> None:
        """All notes, in case one was missed."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                self.came(name)

    def check(self, job_id: str) -> None:
        """The note may have been there before the job was claimed."""
        if os.path.lexists(self.folder / job_id):
            self.came(job_id)

    def over(self, job_id: str) -> None:
        with suppress(OSError):
            os.unlink(self.folder / job_id)

    def _reason(self, name: str) -> str:
        try:
            return read_file(self.folder / name, _MOST).decode(errors="replace").strip()
        except (OSError, PenstockError):
            return ""
