"""How many jobs, how fast, and how many may wait; by tenant, topic or label."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from penstock.core.verdict import Rate


class Limit(Struct, frozen=True, kw_only=True):
    """Holds for the jobs that match; jobs with the same values of `key` share it."""

    name: str
    key: tuple[str, ...] = ()
    """`tenant`, `topic`, `label:NAME`; none means that all matching jobs share it."""
    topics: tuple[str, ...] = ()
    """Globs; any may match."""
    tenants: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    """All must be there; values are globs."""
    concurrency: int | None = None
    """How many may be with workers at once."""
    rate: Rate | None = None
    """How many may be given to workers in a time."""
    max_waiting: int | None = None
    """How many may wait; a submission beyond that is refused with TooMany."""


class LimitUse(Struct, frozen=True):
    """One key's share of a limit."""

    key: tuple[str, ...]
    running: int
    waiting: int
    blocked_until: float | None = None
    """When the rate lets the next one go, if it holds one back."""


class LimitView(Struct, frozen=True):
    limit: Limit
    uses: tuple[LimitUse, ...]
    """The keys that have jobs now, busiest first, at most a hundred."""


class LimitBook(Protocol):
    async def put(self, limit: Limit) -> LimitView:
        """Make or change one; it holds from the next dispatch on."""

    async def list(self) -> list[LimitView]: ...

    async def delete(self, name: str) -> None: ...
