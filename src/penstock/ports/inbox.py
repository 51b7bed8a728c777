"""Jobs that wait outside the engine, put there by somebody else's transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct


class InboxRow(Struct, frozen=True):
    number: int
    job_id: str
    topic: str
    tenant: str
    input: bytes | None
    """JSON."""
    options: dict[str, Any]
    """Fields of a JobRequest."""
    user: str
    """Who submitted it, as the database knows them."""


class Inbox(Protocol):
    """All but `wait` and `close` raise StoreFailed if the storage fails."""

    async def wait(self) -> None:
        """Until a row may have come."""

    async def read(self, limit: int) -> list[InboxRow]:
        """The oldest rows that were not refused."""

    async def remove(self, numbers: Sequence[int]) -> None: ...

    async def refuse(self, number: int, problem: str) -> None:
        """Leave the row there, with what is wrong with it."""

    async def close(self) -> None: ...
