"""A Python function that has become a job.

@app.job("job.text.shout", timeout=30, retries=3)
async def shout(text: str) -> str: ...

shout("hello")                                     # the plain function
shout.submit("hello")                              # a job
shout.options(priority="interactive").submit("hello")
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, overload

from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.core.job import NO_RETRY, Priority
from penstock.ports.executor import Context
from penstock.workloads.function import options as option
from penstock.workloads.function.options import Definition, JobOptions, Mode, SubmitOptions
from penstock.workloads.function.problems import nearest
from penstock.workloads.function.signature import Signature

P = ParamSpec("P")
R = TypeVar("R")

_DEFINABLE = tuple(Definition.__annotations__)


class Submitter(Protocol):
    """Where jobs are handed in. The input has been checked against the signature."""

    def submit(
        self, topic: str, input: Mapping[str, Any], **options: Unpack[SubmitOptions]
    ) -> Any: ...

    async def asubmit(
        self, topic: str, input: Mapping[str, Any], **options: Unpack[SubmitOptions]
    ) -> Any: ...

    def submit_many(
        self, topic: str, inputs: Sequence[Mapping[str, Any]], **options: Unpack[SubmitOptions]
    ) -> Any: ...

    async def asubmit_many(
        self, topic: str, inputs: Sequence[Mapping[str, Any]], **options: Unpack[SubmitOptions]
    ) -> Any: ...


class JobFunction(Generic[P, R]):
    """A function with a topic. Called, it is the function; submitted, it is a job."""

    def __init__(
        self,
        fn: Callable[..., R],
        signature: Signature,
        defaults: JobOptions,
        submitter: Callable[[], Submitter],
        chosen: Mapping[str, Any] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.signature = signature
        self.defaults = defaults
        self.topic = defaults.topic
        self.mode = defaults.mode
        self._submitter = submitter
        self._options: SubmitOptions = {**_said(defaults), **(chosen or {})}  # type: ignore[typeddict-item]

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Run the function here and now; nothing is submitted."""
        return self.fn(*args, **kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Submit a job with these arguments. Raises InvalidRequest for a wrong one."""
        bound = self.signature.bind(args, kwargs)
        return self._submitter().submit(self.topic, bound, **self._options)

    async def asubmit(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        bound = self.signature.bind(args, kwargs)
        return await self._submitter().asubmit(self.topic, bound, **self._options)

    def submit_many(self, inputs: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Any:
        """Submit a job for each tuple or dict of arguments; all are checked before any is."""
        bound = self._bind_all(inputs)
        return self._submitter().submit_many(self.topic, bound, **self._options)

    async def asubmit_many(self, inputs: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Any:
        bound = self._bind_all(inputs)
        return await self._submitter().asubmit_many(self.topic, bound, **self._options)

    def options(self, **options: Unpack[SubmitOptions]) -> JobFunction[P, R]:
        """The same function, submitted with these options."""
        chosen = {**self._options, **option.checked(options)}
        return JobFunction(self.fn, self.signature, self.defaults, self._submitter, chosen)

    @property
    def submit_defaults(self) -> SubmitOptions:
        """The options with which its jobs are submitted, unless a caller says otherwise."""
        return self._options

    def __repr__(self) -> str:
        return f"<JobFunction {self.topic}: {getattr(self.fn, '__qualname__', self.fn)}>"

    def _bind_all(
        self, inputs: Iterable[Sequence[Any] | Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        for name in ("job_id", "key"):
            if name in self._options:
                raise InvalidRequest(name, "can't name more than one job")
        return [self._bind_one(index, given) for index, given in enumerate(inputs)]

    def _bind_one(self, index: int, given: Any) -> dict[str, Any]:
        try:
            if isinstance(given, Mapping):
                return self.signature.bind((), given)
            if isinstance(given, tuple | list):
                return self.signature.bind(given, {})
        except InvalidRequest as wrong:
            field = f"inputs[{index}]{wrong.field.removeprefix('input')}"
            raise InvalidRequest(field, wrong.problem, hint=wrong.hint) from None
        raise InvalidRequest(
            f"inputs[{index}]",
            f"expected a tuple or a dict of arguments, got {type(given).__name__}",
        )


@overload
def make_function(
    fn: Callable[Concatenate[Context, P], R],
    topic: str,
    submitter: Callable[[], Submitter],
    **definition: Unpack[Definition],
) -> JobFunction[P, R]: ...
@overload
def make_function(
    fn: Callable[P, R],
    topic: str,
    submitter: Callable[[], Submitter],
    **definition: Unpack[Definition],
) -> JobFunction[P, R]: ...
def make_function(
    fn: Callable[..., R],
    topic: str,
    submitter: Callable[[], Submitter],
    **definition: Unpack[Definition],
) -> JobFunction[..., R]:
    """Make a job of `fn`. Raises Misconfigured, naming what is wrong, while it is defined."""
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        defaults = _defaults(fn, topic, definition)
    except InvalidRequest as wrong:
        raise Misconfigured(f"the job {name}: {wrong.message}", hint=wrong.hint) from None
    return JobFunction(fn, Signature(fn), defaults, submitter)


def _defaults(fn: Any, topic: str, said: Definition) -> JobOptions:
    for name in said:
        if name not in _DEFINABLE:
            raise InvalidRequest(name, "unexpected", hint=nearest(name, _DEFINABLE))
    timeout, mode = said.get("timeout"), _mode(fn, said.get("mode"))
    return JobOptions(
        topic=option.topic(topic),
        timeout=None if timeout is None else option.seconds("timeout", timeout),
        retry=option.retry_policy(
            said.get("retries", 0), said.get("retry_on", ()), said.get("retry_never", ())
        ),
        priority=option.priority("priority", said.get("priority", Priority.BATCH)),
        idempotent=option.flag("idempotent", said.get("idempotent", False)),
        mode=mode,
        memory_limit=_memory(said.get("memory_limit"), mode),
    )


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
    try:
        mode = Mode(asked)
    except ValueError:
        allowed = ", ".join(Mode)
        raise InvalidRequest("mode", f"{asked!r} is not a mode", hint=allowed) from None
    if is_async != (mode is Mode.ASYNC):
        kind = "an async def runs in mode async" if is_async else "mode async needs an async def"
        raise InvalidRequest("mode", f"{mode}: {kind}")
    if mode is Mode.PROCESS and not _is_importable(fn):
        raise InvalidRequest(
            "mode",
            "process: another process can't import this",
            hint="define the function with def at the top of a module",
        )
    return mode


def _is_importable(fn: Any) -> bool:
    qualname = getattr(fn, "__qualname__", "<")
    return inspect.isfunction(fn) and "<" not in qualname


def _memory(limit: int | None, mode: Mode) -> int | None:
    if limit is None:
        return None
    if mode is not Mode.PROCESS:
        raise InvalidRequest("memory_limit", f"mode {mode} has none", hint="use mode='process'")
    return option.integer("memory_limit", limit, option.MIN_MEMORY, option.MAX_MEMORY)


def _said(defaults: JobOptions) -> SubmitOptions:
    """What a definition says that a request would not say by itself."""
    said: SubmitOptions = {}
    if defaults.timeout is not None:
        said["timeout"] = defaults.timeout
    if defaults.retry is not NO_RETRY:
        said["retry"] = defaults.retry
    if defaults.priority is not Priority.BATCH:
        said["priority"] = defaults.priority
    if defaults.idempotent:
        said["idempotent"] = True
    return said
