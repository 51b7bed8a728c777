"""Waiting with a time limit, and for a job's stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Late(Exception):
    """It took too long."""


class Stopped(Exception):
    """The job's end was asked for."""


async def done_within(seconds: float, *futures: asyncio.Future[Any]) -> bool:
    """Wait until one of them is done; False if none is by then. They go on."""
    done, _ = await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """What it returns; raises Late, and then nothing of it goes on."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise Late from None
        raise


async def drop(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel them, and see them end; what they had to say is of no interest."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    if there:
        await asyncio.gather(*there, return_exceptions=True)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Do all of it, also when that is cancelled meanwhile; the cancel counts afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Also when that is cancelled the thread has ended when this returns."""
    return await to_its_end(asyncio.to_thread(call, *args, **kwargs))


async def in_thread_if(
    takes_long: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What takes no longer than the way to a thread and back is done here."""
    return await in_thread(call, *args, **kwargs) if takes_long else call(*args, **kwargs)


class StopRequest:
    """Whether the end of a run was asked for, and why; of one event loop."""

    def __init__(self) -> None:
        self.reason = ""
        self._asked = asyncio.Event()

    @property
    def requested(self) -> bool:
        return self._asked.is_set()

    def request(self, reason: str) -> None:
        """The first reason counts."""
        self.reason = self.reason or reason or "cancelled"
        self._asked.set()

    async def wait(self) -> None:
        await self._asked.wait()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """What it returns; raises Stopped when the end is asked for, and nothing of it goes on."""
        if self.requested:
            work.close()
            raise Stopped
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Stopped
        finally:
            await drop(task, asked)
