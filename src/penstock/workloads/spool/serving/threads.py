"""File work off the event loop: a flush may take long, and several share one commit of the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few threads, handed in to whoever reads and writes."""

    def __init__(self, most: int) -> None:
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="spool")

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Its result. When cancelled it waits for the end first, so that what is being written
        is never touched by two."""
        future = asyncio.wrap_future(self._threads.submit(work, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await _end_of(future)
            future.exception()  # whoever cancelled does not want to know
            raise

    async def see_through(self, work: Callable[[], T]) -> T:
        """Its result, even if it was cancelled meanwhile; that is told only if it failed."""
        future = asyncio.wrap_future(self._threads.submit(work))
        cancelled = await _end_of(future)
        if cancelled and (error := future.exception()) is not None:
            raise asyncio.CancelledError from error
        return future.result()

    def close(self) -> None:
        self._threads.shutdown(wait=True)


async def _end_of(future: asyncio.Future[T]) -> bool:
    """Waits for it, however often one is cancelled; whether one was."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
