"""Attempts that wait for other jobs, and take a slot again before they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.ports.bus import AnyMessage, Waiting
from penstock.testing.clock import VirtualLoop
from penstock.worker.waiting import Key, Waits

T = TypeVar("T")


class Slots:
    """A worker whose slots are all taken by others, with parents that have waited."""

    def __init__(self) -> None:
        self.free = 0
        self.sent: list[AnyMessage] = []
        self.went_on: list[str] = []
        self.waits = Waits("w", self.sent.append, lambda: self.free > 0, lambda: None, self._lend)

    def _lend(self, key: Key, count: int) -> None:
        if count < 0:  # it takes a slot, if there is one
            self.free -= 1

    async def go_on(self, name: str) -> None:
        """What an attempt does whose child has ended."""
        self.waits.begin((name, 1), ["child"])
        resume = asyncio.get_running_loop().call_soon(self.waits.resume, (name, 1))
        await self.waits.end((name, 1), ["child"])
        resume.cancel()
        self.went_on.append(name)


async def _slots_stay_taken() -> list[tuple[float, int]]:
    slots, loop = Slots(), asyncio.get_running_loop()
    tasks = [loop.create_task(slots.go_on(name)) for name in ("one", "two", "three")]
    seen = []
    for seconds in (4.9, 0.2, 4.8, 0.2, 5.0):
        await asyncio.sleep(seconds)
        seen.append((round(loop.time(), 1), len(slots.went_on)))
    assert slots.went_on == ["one", "two", "three"]
    await asyncio.gather(*tasks)
    return seen


def test_without_a_free_slot_one_goes_on_every_five_seconds() -> None:
    seen = _run(_slots_stay_taken())
    assert seen == [(4.9, 0), (5.1, 1), (9.9, 1), (10.1, 2), (15.1, 3)]


async def _a_slot_becomes_free() -> list[int]:
    slots, loop = Slots(), asyncio.get_running_loop()
    tasks = [loop.create_task(slots.go_on(name)) for name in ("one", "two")]
    seen = []
    await asyncio.sleep(3.0)
    slots.free = 1
    slots.waits.fill()
    for seconds in (0.1, 4.0, 1.0):
        await asyncio.sleep(seconds)
        seen.append(len(slots.went_on))
    await asyncio.gather(*tasks)
    return seen


def test_the_five_seconds_begin_anew_when_one_finds_a_slot() -> None:
    assert _run(_a_slot_becomes_free()) == [1, 1, 2]


def _run(work: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def _engines_come_and_go() -> list[AnyMessage]:
    slots = Slots()
    slots.waits.begin(("one", 1), ["child"])
    going_on = asyncio.ensure_future(slots.waits.end(("one", 1), ["child"]))
    await asyncio.sleep(0)
    for _ in range(3):
        slots.sent.clear()
        slots.waits.send_again()
    going_on.cancel()
    return slots.sent


def test_an_attempt_that_wants_to_go_on_says_so_to_every_new_engine() -> None:
    waits, wants_to_go_on = _run(_engines_come_and_go())
    assert waits == Waiting("one", 1, "w", (), 1)
    assert wants_to_go_on == Waiting("one", 1, "w")


async def _one_is_cancelled() -> list[int]:
    slots, loop = Slots(), asyncio.get_running_loop()
    first = loop.create_task(slots.go_on("one"))
    second = loop.create_task(slots.go_on("two"))
    await asyncio.sleep(3.0)
    first.cancel()
    seen = []
    for seconds in (4.9, 0.2):
        await asyncio.sleep(seconds)
        seen.append(len(slots.went_on))
    await second
    return seen


def test_the_five_seconds_of_one_that_is_cancelled_are_not_those_of_the_next() -> None:
    assert _run(_one_is_cancelled()) == [0, 1]


async def _one_is_broken_off_while_it_wants_a_slot() -> tuple[bool, int]:
    slots = Slots()
    going_on = asyncio.ensure_future(slots.go_on("one"))
    await asyncio.sleep(1.0)
    going_on.cancel()
    await asyncio.sleep(0)
    return ("one", 1) in slots.waits.attempts, slots.free


def test_one_that_is_broken_off_while_it_wants_a_slot_counts_as_running() -> None:
    waits, free = _run(_one_is_broken_off_while_it_wants_a_slot())
    assert (waits, free) == (False, -1)
