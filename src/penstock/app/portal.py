"""One event loop, many callers: coroutines inside, a thin blocking front outside."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.core.errors import EngineUnavailable, Unavailable
from penstock.core.job import Cancelled
from penstock.ports.executor import CancelToken

log = logging.getLogger(__name__)

T = TypeVar("T")


_CANCELLED_WITHIN = 0.5
"""Seconds that tasks have to end after they were cancelled."""

Begun = tuple[asyncio.Future[Any], Callable[[asyncio.Future[Any]], T]]
"""What is under way on a loop, and how its result is read when it is done."""


class Portal:
    """Runs work on a loop, from other threads or from other loops."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._coming: deque[_Call[Any]] = deque()
        self._woken = False
        """Whether the loop was told of those coming."""
        self._running: set[_Call[Any]] = set()
        self._awaited: set[asyncio.Task[Any]] = set()
        self._failure: Unavailable | None = None
        self._pid = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Whether its loop runs in another process, which forked this one."""
        return self._pid != os.getpid()

    def check_process(self) -> None:
        """Raises EngineUnavailable in a forked child: there is no loop to answer."""
        if self.is_forked:
            raise EngineUnavailable(
                f"this client was made in another process ({self._pid}), which forked this one "
                f"({os.getpid()})",
                hint="connect or start an engine in this process: app.connect(), app.run()",
            )

    def run(self, work: Coroutine[Any, Any, T], cancel: CancelToken | None = None) -> T:
        """Block until it is done, or until the job that waits for it should end: then it raises
        Cancelled."""
        create_task, context = self.loop.create_task, copy_context()
        began = False

        def begin() -> Begun[T]:
            nonlocal began
            began = True
            task = create_task(work, context=context)
            if cancel is not None:
                end = partial(self.loop.call_soon_threadsafe, task.cancel)
                forget = cancel.when_requested(end)
                task.add_done_callback(lambda _: forget())
            return task, asyncio.Future.result

        try:
            return self.call(begin)
        except asyncio.CancelledError:
            if cancel is None:
                raise
            raise Cancelled(cancel.reason) from None
        except Exception:
            if not began:
                work.close()
            raise

    def call(self, begin: Callable[[], Begun[T]]) -> T:
        """Call `begin` on the loop, and block until what it began is done."""
        self.check_thread()
        self.check_process()
        if self._failure is not None:
            raise _again(self._failure)
        call = _Call(begin)
        self._coming.append(call)
        try:
            if not self._woken:  # one wake-up serves all who come until the loop looks
                self._woken = True
                self.loop.call_soon_threadsafe(self._start)
            call.wait()
        except BaseException:  # Ctrl-C
            self.loop.call_soon_threadsafe(self._abandon, call)
            call.wait(_CANCELLED_WITHIN)
            raise
        return call.result()

    def check_thread(self) -> None:
        """Raises RuntimeError where blocking would stop the loop itself."""
        if asyncio._get_running_loop() is self.loop:
            raise RuntimeError(
                "this would block the engine's own event loop:"
                " use the async twin (asubmit, aresult, …) here"
            )

    def arun(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """To be awaited, on whichever loop the caller lives."""
        try:
            self.check_process()
        except BaseException:
            work.close()
            raise
        guarded = self._guarded(work)
        return guarded if asyncio._get_running_loop() is self.loop else self._elsewhere(guarded)

    async def _elsewhere(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def fail(self, failure: Unavailable) -> None:
        """Let every call raise this: those under way, and those to come."""
        self._failure = failure
        for call in list(self._running):
            self._end(call, failure)
        for task in self._awaited:
            task.cancel()

    def _start(self) -> None:
        self._woken = False  # before looking: a later caller wakes the loop again
        while self._coming:
            call = self._coming.popleft()
            if self._failure is not None:
                call.end(_again(self._failure))
                continue
            try:
                call.future, call.read = call.begin()
            except Exception as error:
                call.end(error)
            else:
                self._running.add(call)
                call.future.add_done_callback(partial(self._end, call))

    def _abandon(self, call: _Call[Any]) -> None:
        """Cancel work whose caller is gone."""
        self._start()  # perhaps the loop was not woken
        if call in self._running:
            call.future.add_done_callback(_retrieve)
            call.future.cancel()

    def _end(self, call: _Call[Any], done: asyncio.Future[Any] | Unavailable) -> None:
        if call not in self._running:
            return
        self._running.discard(call)
        if isinstance(done, Unavailable):
            call.future.cancel()
            call.end(_again(done))
        else:
            call.end(None)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T:
        if (failure := self._failure) is not None:
            work.close()
            raise _again(failure)
        task = asyncio.current_task()
        assert task is not None
        is_outermost = task not in self._awaited
        self._awaited.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if (failure := self._failure) is None or task.uncancel() > 0:
                raise  # somebody else cancelled it
            raise _again(failure) from None
        finally:
            if is_outermost:
                self._awaited.discard(task)


class _Call(Generic[T]):
    """Work on a loop that another thread waits for."""

    __slots__ = ("_ended", "_error", "begin", "future", "read")
    future: asyncio.Future[Any]
    read: Callable[[asyncio.Future[Any]], T]

    def __init__(self, begin: Callable[[], Begun[T]]) -> None:
        self.begin = begin
        self._error: Exception | None = None
        self._ended = threading.Lock()
        self._ended.acquire()

    def end(self, error: Exception | None) -> None:
        self._error = error
        self._ended.release()

    def wait(self, seconds: float = -1) -> None:
        """Wait for its end; with `seconds`, no longer than that."""
        self._ended.acquire(timeout=seconds)

    def result(self) -> T:
        """What came of it, after its end."""
        if self._error is not None:
            raise self._error
        return self.read(self.future)


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not warn."""
    if not future.cancelled():
        future.exception()


class LoopThread(Portal):
    """A loop in a thread of its own, until closed."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        super().__init__(loop or new_event_loop())
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def close(self) -> None:
        """Cancel what is left, and end the thread. Work that does not end keeps the thread."""
        if self.run(self._cancel_all()):
            self._thread.join()

    async def _cancel_all(self) -> bool:
        """Whether nothing is left that keeps the thread."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        left = (await asyncio.wait(others, timeout=_CANCELLED_WITHIN))[1] if others else set()
        if left:
            ended = asyncio.gather(*left, return_exceptions=True)
            ended.add_done_callback(lambda _: self.loop.stop())
        else:
            await self.loop.shutdown_default_executor()
            self.loop.call_soon(self.loop.stop)
        return not left


_AT_EXIT: dict[Callable[[], None], None] = {}


def at_exit(close: Callable[[], None]) -> None:
    """Call `close` when the main thread has ended, unless `not_at_exit` comes first."""
    _AT_EXIT[close] = None


def not_at_exit(close: Callable[[], None]) -> None:
    _AT_EXIT.pop(close, None)


def _close_all() -> None:
    while _AT_EXIT:
        close, _ = _AT_EXIT.popitem()
        try:
            close()
        except Exception:
            log.exception("an application could not be closed")


# Not the module atexit: what that calls comes too late, when no thread pool takes work any more.
# The last one registered is called first, so the thread pools' own must be registered by now.
importlib.import_module("concurrent.futures.thread")
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


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
