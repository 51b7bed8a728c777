"""The jobs that a node has open, with the pipe of each."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.workloads.pipes.job import Job
    from penstock.workloads.pipes.pipe import Pipe


class JobTable:
    """The event loop lets in and out, the thread that computes looks up."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[Job, Pipe]] = {}
        self._lock = threading.Lock()

    def add(self, job: Job, pipe: Pipe) -> None:
        """Raises KeyError if its id is taken."""
        with self._lock:
            if job.job_id in self._open:
                raise KeyError(f"job {job.job_id.hex()} is open already")
            self._open[job.job_id] = (job, pipe)

    def get(self, job_id: bytes) -> Job | None:
        found = self._open.get(job_id)
        return found[0] if found is not None else None

    def find(self, job_id: bytes) -> tuple[Job | None, Pipe | None]:
        """The job and its pipe, or neither."""
        return self._open.get(job_id) or (None, None)

    def remove(self, job_id: bytes) -> Job | None:
        """The job, if it was there: who gets it has to see to its end."""
        with self._lock:
            found = self._open.pop(job_id, None)
        return found[0] if found is not None else None

    def of_origin(self, node_id: str) -> list[Job]:
        return [job for job in self.all() if job.origin_node_id == node_id]

    def all(self) -> list[Job]:
        with self._lock:
            return [job for job, _ in self._open.values()]

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._open

    def __len__(self) -> int:
        return len(self._open)
