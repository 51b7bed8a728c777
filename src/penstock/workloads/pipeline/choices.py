"""What may be said of a stage or a pipeline, read once. Each refusal says what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from penstock.core.errors import Misconfigured
from penstock.core.job import NO_RETRY, Retry, RetryPolicy
from penstock.core.quantity import parse_duration
from penstock.workloads.pipeline.records import OnChange, OnOrphan, WhenOpen
from penstock.workloads.pipeline.shape import Shape

_MODES = ("async", "thread", "process")


def name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", "")


def mode_of(stage: str, mode: str | None, shape: Shape) -> str:
    if mode is None:
        return "async" if shape.is_async else "thread"
    if mode not in _MODES:
        raise Misconfigured(f"stage {stage}: mode {mode!r} is none of {', '.join(_MODES)}")
    if shape.is_async is not (mode == "async"):
        other = "an async function" if shape.is_async else "a plain function"
        raise Misconfigured(f"stage {stage}: {other} can't run with mode={mode!r}")
    if mode == "process" and shape.is_generator:
        raise Misconfigured(
            f"stage {stage}: a generator can't run in a process", hint="return a list"
        )
    return mode


def policy_of(given: Retry | RetryPolicy | int | None) -> RetryPolicy:
    if isinstance(given, Retry):
        return given.policy
    if isinstance(given, int):
        return Retry(given).policy
    return given or NO_RETRY


def seconds(name: str, given: float | str | None) -> float | None:
    if given is None:
        return None
    try:
        length = parse_duration(given) if isinstance(given, str) else float(given)
    except ValueError as error:
        raise Misconfigured(f"{name}: {error}") from error
    if length < 0:
        raise Misconfigured(f"{name}: {given!r} is less than nothing")
    return length


def above_zero(stage: str, name: str, value: float) -> float:
    if value <= 0:
        raise Misconfigured(f"stage {stage}: {name} must be above 0")
    return float(value)


def at_least(stage: str, name: str, value: int, least: int) -> int:
    if value < least:
        raise Misconfigured(f"stage {stage}: {name} must be at least {least}")
    return value


C = TypeVar("C", OnChange, OnOrphan, WhenOpen)


def choice(kind: type[C], name: str, given: C | str) -> C:
    try:
        return kind(given)
    except ValueError:
        raise Misconfigured(f"{name}: {given!r} is none of {', '.join(kind)}") from None
