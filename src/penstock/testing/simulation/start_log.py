"""Start logs on the one machine of the simulation; they outlive workers and engines."""

from __future__ import annotations


class SimStartLogs:
    """The engine's side, and what all logs hold."""

    def __init__(self) -> None:
        self.folder = "starts"
        self.begun: set[tuple[str, int]] = set()
        self.revoked: set[tuple[str, int]] = set()

    def revoke(self, job_id: str, attempt: int) -> bool:
        self.revoked.add((job_id, attempt))
        return (job_id, attempt) not in self.begun


class SimStartLog:
    """One worker's side."""

    def __init__(self, starts: SimStartLogs) -> None:
        self._starts = starts

    def begin(self, job_id: str, attempt: int) -> bool:
        if (job_id, attempt) in self._starts.revoked:
            return False
        self._starts.begun.add((job_id, attempt))
        return True

    def close(self, *, keep: bool) -> None:
        pass
