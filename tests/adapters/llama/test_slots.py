"""The slots of an engine, which hold what tenants have asked."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from penstock.adapters.llama.engine import Slots
from penstock.testing.aio import run_async


async def taken(slots: Slots, tenant: str) -> tuple[int | None, bool]:
    async with slots.take(tenant) as fields:
        return fields.get("id_slot"), fields["cache_prompt"]


@run_async
async def test_one_tenant_alone_leaves_the_choice_to_the_engine() -> None:
    slots = Slots(2)
    assert [await taken(slots, "a") for _ in range(3)] == [(None, True)] * 3


@run_async
async def test_what_a_slot_holds_is_used_again_for_its_tenant_only() -> None:
    slots = Slots(2)
    await taken(slots, "a")
    assert await taken(slots, "b") == (0, False)
    assert await taken(slots, "b") == (0, True)
    assert await taken(slots, "a") == (1, True)
    assert await taken(slots, "c") == (0, False)
    assert await taken(slots, "b") == (1, False)
    assert await taken(slots, "a") == (0, False)


@run_async
async def test_a_second_tenant_waits_for_answers_whose_slot_is_not_known() -> None:
    slots = Slots(2)
    async with AsyncExitStack() as first:
        await first.enter_async_context(slots.take("a"))
        second = asyncio.ensure_future(taken(slots, "b"))
        third = asyncio.ensure_future(taken(slots, "a"))
        await asyncio.sleep(0)
        assert not second.done()
        assert not third.done()
    assert await second == (0, False)
    assert await third == (1, True)


@run_async
async def test_no_slot_is_given_to_two_answers_at_once() -> None:
    slots = Slots(3)
    await taken(slots, "first")
    busy: set[int] = set()

    async def answer(tenant: str) -> None:
        async with slots.take(tenant) as fields:
            slot = fields["id_slot"]
            assert slot not in busy
            busy.add(slot)
            await asyncio.sleep(0)
            busy.remove(slot)

    await asyncio.gather(*(answer(f"t{number % 5}") for number in range(50)))
    assert await taken(slots, "t4") != (None, True)
