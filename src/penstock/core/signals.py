"""What a job's own code raises to speak to the engine. Not errors."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.job import RetryPolicy


class Retry(Exception):
    """Raised in a job: try it again, after so many seconds (or by the job's own backoff).

    Given to a stage of a pipeline, `Retry(3)` says how often an item is tried again, and the
    other arguments say after how long and upon which errors, as `RetryPolicy` has them.
    """

    def __init__(
        self,
        message: str | int = "the job asked to be tried again",
        *,
        after: float | None = None,
        delay: float = 1.0,
        factor: float = 2.0,
        max_delay: float = 30.0,
        jitter: float = 0.5,
        on: Iterable[type[BaseException] | str] = (),
        never: Iterable[type[BaseException] | str] = (),
    ) -> None:
        retries = message if isinstance(message, int) else 0
        super().__init__(f"up to {retries} more times" if retries else message)
        self.after = after
        self.policy = RetryPolicy(
            retries,
            delay,
            factor,
            max_delay,
            jitter,
            tuple(map(_name, on)),
            tuple(map(_name, never)),
        )


class Cancelled(Exception):
    """Raised inside a job that was asked to end; letting it pass is the way to obey."""


def _name(kind: type[BaseException] | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__
