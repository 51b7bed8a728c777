"""Threads for plain functions.

Made for a cheap hand-over: work goes out through a SimpleQueue, and whatever has ended
by the time the event loop looks is collected in one call. Everything but `_serve` runs
in the loop's thread, so no lock is needed.

A thread can't be killed. What runs in one is asked to end, through its Context, and
waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """One piece of work, and the future of its end."""

    __slots__ = ("_ticket", "context", "done", "end", "left", "settled", "work")

    def __init__(self, work: Callable[[], T], done: asyncio.Future[T]) -> None:
        self.work = work
        self.done = done
        self.context = copy_context()
        self.end: T | BaseException | None = None
        self.settled = False
        self.left = False
        """It is abandoned, and its thread does not count."""
        self._ticket = [None]

    def claim(self) -> bool:
        """Take the right to run it, or to drop it. True once, for the first caller."""
        try:
            self._ticket.pop()
        except IndexError:
            return False
        return True

    def run(self) -> None:
        try:
            self.end = self.context.run(self.work)
        except BaseException as error:
            self.end = error

    def settle(self) -> None:
        self.settled = True
        if self.done.done():
            return  # the waiter was cancelled
        if isinstance(self.end, BaseException):
            self.done.set_exception(self.end)
        else:
            self.done.set_result(self.end)  # type: ignore[arg-type]

    async def outlast(self) -> None:
        """Wait for its end after `done` was cancelled."""
        if not self.settled and self.done.done():
            self.done = self.done.get_loop().create_future()
        await asyncio.wait((self.done,))


class ThreadPool(Generic[T]):
    """Up to `size` daemon threads, started when they are first needed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._loop = asyncio.get_running_loop()
        self._waiting: SimpleQueue[Call[T] | None] = SimpleQueue()
        self._ended: deque[Call[T]] = deque()
        self._threads: list[threading.Thread] = []
        self._busy = 0
        self._woken = False

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Have `work` done in a thread, with the caller's context variables."""
        call = Call(work, self._loop.create_future())
        self._busy += 1
        if self._busy > len(self._threads) < self._size:
            self._start()
        self._waiting.put(call)
        return call

    def drop(self, call: Call[T]) -> bool:
        """Take back work that no thread has begun."""
        if not call.claim():
            return False
        call.done.cancel()
        return True

    def leave(self, call: Call[T]) -> None:
        """Count the thread of a call that does not end no more, so that others have room."""
        if not call.settled and not call.left:
            call.left = True
            self._size += 1

    def lend(self, count: int) -> None:
        """Have more, or fewer again: threads that wait for the work of others don't count."""
        self._size += count
        if self._busy > len(self._threads) < self._size:
            self._start()

    def grow_to(self, size: int) -> None:
        """Have at least this many threads."""
        self._size = max(self._size, size)

    async def close(self, patience: float) -> None:
        """End the threads. One that is still at work after `patience` is left to itself."""
        for _ in self._threads:
            self._waiting.put(None)
        until = self._loop.time() + patience
        while any(thread.is_alive() for thread in self._threads):
            if self._loop.time() > until:
                break
            await asyncio.sleep(0.001)
        self._threads.clear()

    def _start(self) -> None:
        name = f"penstock-function-{len(self._threads) + 1}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        while (call := self._waiting.get()) is not None:
            if call.claim():
                call.run()
            self._ended.append(call)
            # Set before the loop is called and cleared before it looks, so an end that
            # finds it set will be seen by the look that is still to come.
            if not self._woken:
                self._woken = True
                try:
                    self._loop.call_soon_threadsafe(self._collect)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more
            del call

    def _collect(self) -> None:
        self._woken = False
        while self._ended:
            self._busy -= 1
            call = self._ended.popleft()
            self._size -= call.left
            call.settle()
