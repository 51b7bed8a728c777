"""Breakers that jobs share through a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from tests.support.pipeline.pipeline_runs import MemoryState

from penstock.core.job import Cancelled
from penstock.ports.executor import CancelToken
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.workloads.pipeline.breakers import (
    LOOK_EVERY,
    WATCH_EVERY,
    Breakers,
    BreakerSettings,
    load_breaker,
    reset,
    store_breaker,
)
from penstock.workloads.pipeline.records import Breaker, BreakerState, ErrorClass, WhenOpen
from penstock.workloads.pipeline.retrying import BreakerOpen, Failure, judge

SETTINGS = BreakerSettings(threshold=3, cooldown=10.0)


class Counting(MemoryState):
    """Counts what it is asked, and may be beaten by another writer."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = 0
        self.before_write: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def read(self, name: str) -> bytes | None:
        self.reads += 1
        return await super().read(name)

    async def replace(self, name: str, before: bytes | None, value: bytes) -> bool:
        self.writes += 1
        meddle, self.before_write = self.before_write, None
        if meddle is not None:
            await meddle()
        return await super().replace(name, before, value)


class Scene:
    def __init__(self) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.store = Counting()
        self.here = self.process()
        self.start = self.clock.monotonic()

    def process(self) -> Breakers:
        """Another process: all it shares is the store."""
        return Breakers(self.store, self.clock)

    @property
    def elapsed(self) -> float:
        return self.clock.monotonic() - self.start

    async def fail(
        self, times: int = 1, breakers: Breakers | None = None, error: BaseException | None = None
    ) -> None:
        for _ in range(times):
            with suppress(ConnectionError, TimeoutError, ValueError, BreakerOpen):
                async with (breakers or self.here).call("b", SETTINGS, when_open=WhenOpen.SKIP):
                    raise error or ConnectionError("no")

    async def stored(self) -> Breaker:
        breaker = await load_breaker(self.store, "b")
        assert breaker is not None
        return breaker


def on_virtual_time(test: Callable[[Scene], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def go() -> None:
        await test(Scene())

    def run() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(go())
        finally:
            loop.close()

    run.__name__ = test.__name__
    return run


# -- counting -----------------------------------------------------------------------------


@on_virtual_time
async def test_failures_are_stored_and_open_it_with_the_pipelines_settings(scene: Scene) -> None:
    await scene.fail(2)
    assert ((await scene.stored()).state, (await scene.stored()).failures) == ("closed", 2)
    await scene.fail()
    stored = await scene.stored()
    assert (stored.state, stored.threshold, stored.cooldown) == ("open", 3, 10.0)


@pytest.mark.seed("002", "8.20")
@on_virtual_time
async def test_failures_of_two_processes_add_up(scene: Scene) -> None:
    other = scene.process()
    await scene.fail(1)
    await scene.fail(1, other)
    await scene.fail(1)
    assert (await scene.stored()).state is BreakerState.OPEN
    await scene.clock.sleep(LOOK_EVERY * 1.01)
    with pytest.raises(BreakerOpen):
        async with other.call("b", SETTINGS, when_open=WhenOpen.FAIL):
            pytest.fail("it was let through")


@on_virtual_time
async def test_calls_that_fail_at_once_are_all_counted(scene: Scene) -> None:
    others = [scene.process() for _ in range(4)]
    many = BreakerSettings(threshold=1_000, cooldown=10.0)

    async def one(breakers: Breakers) -> None:
        with suppress(ConnectionError):
            async with breakers.call("b", many):
                raise ConnectionError

    await asyncio.gather(*(one(breakers) for breakers in others for _ in range(25)))
    assert (await scene.stored()).failures == 100


@on_virtual_time
async def test_a_lost_race_is_run_again_on_what_the_other_wrote(scene: Scene) -> None:
    other = scene.process()
    await scene.fail(1)
    scene.store.before_write = lambda: scene.fail(1, other)
    await scene.fail(1)
    assert (await scene.stored()).state is BreakerState.OPEN


@on_virtual_time
async def test_a_success_starts_the_count_again(scene: Scene) -> None:
    await scene.fail(2)
    async with scene.here.call("b", SETTINGS):
        pass
    assert (await scene.stored()).failures == 0
    await scene.fail(2)
    assert (await scene.stored()).state is BreakerState.CLOSED


@on_virtual_time
async def test_a_bad_item_and_a_cancelled_one_neither_count_nor_clear(scene: Scene) -> None:
    await scene.fail(2)
    await scene.fail(5, error=ValueError("bad item"))
    with pytest.raises(Cancelled):
        async with scene.here.call("b", SETTINGS):
            raise Cancelled
    assert (await scene.stored()).failures == 2


@on_virtual_time
async def test_a_timeout_counts(scene: Scene) -> None:
    await scene.fail(3, error=TimeoutError())
    assert (await scene.stored()).state is BreakerState.OPEN


@on_virtual_time
async def test_a_failure_told_instead_of_raised_counts_the_same(scene: Scene) -> None:
    for error_class, failures in ((ErrorClass.PERMANENT, 0), (ErrorClass.TRANSIENT, 1)):
        async with scene.here.call("b", SETTINGS) as call:
            call.ended(Failure(error_class=error_class, code="X", message=""))
        stored = await load_breaker(scene.store, "b")
        assert (stored.failures if stored else 0) == failures


# -- what it costs ------------------------------------------------------------------------


@on_virtual_time
async def test_successes_of_a_quiet_breaker_cost_few_reads_and_no_writes(scene: Scene) -> None:
    async def one() -> None:
        async with scene.here.call("b", SETTINGS):
            await scene.clock.sleep(0.001)

    for _ in range(100):
        await asyncio.gather(*(one() for _ in range(20)))
    assert scene.elapsed == pytest.approx(0.1)
    assert (scene.store.reads, scene.store.writes) == (1, 0)
    for _ in range(10):
        await scene.clock.sleep(LOOK_EVERY / 2)
        await asyncio.gather(*(one() for _ in range(20)))
    assert scene.store.reads <= 1 + scene.elapsed / LOOK_EVERY + 1
    assert scene.store.writes == 0


@on_virtual_time
async def test_a_breaker_opened_elsewhere_is_noticed_after_a_moment(scene: Scene) -> None:
    async with scene.here.call("b", SETTINGS):
        pass
    await scene.fail(3, scene.process())
    async with scene.here.call("b", SETTINGS, when_open=WhenOpen.SKIP):
        pass  # what was read a moment ago is still believed
    await scene.clock.sleep(LOOK_EVERY * 1.01)
    with pytest.raises(BreakerOpen):
        async with scene.here.call("b", SETTINGS, when_open=WhenOpen.SKIP):
            pytest.fail("it was let through")


# -- open: skip, fail, wait ---------------------------------------------------------------


@pytest.mark.parametrize("when_open", [WhenOpen.SKIP, WhenOpen.FAIL])
def test_an_open_breaker_that_is_not_waited_for_says_so_at_once(when_open: WhenOpen) -> None:
    @on_virtual_time
    async def test(scene: Scene) -> None:
        await scene.fail(3)
        with pytest.raises(BreakerOpen) as caught:
            async with scene.here.call("b", SETTINGS, when_open=when_open):
                pytest.fail("it was let through")
        assert scene.elapsed == 0
        assert caught.value.when_open is when_open
        assert caught.value.until == pytest.approx(scene.clock.now() + 10)
        failure = judge(caught.value)
        assert (failure.error_class, failure.code) == (ErrorClass.TRANSIENT, "BREAKER_OPEN")

    test()


@on_virtual_time
async def test_of_many_that_wait_one_is_the_trial_and_the_rest_follow_its_success(
    scene: Scene,
) -> None:
    await scene.fail(3)
    begun: list[float] = []

    async def one(breakers: Breakers) -> None:
        async with breakers.call("b", SETTINGS):
            begun.append(scene.elapsed)
            await scene.clock.sleep(2)

    await asyncio.gather(*(one(scene.here) for _ in range(20)))
    assert begun[0] == pytest.approx(10)
    assert begun[1:] == pytest.approx([12] * 19)


@pytest.mark.seed("002", "8.19")
@on_virtual_time
async def test_a_trial_that_fails_sends_the_rest_back_to_wait_and_the_next_one_recovers(
    scene: Scene,
) -> None:
    await scene.fail(3)
    begun: list[float] = []

    async def one() -> None:
        with suppress(ConnectionError):
            async with scene.here.call("b", SETTINGS):
                begun.append(scene.elapsed)
                await scene.clock.sleep(2)
                if len(begun) == 1:
                    raise ConnectionError

    await asyncio.gather(*(one() for _ in range(5)))
    assert begun == pytest.approx([10, 22, 24, 24, 24])


@pytest.mark.seed("002", "8.20")
@on_virtual_time
async def test_jobs_in_other_processes_wait_for_the_same_trial(scene: Scene) -> None:
    await scene.fail(3)
    begun: list[float] = []

    async def one(breakers: Breakers) -> None:
        async with breakers.call("b", SETTINGS):
            begun.append(scene.elapsed)
            await scene.clock.sleep(2)

    processes = [scene.process() for _ in range(6)]
    await asyncio.gather(*(one(process) for process in processes))
    assert begun[0] == pytest.approx(10)
    assert len([at for at in begun if at < 12]) == 1
    assert max(begun) <= 12 + WATCH_EVERY + LOOK_EVERY


@on_virtual_time
async def test_as_many_trials_as_set_go_at_once_whoever_asks(scene: Scene) -> None:
    await scene.fail(3)
    settings = BreakerSettings(threshold=3, cooldown=10.0, trials=3)
    running, most = 0, 0
    tried: list[float] = []

    async def one(breakers: Breakers) -> None:
        nonlocal running, most
        async with breakers.call("b", settings):
            running += 1
            if scene.elapsed < 11:
                most = max(most, running)
                tried.append(scene.elapsed)
            await scene.clock.sleep(5)
            running -= 1

    processes = [scene.process() for _ in range(3)]
    await asyncio.gather(*(one(process) for process in processes for _ in range(4)))
    assert (most, len(tried)) == (3, 3)


@on_virtual_time
async def test_a_cancel_wakes_who_waits_at_once(scene: Scene) -> None:
    await scene.fail(3)
    cancel = CancelToken()

    async def one() -> None:
        async with scene.here.call("b", SETTINGS, cancel=cancel):
            pytest.fail("it was let through")

    waiting = asyncio.ensure_future(one())
    await scene.clock.sleep(3.3)
    cancel.request("enough")
    with pytest.raises(Cancelled, match="enough"):
        await waiting
    assert scene.elapsed == pytest.approx(3.3)


@on_virtual_time
async def test_a_cancelled_job_is_not_let_through_a_closed_breaker_either(scene: Scene) -> None:
    cancel = CancelToken()
    cancel.request()
    with pytest.raises(Cancelled):
        async with scene.here.call("b", SETTINGS, cancel=cancel):
            pytest.fail("it was let through")


@pytest.mark.parametrize("error", [ValueError("bad item"), Cancelled(), asyncio.CancelledError()])
def test_a_trial_without_a_verdict_leaves_its_slot_to_the_next(error: BaseException) -> None:
    @on_virtual_time
    async def test(scene: Scene) -> None:
        await scene.fail(3)
        await scene.clock.sleep(10)
        with pytest.raises(type(error)):
            async with scene.here.call("b", SETTINGS):
                raise error
        assert (await scene.stored()).trial_until == ()
        async with scene.process().call("b", SETTINGS, when_open=WhenOpen.FAIL):
            pass
        assert (await scene.stored()).state is BreakerState.CLOSED
        assert scene.elapsed == pytest.approx(10)

    test()


@on_virtual_time
async def test_a_trial_whose_task_is_cancelled_gives_its_slot_back(scene: Scene) -> None:
    await scene.fail(3)
    await scene.clock.sleep(10)

    async def one() -> None:
        async with scene.here.call("b", SETTINGS):
            await scene.clock.sleep(100)

    trial = asyncio.ensure_future(one())
    await scene.clock.sleep(1)
    assert len((await scene.stored()).trial_until) == 1
    trial.cancel()
    await asyncio.wait((trial,))
    assert (await scene.stored()).trial_until == ()


@on_virtual_time
async def test_a_trial_whose_process_died_is_replaced_when_it_lapses(scene: Scene) -> None:
    await scene.fail(3)
    await scene.clock.sleep(10)
    dead = scene.process().call("b", SETTINGS, timeout=30.0)
    await dead.__aenter__()  # and it is never heard of again
    async with scene.here.call("b", SETTINGS):
        assert scene.elapsed == pytest.approx(40)
    assert (await scene.stored()).state is BreakerState.CLOSED


@on_virtual_time
async def test_one_closed_by_hand_lets_those_who_wait_go_within_a_moment(scene: Scene) -> None:
    await scene.fail(3)

    async def one() -> float:
        async with scene.here.call("b", SETTINGS):
            return scene.elapsed

    waiting = asyncio.ensure_future(one())
    await scene.clock.sleep(2.5)
    assert await store_breaker(scene.store, reset(await scene.stored()))
    assert await waiting <= 2.5 + WATCH_EVERY + LOOK_EVERY


@on_virtual_time
async def test_breakers_of_other_names_are_strangers(scene: Scene) -> None:
    await scene.fail(3)
    async with scene.here.call("another", SETTINGS, when_open=WhenOpen.FAIL):
        pass


@on_virtual_time
async def test_waiters_that_went_leave_nothing_behind(scene: Scene) -> None:
    await scene.fail(3)

    async def one() -> None:
        async with scene.here.call("b", SETTINGS):
            pass

    await asyncio.gather(*(one() for _ in range(10)))
    assert not any(scene.here._waiting.values())
