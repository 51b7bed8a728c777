"""Small named values that all workers share, kept by the engine.

For what is neither a job's nor a worker's: the state of circuit breakers, definitions of
pipelines, what a pipeline remembers from one run to the next.
"""

from __future__ import annotations

from typing import Protocol

MAX_NAME = 300
MAX_VALUE = 1 << 20
"""Bytes."""


class SharedState(Protocol):
    async def read(self, name: str) -> bytes | None: ...

    async def read_all(self, prefix: str) -> dict[str, bytes]:
        """Every value whose name begins so, by name."""

    async def write(self, name: str, value: bytes | None) -> None:
        """Keep a value; None drops it. Raises InvalidRequest or TooLarge."""

    async def replace(self, name: str, before: bytes | None, value: bytes) -> bool:
        """Keep a value if the present one is still `before` (None: there is none)."""
