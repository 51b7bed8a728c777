"""The engine's side of `penstock.ports.shared_state`: values are facts of the ledger."""

from __future__ import annotations

import asyncio

from penstock.control.ledger import Ledger
from penstock.core.errors import InvalidRequest, TooLarge
from penstock.ports.shared_state import MAX_NAME, MAX_VALUE

PREFIX = "shared:"
"""How the names begin that the ledger keeps shared values under."""


class FactState:
    """Shared values in one ledger, whose owner is the only one that writes them."""

    def __init__(self, store: Ledger) -> None:
        self._store = store
        self._writing = asyncio.Lock()

    async def read(self, name: str) -> bytes | None:
        return await self._store.recall(PREFIX + name)

    async def read_all(self, prefix: str) -> dict[str, bytes]:
        found = await self._store.recall_all(PREFIX + prefix)
        return {name.removeprefix(PREFIX): value for name, value in found.items()}

    async def write(self, name: str, value: bytes | None) -> None:
        async with self._writing:
            await self._write(name, value)

    async def replace(self, name: str, before: bytes | None, value: bytes) -> bool:
        async with self._writing:
            if await self.read(name) != before:
                return False
            await self._write(name, value)
            return True

    async def _write(self, name: str, value: bytes | None) -> None:
        if not 0 < len(name) <= MAX_NAME:
            raise InvalidRequest("name", f"must have 1 to {MAX_NAME} characters")
        if value is None:
            await self._store.forget(PREFIX + name)
            return
        if len(value) > MAX_VALUE:
            raise TooLarge("value", f"has {len(value)} bytes; a shared value may have {MAX_VALUE}")
        await self._store.remember(PREFIX + name, value)
