"""Waiting that ends early when the job is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from penstock.ports.clock import Clock
from penstock.ports.executor import CancelToken


async def pause(
    clock: Clock,
    seconds: float | None,
    cancel: CancelToken | None = None,
    wake: asyncio.Future[None] | None = None,
) -> None:
    """Sleep, or until `wake` is done; None: only until then. `wake` is left as it is.

    Raises `penstock.Cancelled` as soon as the token asks for it, from whichever thread.
    """
    if cancel is not None:
        cancel.raise_if_requested()
    asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    forget = _tell(asked, cancel)
    sleeper = None if seconds is None else asyncio.ensure_future(clock.sleep(seconds))
    try:
        ends = [end for end in (sleeper, asked, wake) if end is not None]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        forget()
        if sleeper is not None:
            await _end(sleeper)
    if cancel is not None:
        cancel.raise_if_requested()


def release(waiting: Iterable[asyncio.Future[None]]) -> None:
    """Wake all of them that still wait."""
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _tell(asked: asyncio.Future[None], cancel: CancelToken | None) -> Callable[[], None]:
    """Have the token wake the future in its own loop."""
    if cancel is None:
        return lambda: None
    loop = asked.get_loop()

    def hear() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(release, (asked,))

    return cancel.when_requested(hear)


async def _end(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.cancel()
        await asyncio.wait((sleeper,))
