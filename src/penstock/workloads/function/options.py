"""The options of a job's definition and of its submission, and their checks."""

from __future__ import annotations

import datetime as dt
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol, TypedDict

from msgspec.structs import replace

from penstock.core import check
from penstock.core.errors import InvalidRequest, did_you_mean
from penstock.core.job import (
    NO_RETRY,
    ParentPolicy,
    Priority,
    RetryPolicy,
    TopicDefaults,
    Unique,
)

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


class HasJobId(Protocol):
    """Anything with the id of a job, such as a JobHandle or a Job."""

    @property
    def job_id(self) -> str: ...


JobLike = str | HasJobId
PriorityLike = Priority | Literal["critical", "interactive", "batch"]


class JobOptions(TypedDict, total=False):
    """What `@app.job` may say of a function and of every job that it makes."""

    timeout: float | dt.timedelta | None
    retries: int | RetryPolicy
    retry_on: Errors
    retry_never: Errors
    priority: PriorityLike
    idempotent: bool
    mode: Mode | Literal["async", "thread", "process"] | None
    """None: async for an `async def`, a thread for any other function."""
    memory_limit: int | None
    """Bytes that a job may take beyond what its process had before; process mode only."""


class SubmitOptions(TypedDict, total=False):
    """What a caller may say of one job."""

    job_id: str
    key: str
    """An idempotency key: the same key, the same job."""
    fresh: bool
    """Inside a job: a new job each time, also if the same was submitted by an earlier attempt."""
    priority: PriorityLike
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
    parent: JobLike
    """The job that it is a child of: a job_id, or anything that has one."""
    detached: bool
    """It goes on when the job that it is a child of ends without success."""
    adapter_id: str
    dispatch_timeout: float | dt.timedelta
    after: JobLike | Iterable[JobLike]
    """Jobs that must have ended first: job_ids, or things that have one, or a list of such."""
    if_parent_fails: ParentPolicy | Literal["cancel", "run"]
    """What to do if one of them does not succeed: 'cancel' (the default) or 'run'."""
    unique: Unique | str
    """A key: while a job with it waits or runs, the same is answered with that job."""
    capability: str
    risk_tags: Iterable[str]
    estimated_cost: float
    traceparent: str
    """W3C trace context; by default that of the current OpenTelemetry span."""


# -- a definition -----------------------------------------------------------------


def checked_definition(
    fn: Any, topic: str, options: JobOptions
) -> tuple[Mode, int | None, TopicDefaults]:
    """Where a function runs, within how much memory, and what its jobs have if nothing else is
    said. Raises InvalidRequest with the option that is wrong."""
    known = JobOptions.__annotations__
    for name in options:
        if name not in known:
            raise InvalidRequest(name, "unexpected", hint=did_you_mean(name, known))
    _topic("topic", topic)
    mode = _mode(fn, options.get("mode"))
    memory_limit = _memory(options.get("memory_limit"), mode)
    timeout = options.get("timeout")
    defaults = TopicDefaults(
        timeout=None if timeout is None else _seconds("timeout", timeout),
        retry=_retries(
            options.get("retries", 0), options.get("retry_on", ()), options.get("retry_never", ())
        ),
        priority=_priority("priority", options.get("priority", Priority.BATCH)),
        idempotent=_flag("idempotent", options.get("idempotent", False)),
    )
    return mode, memory_limit, defaults


def _mode(fn: Any, asked: Mode | str | None) -> Mode:
    if not callable(fn) or inspect.isclass(fn):
        raise InvalidRequest("function", f"a job is a function, not a {type(fn).__name__}")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise InvalidRequest(
            "function",
            "a job returns its result and can't be a generator",
            hint="return a list, or report parts with ctx.progress",
        )
    is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(fn.__call__)
    if asked is None:
        return Mode.ASYNC if is_async else Mode.THREAD
    mode = Mode(_member(Mode, "mode")("mode", asked))
    if is_async != (mode is Mode.ASYNC):
        kind = "an async def runs in mode async" if is_async else "mode async needs an async def"
        raise InvalidRequest("mode", f"{mode}: {kind}")
    if mode is Mode.PROCESS and not (inspect.isfunction(fn) and "<" not in fn.__qualname__):
        raise InvalidRequest(
            "mode",
            "process: another process can't import this",
            hint="define the function with def at the top of a module",
        )
    return mode


def _memory(limit: int | None, mode: Mode) -> int | None:
    if limit is None:
        return None
    if mode is not Mode.PROCESS:
        raise InvalidRequest("memory_limit", f"mode {mode} has none", hint="use mode='process'")
    return int(_integer(MIN_MEMORY, MAX_MEMORY)("memory_limit", limit))


def _retries(retries: int | RetryPolicy, on: Errors, never: Errors) -> RetryPolicy:
    """The policy that a definition's `retries`, `retry_on` and `retry_never` describe."""
    if isinstance(retries, RetryPolicy):
        policy = retries
    else:
        policy = RetryPolicy(retries=_integer(0, check.MAX_RETRIES)("retries", retries))
    if on or never:
        policy = replace(
            policy,
            on=policy.on + _error_names("retry_on", on),
            never=policy.never + _error_names("retry_never", never),
        )
    check.check_retry(policy)
    return NO_RETRY if policy == NO_RETRY else policy


def kinds(error: type[BaseException]) -> tuple[str, ...]:
    """Every name by which a RetryPolicy may know an exception, most special first."""
    names: list[str] = []
    for cls in error.__mro__[:-1]:
        names += (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
    return tuple(dict.fromkeys(names))


def _error_names(option: str, errors: Errors) -> tuple[str, ...]:
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


# -- a submission -----------------------------------------------------------------

Checker = Callable[[str, Any], Any]
"""Gives an option's value as a Submitter takes it; raises InvalidRequest with its name."""


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as a Submitter takes them: plain numbers, strings and dicts."""
    result = {}
    for name, value in options.items():
        if (checker := _CHECKERS.get(name)) is None:
            raise InvalidRequest(name, "unexpected", hint=did_you_mean(name, _CHECKERS))
        result[name] = checker(name, value)
    return result


def with_keys(options: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The options of many jobs, with a key for each."""
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise _expected("keys", "a list of str", keys)
    return {**options, "keys": [_text(f"keys[{n}]", key) for n, key in enumerate(keys)]}


def _expected(field: str, what: str, value: Any) -> InvalidRequest:
    return InvalidRequest(field, f"expected {what}, got {type(value).__name__}")


def _instance(kind: type, check: Callable[[str, Any], None] | None = None) -> Checker:
    def checker(field: str, value: Any) -> Any:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _expected(field, kind.__name__, value)
        if check is not None:
            check(field, value)
        return str(value) if kind is str else value

    return checker


def _integer(low: int, high: int) -> Checker:
    return _instance(int, lambda field, value: check.check_number(field, value, low, high))


def _number(low: float, high: float) -> Checker:
    """A number of seconds, or of anything else; a timedelta will do."""

    def checker(field: str, value: Any) -> float:
        if isinstance(value, dt.timedelta):
            value = value.total_seconds()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _expected(field, "a number", value)
        check.check_number(field, value, low, high)
        return value

    return checker


def _moment(field: str, value: Any) -> float:
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            raise InvalidRequest(field, f"{value} has no time zone")
        value = value.timestamp()
    seconds: float = _amount(field, value)
    return seconds


def _member(kind: type[StrEnum], what: str) -> Checker:
    def checker(field: str, value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError:
            hint = ", ".join(kind)
            raise InvalidRequest(field, f"{value!r} is not a {what}", hint=hint) from None

    return checker


def _job(field: str, value: Any) -> str:
    return str(_id(field, getattr(value, "job_id", value)))


def _jobs(field: str, value: Any) -> tuple[str, ...]:
    many = value if isinstance(value, list | tuple | set | frozenset) else (value,)
    return tuple(_job(f"{field}[{index}]", one) for index, one in enumerate(many))


def _pairs(field: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _expected(field, "a mapping", value)
    for key, item in value.items():
        _text(f"{field} key {key!r}", key)
        _text(f"{field}.{key}", item)
    check.check_pairs(field, value)
    return dict(value)


def _unique(field: str, value: Any) -> Unique:
    if isinstance(value, str):
        return Unique(value)
    if not isinstance(value, Unique):
        raise _expected(field, "str or Unique", value)
    return value


def _tags(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise _expected(field, "a list of str", value)
    return tuple(_name(f"{field}[{index}]", tag) for index, tag in enumerate(value))


_text, _flag = _instance(str), _instance(bool)
_id, _name = _instance(str, check.check_id), _instance(str, check.check_name)
_topic = _instance(str, lambda _, topic: check.check_topic(topic))
_amount = _number(0, 1e12)
_seconds = _number(0.001, check.MAX_TIMEOUT)
_priority = _member(Priority, "priority")

_CHECKERS: dict[str, Checker] = {
    "job_id": _id,
    "key": _text,
    "fresh": _flag,
    "priority": _priority,
    "timeout": _seconds,
    "run_at": _moment,
    "delay": _number(0, check.MAX_WAIT),
    "deadline": _moment,
    "retry": _instance(RetryPolicy, lambda _, policy: check.check_retry(policy)),
    "idempotent": _flag,
    "labels": _pairs,
    "env": _pairs,
    "tenant": _name,
    "workflow_id": _id,
    "step_index": _integer(0, 1_000_000_000),
    "parent": _job,
    "detached": _flag,
    "adapter_id": _name,
    "dispatch_timeout": _seconds,
    "after": _jobs,
    "if_parent_fails": _member(ParentPolicy, "policy"),
    "unique": _unique,
    "capability": _name,
    "risk_tags": _tags,
    "estimated_cost": _amount,
    "traceparent": _text,
}
