"""What can be said about a job beside its input: when it is defined, and when it is
submitted. Each refusal names the option.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, TypedDict

from msgspec import Struct
from msgspec.structs import replace

from penstock.core import check
from penstock.core.errors import InvalidRequest
from penstock.core.job import NO_RETRY, ParentPolicy, Priority, RetryPolicy, Unique
from penstock.workloads.function.problems import nearest

MIN_MEMORY, MAX_MEMORY = 1 << 20, 1 << 50

Errors = tuple[type[BaseException] | str, ...] | type[BaseException] | str


class Mode(StrEnum):
    """Where a function runs."""

    ASYNC = "async"
    """In the worker's event loop: an `async def`."""
    THREAD = "thread"
    """In a thread of the worker; it can be asked to end, but not made to."""
    PROCESS = "process"
    """In a process of its own, which can be killed."""


class JobOptions(Struct, frozen=True, kw_only=True):
    """What a function's definition says of every job it makes."""

    topic: str
    timeout: float | None = None
    retry: RetryPolicy = NO_RETRY
    priority: Priority = Priority.BATCH
    idempotent: bool = False
    mode: Mode = Mode.THREAD
    memory_limit: int | None = None
    """Bytes that a job may take beyond what its process had before; process mode only."""


class Definition(TypedDict, total=False):
    """What a decorator may say of a function; `JobOptions` is what it comes to."""

    timeout: float | dt.timedelta | None
    retries: int | RetryPolicy
    retry_on: Errors
    retry_never: Errors
    priority: Priority | str
    idempotent: bool
    mode: Mode | str | None
    """None: async for an `async def`, a thread for any other function."""
    memory_limit: int | None


class SubmitOptions(TypedDict, total=False):
    """What a caller may say of one job."""

    job_id: str
    key: str
    """An idempotency key: the same key, the same job."""
    priority: Priority | str
    timeout: float | dt.timedelta
    run_at: float | dt.datetime
    delay: float | dt.timedelta
    deadline: float | dt.datetime
    retry: RetryPolicy
    idempotent: bool
    labels: Mapping[str, str]
    env: Mapping[str, str]
    tenant: str
    workflow_id: str
    step_index: int
    parent: Any
    """A job_id, or anything that has one."""
    adapter_id: str
    dispatch_timeout: float | dt.timedelta
    after: Any
    """Jobs that must have ended first: job_ids, or things that have one, or a list of such."""
    if_parent_fails: ParentPolicy | str
    """What to do if one of them does not succeed: 'cancel' (the default) or 'run'."""
    unique: Unique | str
    """A key: while a job with it waits or runs, the same is answered with that job."""
    capability: str
    risk_tags: Iterable[str]
    estimated_cost: float


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a Submitter takes them: plain numbers, strings and dicts."""
    result = {}
    for name, value in options.items():
        if (checker := _CHECKERS.get(name)) is None:
            raise InvalidRequest(name, "unexpected", hint=nearest(name, tuple(_CHECKERS)))
        result[name] = checker(name, value)
    return result


def retry_policy(retries: int | RetryPolicy, on: Errors, never: Errors) -> RetryPolicy:
    """The policy that a definition's `retries`, `retry_on` and `retry_never` describe."""
    if isinstance(retries, RetryPolicy):
        policy = retries
    else:
        policy = RetryPolicy(retries=integer("retries", retries, 0, check.MAX_RETRIES))
    if on or never:
        policy = replace(
            policy,
            on=policy.on + _names("retry_on", on),
            never=policy.never + _names("retry_never", never),
        )
    check.check_retry(policy)
    return NO_RETRY if policy == NO_RETRY else policy


def kinds(error: type[BaseException]) -> tuple[str, ...]:
    """Every name by which a RetryPolicy may know an exception, most special first."""
    names: list[str] = []
    for cls in error.__mro__[:-1]:
        names += (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return tuple(dict.fromkeys(names))


def _names(option: str, errors: Errors) -> tuple[str, ...]:
    several: Iterable[Any] = errors if isinstance(errors, tuple | list | set) else (errors,)
    return tuple(_error_name(option, error) for error in several)


def _error_name(option: str, error: Any) -> str:
    if isinstance(error, str):
        return error
    if isinstance(error, type) and issubclass(error, BaseException):
        # A script's classes live in __main__ here and elsewhere in a worker.
        if error.__module__ in ("builtins", "__main__", "__mp_main__"):
            return error.__name__
        return f"{error.__module__}.{error.__qualname__}"
    raise InvalidRequest(option, f"{error!r} is neither an exception class nor an error code")


def number(field: str, value: Any, low: float, high: float) -> float:
    """A number of seconds, or of anything else; a timedelta will do."""
    if isinstance(value, dt.timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, f"expected a number, got {type(value).__name__}")
    check.check_number(field, value, low, high)
    return value


def integer(field: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"expected int, got {type(value).__name__}")
    check.check_number(field, value, low, high)
    return value


def text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, f"expected str, got {type(value).__name__}")
    return value


def flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(field, f"expected bool, got {type(value).__name__}")
    return value


def seconds(field: str, value: Any) -> float:
    """How long something may run."""
    return number(field, value, 0.001, check.MAX_TIMEOUT)


def priority(field: str, value: Any) -> Priority:
    try:
        return Priority(value)
    except ValueError:
        allowed = ", ".join(Priority)
        raise InvalidRequest(field, f"{value!r} is not a priority", hint=allowed) from None


def topic(value: Any) -> str:
    check.check_topic(text("topic", value))
    return str(value)


def _wait(field: str, value: Any) -> float:
    return number(field, value, 0, check.MAX_WAIT)


def _moment(field: str, value: Any) -> float:
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            raise InvalidRequest(field, f"{value} has no time zone")
        value = value.timestamp()
    return number(field, value, 0, 1e12)


def _id(field: str, value: Any) -> str:
    check.check_id(field, text(field, value))
    return str(value)


def _name(field: str, value: Any) -> str:
    check.check_name(field, text(field, value))
    return str(value)


def _parent(field: str, value: Any) -> str:
    return _id(field, getattr(value, "job_id", value))


def _pairs(field: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(field, f"expected a mapping, got {type(value).__name__}")
    for key, item in value.items():
        text(f"{field} key {key!r}", key)
        text(f"{field}.{key}", item)
    check.check_pairs(field, value)
    return dict(value)


def _several(field: str, value: Any) -> tuple[str, ...]:
    many = value if isinstance(value, list | tuple | set | frozenset) else (value,)
    return tuple(_parent(f"{field}[{index}]", one) for index, one in enumerate(many))


def _parent_policy(field: str, value: Any) -> ParentPolicy:
    try:
        return ParentPolicy(value)
    except ValueError:
        hint = ", ".join(ParentPolicy)
        raise InvalidRequest(field, f"{value!r} is no way to go on", hint=hint) from None


def _unique(field: str, value: Any) -> Unique:
    if isinstance(value, str):
        return Unique(value)
    if not isinstance(value, Unique):
        raise InvalidRequest(field, f"expected str or Unique, got {type(value).__name__}")
    return value


def _tags(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(field, f"expected a list of str, got {type(value).__name__}")
    return tuple(_name(f"{field}[{index}]", tag) for index, tag in enumerate(value))


def _retry(field: str, value: Any) -> RetryPolicy:
    if not isinstance(value, RetryPolicy):
        raise InvalidRequest(field, f"expected RetryPolicy, got {type(value).__name__}")
    check.check_retry(value)
    return value


_CHECKERS: dict[str, Callable[[str, Any], Any]] = {
    "job_id": _id,
    "key": text,
    "priority": priority,
    "timeout": seconds,
    "run_at": _moment,
    "delay": _wait,
    "deadline": _moment,
    "retry": _retry,
    "idempotent": flag,
    "labels": _pairs,
    "env": _pairs,
    "tenant": _name,
    "workflow_id": _id,
    "step_index": lambda field, value: integer(field, value, 0, 1_000_000_000),
    "parent": _parent,
    "adapter_id": _name,
    "dispatch_timeout": seconds,
    "after": _several,
    "if_parent_fails": _parent_policy,
    "unique": _unique,
    "capability": _name,
    "risk_tags": _tags,
    "estimated_cost": lambda field, value: number(field, value, 0, 1e12),
}
