"""The end of a container that does not end by itself: TERM, a grace, KILL.

A container that nobody reads from stands still, and then an engine may sit on a kill for ever.
So a kill that does not come through is given again after the streams were let go of.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from penstock.ports.clock import Clock
from penstock.workloads.container.engine import ContainerEngine, EngineError
from penstock.workloads.container.running.patience import done_within, drop

_Call = Callable[[], Coroutine[Any, Any, None]]

KILL_WAITS = (3.0, 3.0, 6.0, 12.0, 24.0)
"""Seconds that each kill has until the next."""


async def end_container(
    engine: ContainerEngine,
    clock: Clock,
    name: str,
    *,
    ended: asyncio.Future[Any],
    grace: float,
    let_go: Callable[[], None],
) -> bool:
    """Whether it ended. No engine that hangs, fails or dies can make this take longer than the
    grace and `KILL_WAITS` together. `let_go` closes its streams."""

    async def term() -> None:
        await engine.signal(name, signal.SIGTERM)

    async def kill() -> None:
        await engine.kill(name)

    if grace > 0 and await _send(term, clock, ended, grace):
        return True
    for seconds in KILL_WAITS:
        if await _send(kill, clock, ended, seconds):
            return True
        let_go()
    return False


async def _send(call: _Call, clock: Clock, ended: asyncio.Future[Any], seconds: float) -> bool:
    """Make the call and wait for the end, whether the call is answered or not."""
    sending = asyncio.ensure_future(_quietly(call))
    try:
        return await done_within(clock, seconds, ended)
    finally:
        await drop(sending)


async def _quietly(call: _Call) -> None:
    # Whoever waits for the end hears of an engine that is gone.
    with suppress(EngineError):
        await call()
