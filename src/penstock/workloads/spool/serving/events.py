"""What a server tells whoever watches it."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct


class Happened(StrEnum):
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"
    REQUEUED = "requeued"
    """It goes back to the queue: the server stops, or the engine died."""
    LET_GO = "let go"
    """Somebody else took its folder away."""


class Event(Struct, frozen=True, kw_only=True):
    """One thing that happened to one job."""

    at: float
    what: Happened
    job_id: str
    seconds: float = 0.0
    """Since it was claimed."""
    tokens: int = 0
    """Of the answer."""
    code: str = ""
    """Why it failed, for programs."""
    reason: str = ""
    """Why it failed or was given back, in a sentence."""


Tell = Callable[[Event], None]


class Counts(Struct, kw_only=True):
    """What a server did since it started."""

    claimed: int = 0
    done: int = 0
    failed: int = 0
    requeued: int = 0
    let_go: int = 0
    tokens: int = 0

    def add(self, event: Event) -> None:
        match event.what:
            case Happened.CLAIMED:
                self.claimed += 1
            case Happened.DONE:
                self.done += 1
            case Happened.FAILED:
                self.failed += 1
            case Happened.REQUEUED:
                self.requeued += 1
            case Happened.LET_GO:
                self.let_go += 1
        self.tokens += event.tokens
