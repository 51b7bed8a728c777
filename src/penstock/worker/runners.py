"""Tasks that run one attempt after another.

A task a job would do, and cost as much as a short job itself. So a runner goes on with the
next attempt when one is done, in the same task, unless the job left something behind in the
task's context variables: then the runner ends, and a fresh one takes over.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable

from penstock.worker.attempt import Attempt

_BREATH = 0.002
"""Seconds of short jobs after which a runner lets others have the event loop."""


class Runners:
    """As many tasks as there are attempts under way, kept for the next ones."""

    def __init__(self, work: Callable[[Attempt], Awaitable[None]]) -> None:
        self._work = work
        self._ready: deque[Attempt] = deque()
        self._resting: list[asyncio.Future[None]] = []
        self._coming = 0
        """Runners that were called and have not looked for work yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._clean = contextvars.copy_context()

    def give(self, attempt: Attempt) -> None:
        """Run this as soon as the event loop gets to it."""
        self._ready.append(attempt)
        if self._coming < len(self._ready):
            self._coming += 1
            if self._resting:
                self._resting.pop().set_result(None)
            else:
                self._spawn()

    def _spawn(self) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(loop), context=self._clean.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        me = asyncio.current_task()
        assert me is not None
        while True:
            self._coming -= 1
            breath = loop.time() + _BREATH
            while self._ready:
                attempt = self._ready.popleft()
                attempt.task = me
                await self._work(attempt)
                while me.cancelling():  # the job was told to end, and has
                    me.uncancel()
                if contextvars.copy_context() != self._clean:
                    if self._ready:
                        self._coming += 1
                        self._spawn()
                    return
                if loop.time() > breath:
                    await asyncio.sleep(0)
                    breath = loop.time() + _BREATH
            rest: asyncio.Future[None] = loop.create_future()
            self._resting.append(rest)
            await rest

    async def close(self) -> None:
        """End the tasks; call it when nothing runs any more."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
