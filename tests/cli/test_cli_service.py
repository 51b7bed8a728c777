"""Work that goes on until a signal ends it."""

from __future__ import annotations

import asyncio

import pytest

from penstock.app.service import Stop
from penstock.testing.aio import run_async


@run_async
async def test_work_that_is_told_to_stop_has_ended_when_the_wait_for_it_ends() -> None:
    stop, done = Stop(), []

    async def work() -> None:
        try:
            stop.asked.set()
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            done.append("tidied up")

    await stop.first_of(work())
    assert done == ["tidied up"]


@run_async
async def test_what_fails_before_it_is_told_to_stop_fails() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await Stop().first_of(work())


@run_async
async def test_what_is_urgent_is_not_waited_for() -> None:
    stop = Stop()
    release = asyncio.Event()

    async def work() -> None:
        stop.urgent.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await release.wait()

    async with asyncio.timeout(20):
        assert await stop.unless_urgent(work()) is False
    release.set()
