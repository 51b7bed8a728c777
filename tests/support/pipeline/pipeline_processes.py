"""Stages that run in processes of their own: another process must be able to import them."""

from __future__ import annotations

import os
import time
from typing import Any

from msgspec import Struct

from penstock.core.job import Retry
from penstock.workloads.pipeline.definition import Definition


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3)
    factor: int = 10


class Word(Struct):
    text: str


apart = Definition("apart", config=Config, cancel_grace=1.0)


@apart.map(over="numbers", mode="process", concurrency=2)
def elsewhere(number: int, ctx: Any) -> dict[str, Any]:
    ctx.log(f"at {ctx.key}")
    ctx.progress(0.5, "half")
    if number == 2:
        raise ValueError("two is not liked")
    return {
        "pid": os.getpid(),
        "number": number * ctx.config.factor,
        "known": [ctx.job_id, ctx.stage, ctx.key, ctx.attempt, ctx.cancelled()],
    }


@apart.step(mode="process")
def collect(results: Any) -> list[int]:
    return [result["number"] for result in results]


wrong = Definition("wrong", config=Config)


@wrong.step(mode="process")
def lacking(results: Any, ctx: Any) -> int:
    ctx.metric("nothing")
    return 1


def undecorated(results: Any) -> int:
    return 1


wrong.step(mode="process", name="unfound")(undecorated)

typed = Definition("typed", config=Config)


@typed.map(over="numbers", mode="process")
def words(number: int) -> Word:
    return Word("x" * number)


@typed.map(over=words, mode="process")
def length(word: Word) -> int:
    return len(word.text)


@typed.map(over=words, mode="process")
def liar(word: Word) -> str:
    return 5  # type: ignore[return-value]


sleepy = Definition("sleepy", config=Config, cancel_grace=0.4)


@sleepy.map(over="numbers", mode="process", concurrency=2)
def asleep(number: int, ctx: Any) -> int:
    ctx.log(f"pid {os.getpid()}")
    time.sleep(60)
    return number


late = Definition("late", config=Config, cancel_grace=0.2)


@late.step(mode="process", timeout=0.5)
def too_long(results: Any, ctx: Any) -> int:
    time.sleep(60)
    return 1


flaky = Definition("flaky", config=Config)


@flaky.step(mode="process", retry=Retry(2, delay=0.01))
def third_time(results: Any, ctx: Any) -> int:
    if ctx.attempt < 3:
        raise ConnectionError("not yet")
    return int(ctx.attempt)
