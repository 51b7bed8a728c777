"""One job that a server has."""

from __future__ import annotations

import asyncio
from enum import Enum
from pathlib import Path

from penstock.workloads.spool.meta import Meta
from penstock.workloads.spool.serving.attempts import Attempts


class Why(Enum):
    """Why a job is ended from outside."""

    STOP = "the server stops"
    CANCELLED = "cancelled"
    GONE = "its folder was moved or deleted"


class Running:
    """From its claim to its end. What is cancelled first says why."""

    def __init__(self, folder: Path, folder_id: int, since: float) -> None:
        self.job_id, self.since = folder.name, since
        self.folder = folder
        """In `processing`."""
        self.folder_id = folder_id
        """The inode of its folder: another folder under its name is another job."""
        self.why: Why | None = None
        self.reason = ""
        """What was said about a cancellation."""
        self.ended = False
        """Whether its folder has left `processing`."""
        self.task: asyncio.Task[None] | None = None
        self.meta: Meta | None = None
        """As it was read; None if it could not be."""
        self.model = ""
        """The model that it names, or the default one."""
        self.facts: dict[str, str] = {}
        """What is known of it for its metadata, however it ends."""
        self.suspect = False
        """Whether it was known to be one when it was claimed."""
        self.attempts = Attempts()
        """Those before this one."""
        self.lost: Attempts | None = None
        """With this one, once it is counted as lost."""

    def end(self, why: Why, reason: str = "") -> None:
        if self.why is None and self.task is not None and not self.task.done():
            self.why, self.reason = why, reason
            # Not before its first step: a task that never ran can't clean up.
            asyncio.get_running_loop().call_soon(self.task.cancel)
