"""Lets many run together, or one alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Stay:
    """One that is inside."""

    alone = True
    """Whether nobody else was inside for any part of its stay."""


class Gate:
    """Who wants to be alone waits until those inside have left; nobody else enters meanwhile."""

    def __init__(self) -> None:
        self._inside: set[Stay] = set()
        self._door = asyncio.Lock()
        self._left = asyncio.Event()

    async def opened(self) -> None:
        """Until nobody is alone inside, or waits to be."""
        async with self._door:
            pass

    @asynccontextmanager
    async def entered(self, *, alone: bool) -> AsyncIterator[Stay]:
        stay = Stay()
        async with self._door:
            if alone:
                await self._empty()
                yield stay
                return
            self._add(stay)
        try:
            yield stay
        finally:
            self._inside.discard(stay)
            self._left.set()

    def _add(self, stay: Stay) -> None:
        if self._inside:
            stay.alone = False
            for other in self._inside:
                other.alone = False
        self._inside.add(stay)

    async def _empty(self) -> None:
        while self._inside:
            self._left.clear()
            await self._left.wait()
