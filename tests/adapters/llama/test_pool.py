"""Who is in memory, who leaves, and who waits."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock.adapters.llama import pool
from penstock.adapters.llama.engine import Engine
from penstock.adapters.llama.machine import Size
from penstock.adapters.llama.pool import ModelPool
from penstock.adapters.llama.process import EngineSpec
from penstock.testing.aio import run_async
from penstock.workloads.llm.runner import Loading
from penstock.workloads.llm.values import EngineUnavailable, LlmCode, LlmFailure


class FakeProcess:
    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class FakeEngine:
    def __init__(self, spec: EngineSpec, yard: Yard) -> None:
        self.spec, self._yard = spec, yard
        self.process = FakeProcess(spec.size.memory)

    @property
    def is_alive(self) -> bool:
        return not self.process.gone.done()

    def die(self) -> None:
        self.process.gone.set_result(-9)

    async def close(self) -> None:
        if self.is_alive:
            self.die()
        await self._yard.leaving.wait()
        self._yard.log.append(f"-{self.spec.model}")


class Yard:
    """Starts engines of which nothing is real but their comings and goings."""

    def __init__(self, limit: int = 20, idle: float = 0.0) -> None:
        self.log: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.leaving = asyncio.Event()
        self.leaving.set()
        self.starting = 0
        self.fails: LlmFailure | None = None
        self.models = ModelPool(limit, idle, self.start)

    async def start(self, spec: EngineSpec, on_progress: Loading) -> Engine:
        self.log.append(f"+{spec.model}")
        self.starting += 1
        try:
            await self.gate.wait()
        finally:
            self.starting -= 1
        if self.fails is not None:
            raise self.fails
        return cast("Engine", FakeEngine(spec, self))


def model(name: str, memory: int = 10, **more: Any) -> EngineSpec:
    size = Size(slots=1, context=256, threads=1, memory=memory)
    return EngineSpec(model=name, path=name, size=size, **more)


async def touch(yard: Yard, name: str) -> None:
    async with yard.models.use(model(name)):
        pass


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@run_async
async def test_all_who_ask_at_once_share_one_engine() -> None:
    yard = Yard()
    async with yard.models.use(model("a")) as first, yard.models.use(model("a")) as second:
        assert first is second
    await asyncio.gather(*(touch(yard, "a") for _ in range(5)))

    assert yard.log == ["+a"]


@run_async
async def test_the_longest_unused_leaves_first() -> None:
    yard = Yard(limit=20)
    for name in ("a", "b", "a", "c", "a"):
        await touch(yard, name)

    assert yard.log == ["+a", "+b", "-b", "+c"]


@run_async
async def test_one_in_use_stays_and_is_waited_for() -> None:
    yard = Yard(limit=10)
    async with yard.models.use(model("a")):
        waiting = asyncio.ensure_future(touch(yard, "b"))
        await settle()
        assert yard.log == ["+a"]
    await waiting

    assert yard.log == ["+a", "-a", "+b"]


@run_async
async def test_newcomers_wait_behind_one_that_has_waited_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_PATIENCE", -1.0)
    yard = Yard(limit=10)
    async with yard.models.use(model("a")):
        other = asyncio.ensure_future(touch(yard, "b"))
        await settle()
        newcomer = asyncio.ensure_future(touch(yard, "a"))
        await settle()
    await asyncio.gather(other, newcomer)

    assert yard.log == ["+a", "-a", "+b", "-b", "+a"]


@run_async
async def test_a_model_that_can_never_fit_is_refused() -> None:
    yard = Yard(limit=10)
    with pytest.raises(LlmFailure) as refused:
        async with yard.models.use(model("a", memory=11)):
            pass

    assert refused.value.code is LlmCode.OUT_OF_MEMORY


@run_async
async def test_a_failed_load_is_told_to_all_and_tried_again_by_the_next() -> None:
    yard = Yard()
    yard.fails = LlmFailure(LlmCode.MODEL_INVALID, "no")
    told = await asyncio.gather(*(touch(yard, "a") for _ in range(3)), return_exceptions=True)
    assert [type(one) for one in told] == [EngineUnavailable] * 3
    yard.fails = None
    await touch(yard, "a")

    assert yard.log == ["+a", "+a"]


@run_async
async def test_one_that_gives_up_waiting_leaves_the_load_to_the_others() -> None:
    yard = Yard()
    yard.gate.clear()
    first, second = (asyncio.ensure_future(touch(yard, "a")) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    yard.gate.set()
    await second

    assert first.cancelled()
    assert yard.log == ["+a"]


@run_async
async def test_a_load_that_nobody_waits_for_is_ended() -> None:
    yard = Yard()
    yard.gate.clear()
    only = asyncio.ensure_future(touch(yard, "a"))
    await settle()
    only.cancel()
    await settle()
    assert only.cancelled()
    assert not yard.starting
    yard.gate.set()
    await touch(yard, "a")

    assert yard.log == ["+a", "+a"]


@run_async
async def test_one_that_leaves_goes_wholly_even_if_its_room_is_not_wanted_any_more() -> None:
    yard = Yard(limit=10)
    await touch(yard, "a")
    yard.leaving.clear()
    other = asyncio.ensure_future(touch(yard, "b"))
    await settle()
    other.cancel()
    await settle()
    yard.leaving.set()
    await yard.models.close()

    assert yard.log == ["+a", "-a"]


@run_async
async def test_a_dead_engine_is_replaced_while_its_users_still_hold_it() -> None:
    yard = Yard(limit=10)
    async with yard.models.use(model("a")) as engine:
        cast("FakeEngine", engine).die()
        async with yard.models.use(model("a")) as other:
            assert other is not engine
            assert other.is_alive
    await yard.models.close()

    assert sorted(yard.log) == ["+a", "+a", "-a", "-a"]


@run_async
async def test_unloading_waits_for_users_and_the_next_loads_again() -> None:
    yard = Yard()
    async with yard.models.use(model("a")):
        unloading = asyncio.ensure_future(yard.models.unload("a"))
        await settle()
        assert yard.log == ["+a"]
    await unloading
    await touch(yard, "a")

    assert yard.log == ["+a", "-a", "+a"]


@run_async
async def test_closing_ends_loads_and_refuses_newcomers() -> None:
    yard = Yard()
    await touch(yard, "a")
    yard.gate.clear()
    loading = asyncio.ensure_future(touch(yard, "b"))
    await settle()
    await yard.models.close()

    with pytest.raises(LlmFailure, match="closed"):
        await loading
    with pytest.raises(LlmFailure, match="closed"):
        await touch(yard, "a")
    assert yard.log == ["+a", "+b", "-a"]


@run_async
async def test_a_model_is_loading_then_ready_then_gone() -> None:
    yard = Yard()
    states = [yard.models.state("a")]
    yard.gate.clear()
    touching = asyncio.ensure_future(touch(yard, "a"))
    await settle()
    states.append(yard.models.state("a"))
    yard.gate.set()
    await touching
    states.append(yard.models.state("a"))
    async with yard.models.use(model("a")) as engine:
        cast("FakeEngine", engine).die()
        await settle()
        states.append(yard.models.state("a"))
    await touch(yard, "a")
    await yard.models.unload("a")
    states.append(yard.models.state("a"))

    assert states == ["gone", "loading", "ready", "gone", "gone"]
