"""A Context that remembers: for tests of executors and of job functions.

ctx = RecordingContext()
assert shout(ctx, "hello") == "HELLO!"
assert ctx.logged("info") == ["shouting"]
"""

from __future__ import annotations

import threading
import time

from penstock.core.job import JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import World
from penstock.ports.token import Token


class RecordingContext:
    """Keeps what a job reports, and lets a test wait for it."""

    def __init__(
        self,
        request: JobRequest | None = None,
        *,
        attempt: int = 1,
        timeout: float = 60.0,
        world: World | None = None,
    ) -> None:
        self.request = request or JobRequest(job_id="a-job", topic="job.test")
        self.job_id = self.request.job_id
        self.attempt = attempt
        self.cancel = Token()
        self.ended_as = JobState.CANCELLED
        self.world = world
        self.progressed: list[tuple[float | None, str]] = []
        self.lines: list[tuple[str, str]] = []
        """(level, text) of every line."""
        self.streamed: list[str] = []
        self._until = time.monotonic() + timeout
        self._reported = threading.Condition()

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        with self._reported:
            self.progressed.append((fraction, message))
            self._reported.notify_all()

    def log(self, text: str, level: str = "info") -> None:
        with self._reported:
            self.lines.append((level, text))
            self._reported.notify_all()

    def stream(self, text: str) -> None:
        with self._reported:
            self.streamed.append(text)
            self._reported.notify_all()

    def remaining(self) -> float:
        return self._until - time.monotonic()

    def logged(self, level: str) -> list[str]:
        """The lines of one level."""
        return [text for at, text in list(self.lines) if at == level]

    def wait_for_progress(self, message: str, timeout: float = 30.0) -> bool:
        """Block a thread until the job has reported this message."""

        def reported() -> bool:
            return any(said == message for _, said in self.progressed)

        with self._reported:
            return self._reported.wait_for(reported, timeout)
