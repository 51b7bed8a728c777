"""Which tenant's prompts the slots of an engine hold, so that no tenant reuses another's.

A slot keeps the prompt that it computed last, and a later prompt that begins alike is answered
faster. Both the time and `cached_tokens` would tell one tenant what another has asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any


class Slots:
    """While only one tenant asks, llama.cpp chooses its slots itself. As soon as there is a second
    one, each answer gets its slot from here."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        """The one that was used last comes last."""
        self._room = asyncio.Semaphore(count)
        self._owners: dict[int, str] = {}
        self._first: str | None = None
        self._unassigned = 0
        self._assigned = asyncio.Event()
        """There is no answer any more for which llama.cpp has chosen the slot."""
        self._assigned.set()
        self._has_several = False

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[dict[str, Any]]:
        """The fields of a request that say which slot it uses, and whether what the slot holds."""
        if self._first is None:
            self._first = tenant
        if tenant != self._first and not self._has_several:
            self._has_several = True
            self._owners = dict.fromkeys(self._free, self._first)
        if not self._has_several:
            self._unassigned += 1
            self._assigned.clear()
            try:
                yield {"cache_prompt": True}
            finally:
                self._unassigned -= 1
                if not self._unassigned:
                    self._assigned.set()
            return
        await self._assigned.wait()
        async with self._room:
            slot = self._choose(tenant)
            is_own = self._owners.get(slot) == tenant
            self._owners[slot] = tenant
            try:
                yield {"cache_prompt": is_own, "id_slot": slot}
            finally:
                self._free.append(slot)

    def _choose(self, tenant: str) -> int:
        """The tenant's own that was used last, else the one that was used longest ago."""
        own = [slot for slot in self._free if self._owners.get(slot) == tenant]
        slot = own[-1] if own else self._free[0]
        self._free.remove(slot)
        return slot
