"""Turns at a rate, and waiting that a cancel ends."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.job import Cancelled
from penstock.ports.clock import SystemClock
from penstock.ports.executor import CancelToken
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock, VirtualClock, VirtualLoop
from penstock.workloads.pipeline.pacing import Pace, pause


def virtually(go: Callable[[LoopClock], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(go(LoopClock(loop)))
    finally:
        loop.close()


def on_virtual_time(test: Callable[[LoopClock], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        virtually(test)

    run.__name__ = test.__name__
    return run


# -- pace ---------------------------------------------------------------------------------


@on_virtual_time
async def test_callers_at_once_go_evenly_in_the_order_they_came(clock: LoopClock) -> None:
    pace = Pace(4.0, clock)
    went: list[tuple[int, float]] = []

    async def one(number: int) -> None:
        await pace.turn()
        went.append((number, clock.monotonic()))

    await asyncio.gather(*(one(number) for number in range(9)))
    assert [number for number, _ in went] == list(range(9))
    assert [at for _, at in went] == pytest.approx([0.25 * number for number in range(9)])


@on_virtual_time
async def test_time_that_nobody_used_is_not_saved_up(clock: LoopClock) -> None:
    pace = Pace(2.0, clock)
    await clock.sleep(100)
    began = clock.monotonic()
    for _ in range(3):
        await pace.turn()
    assert clock.monotonic() - began == pytest.approx(1.0)


@on_virtual_time
async def test_slow_callers_never_wait(clock: LoopClock) -> None:
    pace = Pace(10.0, clock)
    for number in range(5):
        await pace.turn()
        assert clock.monotonic() == pytest.approx(number)
        await clock.sleep(1)


@on_virtual_time
async def test_a_newcomer_does_not_overtake_the_line(clock: LoopClock) -> None:
    pace = Pace(1.0, clock)
    went: list[str] = []

    async def one(name: str) -> None:
        await pace.turn()
        went.append(name)

    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(one(name))
        await clock.sleep(1.0)  # the very moment at which b is due
        group.create_task(one("late"))
    assert went == ["a", "b", "c", "late"]


@on_virtual_time
async def test_a_cancel_wakes_the_whole_line_at_once(clock: LoopClock) -> None:
    pace, cancel = Pace(0.1, clock), CancelToken()
    turns = [asyncio.ensure_future(pace.turn(cancel)) for _ in range(5)]
    await clock.sleep(3)
    cancel.request("enough")
    ends = await asyncio.gather(*turns, return_exceptions=True)
    assert ends[0] is None
    assert [str(end) for end in ends[1:]] == ["enough"] * 4
    assert clock.monotonic() == pytest.approx(3)
    with pytest.raises(Cancelled):
        await pace.turn(cancel)


@pytest.mark.parametrize("leaves", [1, 2, 3])
def test_who_gives_up_leaves_no_gap(leaves: int) -> None:
    async def go(clock: LoopClock) -> None:
        pace = Pace(1.0, clock)
        went: list[float] = []

        async def one() -> None:
            await pace.turn()
            went.append(clock.monotonic())

        tasks = [asyncio.ensure_future(one()) for _ in range(5)]
        await clock.sleep(0.5)
        tasks[leaves].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert went == pytest.approx([0, 1, 2, 3])

    virtually(go)


@run_async
async def test_a_timer_that_is_late_does_not_slow_the_rest_down() -> None:
    clock = VirtualClock()
    pace = Pace(1.0, clock)
    await pace.turn()
    went: list[float] = []

    async def one() -> None:
        await pace.turn()
        went.append(clock.monotonic())

    tasks = [asyncio.ensure_future(one()) for _ in range(3)]
    for step in (1.4, 0.6, 1.0):
        for _ in range(20):
            await asyncio.sleep(0)
        clock.advance(step)
    await asyncio.gather(*tasks)
    assert went == pytest.approx([1.4, 2.0, 3.0])


@settings(deadline=None)
@given(
    st.floats(0.5, 50),
    st.lists(st.floats(0, 2), min_size=1, max_size=30),
)
def test_no_two_turns_are_closer_than_the_rate_allows(rate: float, arrivals: list[float]) -> None:
    went: list[float] = []

    async def go(clock: LoopClock) -> None:
        pace = Pace(rate, clock)

        async def one(arrival: float) -> None:
            await clock.sleep(arrival)
            await pace.turn()
            went.append(clock.monotonic())

        await asyncio.gather(*(one(arrival) for arrival in arrivals))

    virtually(go)
    gaps = [later - sooner for sooner, later in itertools.pairwise(went)]
    assert len(went) == len(arrivals)
    assert all(gap >= 1 / rate - 1e-6 for gap in gaps)
    # Nobody waited longer than if all had come at the last moment.
    assert went[-1] <= max(arrivals) + (len(arrivals) - 1) / rate + 1e-6


# -- waiting ------------------------------------------------------------------------------


@on_virtual_time
async def test_a_pause_lasts_as_long_as_it_should(clock: LoopClock) -> None:
    await pause(clock, 5, CancelToken())
    await pause(clock, 5)
    assert clock.monotonic() == pytest.approx(10)


@on_virtual_time
async def test_a_pause_ends_when_it_is_woken_and_leaves_no_sleeper(clock: LoopClock) -> None:
    loop = asyncio.get_running_loop()
    wake: asyncio.Future[None] = loop.create_future()
    loop.call_later(2, wake.set_result, None)
    await pause(clock, 5, CancelToken(), wake)
    assert clock.monotonic() == pytest.approx(2)
    assert len(asyncio.all_tasks()) == 1


@on_virtual_time
async def test_a_pause_whose_task_is_cancelled_leaves_no_sleeper(clock: LoopClock) -> None:
    wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(pause(clock, 5, CancelToken(), wake))
    await clock.sleep(1)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert not wake.done()
    assert len(asyncio.all_tasks()) == 1


@run_async
async def test_a_pause_is_ended_by_a_cancel_from_a_thread() -> None:
    token = CancelToken()
    waiting = asyncio.ensure_future(pause(SystemClock(), 50, token))
    await asyncio.sleep(0)
    thread = threading.Thread(target=token.request, args=("from a thread",))
    thread.start()
    with pytest.raises(Cancelled, match="from a thread"):
        await asyncio.wait_for(waiting, 20)
    thread.join()


def test_a_token_tells_its_listeners_once_and_those_that_come_late_at_once() -> None:
    token, heard = CancelToken(), list[str]()
    token.when_requested(lambda: heard.append("a"))
    token.when_requested(lambda: heard.append("b"))()
    assert heard == []
    token.request("first")
    token.request("second")
    assert heard == ["a"]
    token.when_requested(lambda: heard.append("late"))()
    assert heard == ["a", "late"]


def test_a_listener_of_a_closed_loop_harms_nobody() -> None:
    token = CancelToken()
    loop = asyncio.new_event_loop()
    task = loop.create_task(pause(SystemClock(), 50, token))
    loop.call_later(0, loop.stop)
    loop.run_forever()
    listeners = list(token._listeners or ())
    task.cancel()
    loop.run_until_complete(asyncio.wait((task,)))
    loop.close()
    assert len(listeners) == 1
    listeners[0]()
