"""What can be wrong with a feed.

FeedError            it could not be read this time; worth another try
├── BadFeed          another try would give the same
└── SlowFeed         it took longer than it may
"""

from __future__ import annotations

from penstock.core.errors import PenstockError

_TRY_AGAIN = frozenset({408, 425, 429})


class FeedError(PenstockError):
    """`status` and `retry_after` are what the server said, if it said anything."""

    code = "FEED"

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.retry_after = retry_after
        """As the header has it: seconds, or a date."""


class BadFeed(FeedError, ValueError):
    code = "BAD_FEED"


class SlowFeed(FeedError, TimeoutError):
    code = "SLOW_FEED"


def answered(shown: str, status: int, retry_after: str | None) -> FeedError:
    kind = FeedError if status >= 500 or status in _TRY_AGAIN else BadFeed
    return kind(f"{shown} answered {status}", status=status, retry_after=retry_after)


class CorpusMissing(PenstockError, LookupError):
    """The package with the public corpus is not there."""

    code = "CORPUS_MISSING"
