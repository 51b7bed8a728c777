"""Many together, or one alone."""

from __future__ import annotations

import asyncio

from penstock.testing.aio import run_async
from penstock.workloads.llm.health import ExclusiveGate


@run_async
async def test_who_wants_to_be_alone_waits_for_the_others_and_keeps_them_out() -> None:
    gate, inside, seen = ExclusiveGate(), set[str](), list[tuple[str, ...]]()
    may_leave = asyncio.Event()

    async def go(name: str, *, alone: bool = False) -> None:
        async with gate.entered(alone=alone):
            inside.add(name)
            seen.append(tuple(sorted(inside)))
            await may_leave.wait()
            inside.discard(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(go("a"))
        group.create_task(go("b"))
        group.create_task(go("alone", alone=True))
        group.create_task(go("c"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert inside == {"a", "b"}
        may_leave.set()
    assert seen == [("a",), ("a", "b"), ("alone",), ("c",)]


@run_async
async def test_a_stay_knows_whether_there_was_company_at_any_time() -> None:
    gate = ExclusiveGate()
    async with gate.entered(alone=False) as first:
        assert first.alone
        async with gate.entered(alone=False) as second:
            pass
        assert not first.alone
        assert not second.alone
    async with gate.entered(alone=True) as third:
        assert third.alone


@run_async
async def test_one_that_gives_up_waiting_lets_the_others_in() -> None:
    gate = ExclusiveGate()
    async with gate.entered(alone=False):
        waiting = asyncio.create_task(_alone(gate))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        async with asyncio.timeout(1):
            await gate.opened()


async def _alone(gate: ExclusiveGate) -> None:
    async with gate.entered(alone=True):
        raise AssertionError("somebody else was inside")
