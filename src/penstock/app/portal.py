"""One event loop, many callers: coroutines inside, a thin blocking front outside."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.core.errors import Unavailable

T = TypeVar("T")


class Portal:
    """Runs coroutines on a loop, from other threads or from other loops."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: dict[object, asyncio.Task[Any]] = {}
        self._failure: Unavailable | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until it is done."""
        if _running_loop() is self.loop:
            work.close()
            raise RuntimeError(
                "this would block the engine's own event loop:"
                " use the async twin (asubmit, aresult, …) here"
            )
        return asyncio.run_coroutine_threadsafe(self._call(work), self.loop).result()

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """Await it, on whichever loop it lives."""
        if asyncio.get_running_loop() is self.loop:
            return await self._call(work)
        calling = asyncio.run_coroutine_threadsafe(self._call(work), self.loop)
        return await asyncio.wrap_future(calling)

    def fail(self, failure: Unavailable) -> None:
        """Let every call raise this: those under way, and those to come."""
        self._failure = failure
        for task in self._calls.values():
            task.cancel()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if (failure := self._failure) is not None:
            work.close()
            raise _again(failure)
        task, call = asyncio.current_task(), object()
        assert task is not None
        self._calls[call] = task
        try:
            return await work
        except asyncio.CancelledError:
            if (failure := self._failure) is None or task.uncancel() > 0:
                raise  # somebody else cancelled it
            raise _again(failure) from None
        finally:
            del self._calls[call]


class LoopThread(Portal):
    """A loop in a thread of its own, until closed."""

    def __init__(self, name: str) -> None:
        super().__init__(new_event_loop())
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def _again(failure: Unavailable) -> Unavailable:
    """One for each caller: an exception that is raised twice carries both tracebacks."""
    fresh = Unavailable(failure.message, hint=failure.hint)
    fresh.__cause__ = failure
    return fresh


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest loop there is here."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
