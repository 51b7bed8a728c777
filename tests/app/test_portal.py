"""Threads that call into one event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from penstock.app.portal import Begun, LoopThread, Portal
from penstock.core.errors import Unavailable

name: ContextVar[int] = ContextVar("name")


@pytest.fixture
def portal() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.close()


def test_every_thread_gets_its_own_answer_in_its_own_context(portal: LoopThread) -> None:
    async def ask(number: int) -> tuple[int, int]:
        await asyncio.sleep(0)
        if number % 7 == 0:
            raise KeyError(number)
        return number, name.get()

    def call(number: int) -> object:
        name.set(number)
        try:
            return portal.run(ask(number))
        except KeyError as error:
            return error.args[0]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(call, range(2000)))
    assert answers == [n if n % 7 == 0 else (n, n) for n in range(2000)]


def test_a_failure_reaches_those_who_wait_and_those_who_come(portal: LoopThread) -> None:
    started = threading.Event()

    async def wait() -> None:
        started.set()
        await asyncio.sleep(60)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(portal.run, wait())
        assert started.wait(10)
        portal.loop.call_soon_threadsafe(portal.fail, Unavailable("it broke"))
        with pytest.raises(Unavailable, match="it broke"):
            waiting.result(10)
    with pytest.raises(Unavailable, match="it broke"):
        portal.run(wait())
    portal._failure = None  # the loop itself is well


def test_a_future_is_waited_for_without_a_task(portal: LoopThread) -> None:
    def begin(result: object) -> Begun[object]:
        if isinstance(result, Exception):
            raise result
        future: asyncio.Future[object] = portal.loop.create_future()
        portal.loop.call_later(0.01, future.set_result, result)
        return future, lambda done: [done.result()]

    assert portal.call(lambda: begin(5)) == [5]
    with pytest.raises(KeyError):
        portal.call(lambda: begin(KeyError(5)))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(portal.call, lambda: (portal.loop.create_future(), repr))
        time.sleep(0.05)
        portal.loop.call_soon_threadsafe(portal.fail, Unavailable("it broke"))
        with pytest.raises(Unavailable, match="it broke"):
            waiting.result(10)
    portal._failure = None  # the loop itself is well


def test_the_loop_is_not_blocked_by_itself() -> None:
    async def main() -> None:
        portal = Portal(asyncio.get_running_loop())
        with pytest.raises(RuntimeError, match="async twin"):
            portal.run(asyncio.sleep(0))
        assert await portal.arun(asyncio.sleep(0, "fine")) == "fine"

    asyncio.run(main())
