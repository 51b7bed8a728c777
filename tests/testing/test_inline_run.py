"""`penstock.testing.run`: a job function, run in-line as a worker would run it."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from dataclasses import dataclass
from typing import Any

import pytest

import penstock
from penstock.testing import RecordingContext, arun, run
from penstock.testing.aio import run_async

app = penstock.App()


@dataclass
class Order:
    count: int
    when: dt.date


@app.job("job.total", retries=3)
def total(prices: list[int], discount: float = 0.0) -> int:
    if not prices:
        raise ValueError("nothing to add up")
    return round(sum(prices) * (1 - discount))


@app.job("job.order")
def kind_of(order: Order) -> str:
    return f"{type(order).__name__} of {order.count} on {order.when:%A}"


@app.job("job.unstorable")
def unstorable() -> object:
    return object()


@app.job("job.tuple")
def pair() -> list[int]:
    return (1, 2)  # type: ignore[return-value]


@app.job("job.tomorrow")
def tomorrow(day: dt.date) -> Order:
    return Order(1, day + dt.timedelta(days=1))


@app.job("job.wrong")
def wrong() -> int:
    return "1"  # type: ignore[return-value]


@app.job("job.told", timeout=30, ctx=True)
async def told(ctx: penstock.Context, name: str) -> str:
    ctx.progress(0.5, "half")
    ctx.log("begins")
    logging.getLogger("shop").warning("careful, %s", name)
    await ctx.checkpoint([penstock.Step(name="page", n=1, output="1")])
    await asyncio.sleep(0)
    assert penstock.current() is ctx
    return f"{ctx.request.topic} {ctx.request.labels.get('shop')} {ctx.attempt}"


def test_a_function_is_run_and_its_result_returned() -> None:
    assert run(total, [100, 200], discount=0.5) == 150


def test_arguments_are_checked_as_at_submit() -> None:
    with pytest.raises(penstock.InvalidRequest) as refused:
        run(total, "100")  # type: ignore[call-overload]
    assert refused.value.field == "input.prices"
    with pytest.raises(penstock.InvalidRequest, match="discuont: unexpected"):
        run(total, [1], discuont=1)  # type: ignore[call-arg]


def test_arguments_are_encoded_and_decoded() -> None:
    assert run(kind_of, Order(2, dt.date(2026, 3, 1))) == "Order of 2 on Sunday"
    as_json: Any = {"count": 2, "when": "2026-03-01"}
    assert run(kind_of, as_json) == "Order of 2 on Sunday"


def test_a_result_is_encoded_and_decoded() -> None:
    assert run(pair) == [1, 2]
    assert run(tomorrow, dt.date(2026, 2, 28)) == Order(1, dt.date(2026, 3, 1))
    with pytest.raises(penstock.InvalidRequest, match="result"):
        run(unstorable)
    with pytest.raises(penstock.InvalidRequest, match="result"):
        run(wrong)


def test_what_the_function_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="nothing to add up"):
        run(total, [])


def test_an_async_function_is_run_to_its_end() -> None:
    assert run(told, "x") == "job.told None 1"


@run_async
async def test_arun_runs_in_the_event_loop_of_the_test() -> None:
    assert await arun(told, "x") == "job.told None 1"
    assert await arun(total, [1, 2]) == 3


@run_async
async def test_run_in_an_event_loop_says_what_to_use_instead() -> None:
    with pytest.raises(RuntimeError, match="await arun"):
        run(told, "x")


def test_what_a_job_reports_is_recorded() -> None:
    ctx = RecordingContext(attempt=2)
    assert ctx.run(told.options(labels={"shop": "east"}), "x") == "job.told east 2"
    assert ctx.progressed == [(0.5, "half")]
    assert ctx.lines == [("info", "begins"), ("warning", "careful, x")]
    assert [step.output for step in ctx.checkpointed.values()] == ["1"]


def test_a_job_can_be_cancelled_before_it_runs() -> None:
    stopping = penstock.App()

    @stopping.job("job.stop", ctx=True)
    def stop(ctx: penstock.Context) -> None:
        ctx.cancel.raise_if_requested()

    ctx = RecordingContext()
    ctx.cancel.request("enough")
    with pytest.raises(penstock.Cancelled, match="enough"):
        ctx.run(stop)


def test_no_job_runs_when_it_has_ended() -> None:
    run(total, [1])
    with pytest.raises(penstock.PenstockError, match="no job is running here"):
        penstock.current()
