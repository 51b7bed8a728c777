"""What gives no sign of life is ended."""

from __future__ import annotations

import asyncio

from penstock.adapters.llama.engine import Watchdog
from penstock.testing.aio import run_async


@run_async
async def test_it_bites_when_nobody_hears_anything() -> None:
    bitten = asyncio.Event()
    dog = Watchdog(0.01, bitten.set)
    with dog, dog:
        await bitten.wait()

    assert dog.has_bitten


@run_async
async def test_it_sleeps_while_nobody_waits() -> None:
    bites: list[bool] = []
    dog = Watchdog(0.01, lambda: bites.append(True))
    with dog:
        pass
    await asyncio.sleep(0.05)  # nothing tells that nothing happens

    assert not bites
    dog.close()


@run_async
async def test_without_patience_it_waits_for_ever() -> None:
    dog = Watchdog(0.0, lambda: None)
    with dog:
        await asyncio.sleep(0.01)

    assert not dog.has_bitten
