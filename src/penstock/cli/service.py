"""Running something until a signal ends it: the first asks it to finish, the next hurries."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from penstock.app.portal import new_event_loop
from penstock.cli.exits import Exit

T = TypeVar("T")

log = logging.getLogger("penstock.cli")

_GARBAGE = 20_000
"""New containers after which Python looks for rings of garbage; its own default is 700."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_service(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end, in the fastest loop there is here."""
    # What is loaded by now stays; and few of the many small things that a job leaves behind
    # refer to each other, so looking for rings among them so often is time lost.
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


class Stop:
    """The wish of whoever sends signals."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._hear, number)

    def _hear(self, number: int) -> None:
        if not self.asked.is_set():
            log.info(
                "%s: finishing what runs; once more to stop at once", signal.Signals(number).name
            )
            self.asked.set()
        elif not self.urgent.is_set():
            self.urgent.set()

    async def first_of(self, work: Coroutine[Any, Any, None]) -> bool:
        """Run until it is asked to stop, and say whether `work` ended before; raises what it
        raises before that."""
        return await _race(work, self.asked, settled=True)

    async def unless_urgent(self, work: Coroutine[Any, Any, None]) -> bool:
        """See it through unless it gets urgent before that; the answer says whether it ended."""
        return await _race(work, self.urgent, settled=False)


def leave_at_once(why: str, code: Exit = Exit.INTERRUPTED) -> NoReturn:
    """End this process without waiting for what it runs.

    A thread can't be made to end, so there is no tidier way; what was acknowledged is durable,
    and a job's own processes die with their parent.
    """
    log.warning("%s", why)
    logging.shutdown()
    os._exit(code)


async def _race(work: Coroutine[Any, Any, None], event: asyncio.Event, *, settled: bool) -> bool:
    """Whether the work ended before the event; raises what it raised.

    With `settled`, work that lost the race has ended when this returns; without, nobody waits.
    """
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        waiting.cancel()
        working.cancel()
        await asyncio.wait({waiting, working} if settled else {waiting})
