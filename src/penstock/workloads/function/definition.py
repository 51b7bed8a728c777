"""A Python function that has become a job, and the options of its definition and submission.

@app.job("job.text.shout", timeout=30, retries=3)
async def shout(text: str) -> str: ...

shout("hello")                                     # the plain function
shout.submit("hello")                              # a job
shout.options(priority="interactive").submit("hello")
"""

from __future__ import annotations

import copy
import datetime as dt
import functools
import inspect
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from msgspec.structs import asdict, replace

from penstock.core import check
from penstock.core.errors import InvalidRequest, MapInterrupted, Misconfigured, did_you_mean
from penstock.core.job import (
    NO_RETRY,
    ParentPolicy,
    Priority,
    RetryPolicy,
    TopicDefaults,
    Unique,
)
from penstock.workloads.function.context import current
from penstock.workloads.function.signature import Signature

if TYPE_CHECKING:
    from penstock.app.client import JobHandle

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)
E_contra = TypeVar("E_contra", contravariant=True)

_CHUNK = 1_000
"""Jobs that `map` submits at once."""
MIN_MEMORY, MAX_MEMORY = 1 << 20, 1 << 50

Errors = tuple[type[BaseException] | str, ...] | type[BaseException] | str
Arguments = Iterable[Sequence[Any] | Mapping[str, Any]]
"""For each job a tuple or a dict of arguments."""
Keys = Sequence[str] | None


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


class Submitter(Protocol):
    """Takes jobs whose inputs and options are checked already; answers with their handles."""

    def _submit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[JobHandle[Any]]: ...

    async def _asubmit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[JobHandle[Any]]: ...


class _Returns(Protocol[R_co]):
    """A JobFunction whose jobs return `R_co`, whether it is an `async def` or not."""

    @property
    def signature(self) -> Signature: ...

    def _returned(self) -> R_co: ...

    def _submit(self, payloads: Sequence[bytes], keys: Keys = None) -> list[JobHandle[Any]]: ...

    async def _asubmit(
        self, payloads: Sequence[bytes], keys: Keys = None
    ) -> list[JobHandle[Any]]: ...

    def _bind_all(self, inputs: Arguments) -> list[bytes]: ...


class Returns(_Returns[R_co], Protocol[P, R_co]):
    """The same, with the arguments that a caller gives."""

    fn: Callable[..., Any]
    topic: str
    mode: Mode

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...


class _Takes1(_Returns[R_co], Protocol[A_contra, R_co]):
    """What can be called with one argument: of this kind a function is for `map`."""

    def __call__(self, a: A_contra, /) -> Any: ...


class _Takes2(_Returns[R_co], Protocol[A_contra, B_contra, R_co]):
    def __call__(self, a: A_contra, b: B_contra, /) -> Any: ...


class _Takes3(_Returns[R_co], Protocol[A_contra, B_contra, C_contra, R_co]):
    def __call__(self, a: A_contra, b: B_contra, c: C_contra, /) -> Any: ...


class _Takes4(_Returns[R_co], Protocol[A_contra, B_contra, C_contra, D_contra, R_co]):
    def __call__(self, a: A_contra, b: B_contra, c: C_contra, d: D_contra, /) -> Any: ...


class _Takes5(_Returns[R_co], Protocol[A_contra, B_contra, C_contra, D_contra, E_contra, R_co]):
    def __call__(
        self, a: A_contra, b: B_contra, c: C_contra, d: D_contra, e: E_contra, /
    ) -> Any: ...


class JobFunction(Generic[P, R_co]):
    """A function with a topic. Called, it is the function; submitted, it is a job.

    `P` are the arguments that a caller gives, `R_co` is what a call returns: for an `async def`
    a coroutine of the job's result.
    """

    def __init__(
        self,
        fn: Callable[..., R_co],
        topic: str,
        mode: Mode,
        submitter: Callable[[], Submitter],
        defaults: TopicDefaults,
        memory_limit: int | None = None,
        *,
        ctx: bool = False,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.topic, self.mode = fn, topic, mode
        self.signature = Signature(fn)
        self.returns = self.signature.returns
        self.defaults = defaults
        self.memory_limit = memory_limit
        self._submitter = submitter
        self._gives_context = ctx
        plain = asdict(TopicDefaults())
        said = {name: value for name, value in asdict(defaults).items() if value != plain[name]}
        self._options = cast(SubmitOptions, said)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function here and now; nothing is submitted."""
        if self._gives_context:
            return self.fn(current(), *args, **kwargs)
        return self.fn(*args, **kwargs)

    if TYPE_CHECKING:

        @overload
        def _returned(self: JobFunction[P, Coroutine[Any, Any, T]]) -> T: ...
        @overload
        def _returned(self: JobFunction[P, T]) -> T: ...
        def _returned(self) -> Any:
            """What its jobs return, for type checkers."""

    def submit(self: Returns[P, T], *args: P.args, **kwargs: P.kwargs) -> JobHandle[T]:
        """Submit a job with these arguments. Raises InvalidRequest for a wrong one."""
        return self._submit((self.signature.bind(args, kwargs),))[0]

    async def asubmit(self: Returns[P, T], *args: P.args, **kwargs: P.kwargs) -> JobHandle[T]:
        return (await self._asubmit((self.signature.bind(args, kwargs),)))[0]

    def submit_many(
        self: _Returns[T], inputs: Arguments, *, keys: Keys = None
    ) -> Sequence[JobHandle[T]]:
        """Submit a job for each tuple or dict of arguments; all are checked before any is.

        `keys` are their idempotency keys, one for each.
        """
        return self._submit(self._bind_all(inputs), keys)

    async def asubmit_many(
        self: _Returns[T], inputs: Arguments, *, keys: Keys = None
    ) -> Sequence[JobHandle[T]]:
        return await self._asubmit(self._bind_all(inputs), keys)

    def map(self: _Takes1[A, T], items: Iterable[A]) -> list[JobHandle[T]]:
        """Submit a job for each item, which is its only argument.

        The items are read in chunks, and each chunk is submitted before the next is read. The
        handles hold ids alone. Raises MapInterrupted, with what was submitted, if an item is wrong
        or reading them fails after the first chunk.
        """
        return _mapped(self, ((item,) for item in items))

    async def amap(self: _Takes1[A, T], items: Iterable[A]) -> list[JobHandle[T]]:
        return await _amapped(self, ((item,) for item in items))

    @overload
    def starmap(self: _Takes2[A, B, T], items: Iterable[tuple[A, B]]) -> list[JobHandle[T]]: ...
    @overload
    def starmap(
        self: _Takes3[A, B, C, T], items: Iterable[tuple[A, B, C]]
    ) -> list[JobHandle[T]]: ...
    @overload
    def starmap(
        self: _Takes4[A, B, C, D, T], items: Iterable[tuple[A, B, C, D]]
    ) -> list[JobHandle[T]]: ...
    @overload
    def starmap(
        self: _Takes5[A, B, C, D, E, T], items: Iterable[tuple[A, B, C, D, E]]
    ) -> list[JobHandle[T]]: ...
    @overload
    def starmap(self: _Takes1[A, T], items: Iterable[tuple[A]]) -> list[JobHandle[T]]: ...
    def starmap(self: Any, items: Iterable[tuple[Any, ...]]) -> list[JobHandle[Any]]:
        """`map` for functions of several arguments: each item is a tuple of them."""
        return _mapped(self, items)

    @overload
    async def astarmap(
        self: _Takes2[A, B, T], items: Iterable[tuple[A, B]]
    ) -> list[JobHandle[T]]: ...
    @overload
    async def astarmap(
        self: _Takes3[A, B, C, T], items: Iterable[tuple[A, B, C]]
    ) -> list[JobHandle[T]]: ...
    @overload
    async def astarmap(
        self: _Takes4[A, B, C, D, T], items: Iterable[tuple[A, B, C, D]]
    ) -> list[JobHandle[T]]: ...
    @overload
    async def astarmap(
        self: _Takes5[A, B, C, D, E, T], items: Iterable[tuple[A, B, C, D, E]]
    ) -> list[JobHandle[T]]: ...
    @overload
    async def astarmap(self: _Takes1[A, T], items: Iterable[tuple[A]]) -> list[JobHandle[T]]: ...
    async def astarmap(self: Any, items: Iterable[tuple[Any, ...]]) -> list[JobHandle[Any]]:
        return await _amapped(self, items)

    def options(self, **options: Unpack[SubmitOptions]) -> Self:
        """The same function, submitted with these options."""
        variant = copy.copy(self)
        variant._options = cast(SubmitOptions, {**self._options, **checked(options)})
        return variant

    @property
    def submit_defaults(self) -> SubmitOptions:
        """The options with which its jobs are submitted, unless a caller says otherwise."""
        return self._options

    def __repr__(self) -> str:
        return f"<JobFunction {self.topic}: {getattr(self.fn, '__qualname__', self.fn)}>"

    def _submit(self, payloads: Sequence[bytes], keys: Keys = None) -> list[JobHandle[Any]]:
        options = with_keys(self._options, keys)
        return self._submitter()._submit_checked(self.topic, payloads, options)

    async def _asubmit(self, payloads: Sequence[bytes], keys: Keys = None) -> list[JobHandle[Any]]:
        options = with_keys(self._options, keys)
        return await self._submitter()._asubmit_checked(self.topic, payloads, options)

    def _bind_all(self, inputs: Arguments) -> list[bytes]:
        self._check_unnamed()
        return [self._bind_one(f"inputs[{index}]", given) for index, given in enumerate(inputs)]

    def _check_unnamed(self) -> None:
        for name in ("job_id", "key"):
            if name in self._options:
                raise InvalidRequest(name, "can't name more than one job")

    def _bind_one(self, field: str, given: Any) -> bytes:
        try:
            if isinstance(given, Mapping):
                return self.signature.bind((), given)
            if isinstance(given, tuple | list):
                return self.signature.bind(given, {})
        except InvalidRequest as wrong:
            field += wrong.field.removeprefix("input")
            raise InvalidRequest(field, wrong.problem, hint=wrong.hint) from None
        got = type(given).__name__
        raise InvalidRequest(field, f"expected a tuple or a dict of arguments, got {got}")


# -- mapping ----------------------------------------------------------------------


def _mapped(job: Any, items: Iterable[Any]) -> list[JobHandle[Any]]:
    mapping = _Mapping(job, items)
    with mapping.interrupted():
        while payloads := mapping.next_chunk():
            mapping.add(job._submit(payloads))
    return mapping.submitted


async def _amapped(job: Any, items: Iterable[Any]) -> list[JobHandle[Any]]:
    mapping = _Mapping(job, items)
    with mapping.interrupted():
        while payloads := mapping.next_chunk():
            mapping.add(await job._asubmit(payloads))
    return mapping.submitted


class _Mapping:
    """The items of one map, chunk by chunk."""

    def __init__(self, job: JobFunction[..., Any], items: Iterable[Any]) -> None:
        job._check_unnamed()
        self._job, self._items = job, enumerate(items)
        self.submitted: list[JobHandle[Any]] = []

    def next_chunk(self) -> list[bytes]:
        bind = self._job._bind_one
        return [bind(f"items[{index}]", item) for index, item in islice(self._items, _CHUNK)]

    def add(self, handles: Iterable[JobHandle[Any]]) -> None:
        self.submitted += [handle._by_id() for handle in handles]

    @contextmanager
    def interrupted(self) -> Generator[None]:
        """An error after the first chunk says what was submitted before it."""
        try:
            yield
        except Exception as error:
            if not self.submitted:
                raise
            raise MapInterrupted(self._job.topic, self.submitted, error) from error


# -- defining ---------------------------------------------------------------------


def make_function(
    fn: Callable[..., R],
    topic: str,
    submitter: Callable[[], Submitter],
    *,
    ctx: bool = False,
    **options: Unpack[JobOptions],
) -> JobFunction[..., R]:
    """Make a job of `fn`. Raises Misconfigured, naming what is wrong, while it is defined."""
    known = JobOptions.__annotations__
    try:
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
                options.get("retries", 0),
                options.get("retry_on", ()),
                options.get("retry_never", ()),
            ),
            priority=_priority("priority", options.get("priority", Priority.BATCH)),
            idempotent=_flag("idempotent", options.get("idempotent", False)),
        )
    except InvalidRequest as wrong:
        name = getattr(fn, "__qualname__", repr(fn))
        raise Misconfigured(f"the job {name}: {wrong.message}", hint=wrong.hint) from None
    made: JobFunction[..., R] = JobFunction(
        fn, topic, mode, submitter, defaults, memory_limit, ctx=ctx
    )
    if ctx and made.signature.context is None:
        name = getattr(fn, "__qualname__", repr(fn))
        raise Misconfigured(
            f"the job {name}: ctx=True, but its first parameter is not its Context",
            hint="annotate it: ctx: penstock.Context",
        )
    return made


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


# -- checking options -------------------------------------------------------------

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


def with_keys(options: Mapping[str, Any], keys: Keys) -> Mapping[str, Any]:
    """The options of many jobs, with a key for each."""
    if keys is None:
        return options
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
}
