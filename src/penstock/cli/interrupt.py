"""Ctrl-C while a job is followed that is this command's own: it ends the job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.app.client import JobHandle

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@asynccontextmanager
async def interruptible(handle: JobHandle[Any]) -> AsyncIterator[list[str]]:
    """Ctrl-C cancels the job; what is given says by which signal."""
    loop, heard, tasks = asyncio.get_running_loop(), list[str](), set[asyncio.Task[Any]]()

    def hear(number: signal.Signals) -> None:
        heard.append(number.name)
        tasks.add(loop.create_task(handle.acancel(f"{number.name} at the terminal")))

    for number in _SIGNALS:
        loop.add_signal_handler(number, hear, number)
    try:
        yield heard
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        await asyncio.gather(*tasks, return_exceptions=True)
