"""What a job's own code raises to speak to the engine. Not errors."""

from __future__ import annotations


class Retry(Exception):
    """Ask to be tried again, after so many seconds (or by the job's own backoff)."""

    def __init__(
        self,
        message: str = "the job asked to be tried again",
        *,
        after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.after = after


class Cancelled(Exception):
    """Raised inside a job that was asked to end; letting it pass is the way to obey."""
