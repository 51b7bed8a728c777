"""A Python function that has become a job: how it is submitted, what it takes and returns.

@app.job("job.text.shout", timeout=30, retries=3)
async def shout(text: str) -> str: ...

shout("hello")                                     # the plain function
shout.submit("hello")                              # a job
shout.options(priority="interactive").submit("hello")

The input of a job is a JSON object with an argument per parameter. A msgspec Struct made from
the signature checks it twice by the same rules: at submit, so that a wrong call is refused
before anything is stored, and at the worker, where it decodes straight into the arguments. A
refusal names the argument: ``input.text: expected str, got int``. The return annotation is how a
result is checked at the worker, and read by the caller.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import FrameType, GenericAlias, SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)

import msgspec
from msgspec.structs import asdict

from penstock import values
from penstock.core.errors import InvalidRequest, MapInterrupted, Misconfigured
from penstock.core.job import TopicDefaults
from penstock.ports.executor import Context
from penstock.workloads.function.context import current
from penstock.workloads.function.options import (
    JobOptions,
    Mode,
    SubmitOptions,
    checked,
    checked_definition,
    with_keys,
)

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

INPUT = "input"

_P = inspect.Parameter
_UNRESOLVED: Any = object()
"""The type of an annotation whose names can't be found."""
_ANYTHING = (object, typing.NoReturn, typing.Never)
"""Annotations that say nothing of a value."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_CHUNK = 1_000
"""Jobs that `map` submits at once."""

Arguments = Iterable[Sequence[Any] | Mapping[str, Any]]
"""For each job a tuple or a dict of arguments."""
Keys = Sequence[str] | None


class Submitter(Protocol):
    """Takes jobs whose inputs and options are checked already; answers with their handles."""

    def _submit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[JobHandle[Any]]: ...

    async def _asubmit_checked(
        self, topic: str, payloads: Sequence[bytes], options: Mapping[str, Any]
    ) -> list[JobHandle[Any]]: ...


class _Returns(Protocol[R_co]):
    """A JobFunction whose jobs return `R_co`, whether it is an `async def` or not: what type
    checkers make of `JobFunction._returned`."""

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

    @property
    def submit_defaults(self) -> SubmitOptions: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...


class _Takes1(_Returns[R_co], Protocol[A_contra, R_co]):
    """What can be called with one argument: of this kind a function is for `map`."""

    def __call__(self, a: A_contra, /) -> Any: ...


class _Maps1(_Takes1[A_contra, R_co], Protocol[A_contra, R_co]):
    """The same for `starmap`. A type of its own: after a wrong use of `map`, mypy accepts the
    function as a `_Takes1`."""


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
    def starmap(self: _Maps1[A, T], items: Iterable[tuple[A]]) -> list[JobHandle[T]]: ...
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
    async def astarmap(self: _Maps1[A, T], items: Iterable[tuple[A]]) -> list[JobHandle[T]]: ...
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
        options = self._options if keys is None else with_keys(self._options, keys)
        return self._submitter()._submit_checked(self.topic, payloads, options)

    async def _asubmit(self, payloads: Sequence[bytes], keys: Keys = None) -> list[JobHandle[Any]]:
        options = self._options if keys is None else with_keys(self._options, keys)
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


def make_function(
    fn: Callable[..., R],
    topic: str,
    submitter: Callable[[], Submitter],
    *,
    ctx: bool = False,
    **options: Unpack[JobOptions],
) -> JobFunction[..., R]:
    """Make a job of `fn`. Raises Misconfigured, naming what is wrong, while it is defined."""
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        mode, memory_limit, defaults = checked_definition(fn, topic, options)
    except InvalidRequest as wrong:
        raise Misconfigured(f"the job {name}: {wrong.message}", hint=wrong.hint) from None
    made: JobFunction[..., R] = JobFunction(
        fn, topic, mode, submitter, defaults, memory_limit, ctx=ctx
    )
    if ctx and made.signature.context is None:
        raise Misconfigured(
            f"the job {name}: ctx=True, but its first parameter is not its Context",
            hint="annotate it: ctx: penstock.Context",
        )
    return made


# -- what it takes and returns ---------------------------------------------------


class Signature:
    """What a function takes, and how to get it from a call and from JSON."""

    context: str | None
    """The name of the parameter that is given the Context, if there is one."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._name = getattr(fn, "__name__", type(fn).__name__)
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):
            raise Misconfigured(f"{fn!r} has no signature that can be read") from None
        parameters = list(signature.parameters.values())
        type_of = _annotations(fn)
        self.context = _context(parameters, type_of)
        own = [p for p in parameters if p.name != self.context]
        self._rest = next((p for p in own if p.kind is _P.VAR_KEYWORD), None)
        own = [p for p in own if p is not self._rest]
        if star := next((p for p in own if p.kind is _P.VAR_POSITIONAL), None):
            raise Misconfigured(
                f"{self._name}: *{star.name} can't be an input, as its arguments have no names",
                hint=f"take a list instead: {star.name}: list[...]",
            )
        self.names = tuple(p.name for p in own)
        self._positional = tuple(p.name for p in own if p.kind is not _P.KEYWORD_ONLY)
        self._unnamed = tuple(p.name for p in parameters if p.kind is _P.POSITIONAL_ONLY)
        self._fields = fields = [self._field(p, type_of) for p in own]
        self._open_decoders: dict[frozenset[str], Callable[[bytes], Any]] = {}
        self.input = msgspec.defstruct(
            self._name, fields, kw_only=True, forbid_unknown_fields=self._rest is None
        )
        self._decode = values.decoder(self.input)
        if self._rest is not None:
            kind = self._checked_type(self._rest.name, self._rest.annotation, type_of)
            self._rest_type: Any = GenericAlias(dict, (str, kind))
        returned = self._checked_type("its result", signature.return_annotation, type_of)
        self.returns = values.PLAIN if returned is Any else values.Reader(returned)

    def schemas(self) -> dict[str, Any]:
        """JSON schemas of what it takes, `input`, and of what it says it returns, `output`."""
        taken = values.json_schema(self.input) or {"type": "object"}
        taken.pop("title", None)
        if self._rest is not None:
            taken["additionalProperties"] = values.json_schema(typing.get_args(self._rest_type)[1])
        given = {} if self.returns is values.PLAIN else values.json_schema(self.returns.kind)
        return {"input": taken} | ({"output": given} if given else {})

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
        """The payload of a call's arguments, checked as the worker will check it."""
        arguments = dict(kwargs)
        if args:
            if len(args) > len(self._positional):
                raise InvalidRequest(
                    INPUT,
                    f"{self._name} takes {len(self._positional)} positional arguments,"
                    f" {len(args)} were given",
                )
            for name, value in zip(self._positional, args, strict=False):
                if name in kwargs:
                    raise InvalidRequest(f"{INPUT}.{name}", "is given twice")
                arguments[name] = value
        return self.encode(arguments)

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        """The JSON payload of these arguments, once the signature has accepted it."""
        payload = values.encode_input(arguments, INPUT)
        if isinstance(payload, values.Input) and payload.results_of:
            self._check_around(payload)
        else:
            self.decode(payload)
        return payload

    def _check_around(self, payload: values.Input) -> None:
        """Check all arguments but those that have results of other jobs."""
        if self._rest is None:
            decode = self._open_decoders.get(payload.open_names)
            if decode is None:
                fields = [
                    (name, Any, *more) if name in payload.open_names else (name, kind, *more)
                    for name, kind, *more in self._fields
                ]
                made = msgspec.defstruct(
                    self._name, fields, kw_only=True, forbid_unknown_fields=True
                )
                decode = self._open_decoders[payload.open_names] = values.decoder(made)
            try:
                decode(payload)
            except (ValueError, RecursionError) as error:
                raise values.refusal(error, INPUT, self.names) from None

    def decode(self, payload: bytes) -> dict[str, Any]:
        """The arguments in a payload, defaults filled in. Raises InvalidRequest."""
        try:
            if self._rest is None:
                return asdict(self._decode(payload or b"{}"))
            given = msgspec.json.decode(payload or b"{}", type=dict[str, Any])
            if self.context is not None and self.context in given:
                raise values.unexpected(INPUT, self.context, self.names)
            own = {name: given.pop(name) for name in self.names if name in given}
            known = asdict(values.convert(own, self.input))
            known.update(values.convert(given, self._rest_type))
            return known
        except InvalidRequest:
            raise
        except (ValueError, RecursionError) as error:
            raise values.refusal(error, INPUT, self.names) from None

    def encode_result(self, value: Any) -> tuple[bytes, str]:
        """What the function returned, as bytes with a media type.

        Raises InvalidRequest for what can't be stored, and WrongResult for what the function
        does not say it returns.
        """
        stored = values.encode_result(value)
        if self.returns is not values.PLAIN:
            try:
                self.returns.read(*stored)
            except InvalidRequest as wrong:
                raise WrongResult(wrong.field, wrong.problem) from None
        return stored

    def call(self, fn: Callable[..., Any], arguments: dict[str, Any], ctx: Context) -> Any:
        """Call `fn` with decoded arguments, and with the Context where it takes one."""
        if self.context is not None:
            arguments[self.context] = ctx
        if self._unnamed:
            first = [arguments.pop(name) for name in self._unnamed]
            return fn(*first, **arguments)
        return fn(**arguments)

    def _field(self, p: inspect.Parameter, type_of: Callable[[Any], Any]) -> Any:
        kind = self._checked_type(p.name, p.annotation, type_of)
        if p.default is _P.empty:
            return p.name, kind
        if isinstance(p.default, _PLAIN):
            return p.name, kind, p.default
        return p.name, kind, msgspec.field(default_factory=lambda: p.default)

    def _checked_type(self, name: str, annotation: Any, type_of: Callable[[Any], Any]) -> Any:
        """The type of a parameter or result, if values of it can be read from JSON."""
        kind = type_of(annotation)
        if kind is _UNRESOLVED:
            raise Misconfigured(
                f"{self._name}: the annotation of {name}, {annotation!r}, can't be resolved",
                hint="import its names where they exist at run time, not under TYPE_CHECKING",
            )
        try:
            return values.readable(kind)
        except TypeError as error:
            raise Misconfigured(
                f"{self._name}: {name} can't be read from JSON: {error}",
                hint="penstock.values.register adds a type",
            ) from None


class WrongResult(InvalidRequest):
    """A result of another type than the function says it returns."""


# -- annotations ------------------------------------------------------------------


def _annotations(fn: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function that resolves annotations of `fn`, also those that are strings.

    With `from __future__ import annotations` a function carries the text of its types. The
    names in it may live in its module, in what it closes over, or, when it was defined inside
    another function, in the frames that are running its decorator right now.
    """
    plain = inspect.unwrap(fn)
    module: dict[str, Any] = getattr(plain, "__globals__", {})
    names = _local_names(plain, module)

    def type_of(annotation: Any) -> Any:
        """Any for no annotation, _UNRESOLVED for unknown names."""
        if annotation is _P.empty or annotation in _ANYTHING:
            return Any
        holder = SimpleNamespace(__annotations__={"it": annotation})
        try:
            hints = typing.get_type_hints(holder, module, names, include_extras=True)
        except (NameError, AttributeError, SyntaxError, TypeError):
            return _UNRESOLVED
        return Any if hints["it"] in _ANYTHING else hints["it"]

    return type_of


def _local_names(fn: Any, module: dict[str, Any]) -> dict[str, Any]:
    """The local names in scope where `fn` is defined, the innermost winning."""
    qualname = getattr(fn, "__qualname__", "")
    try:
        found = [dict(inspect.getclosurevars(fn).nonlocals)]
    except (TypeError, ValueError):
        found = []
    frame: FrameType | None = sys._getframe(2) if "<locals>" in qualname else None
    while frame is not None:
        scope = frame.f_code.co_qualname + ".<locals>."
        if frame.f_globals is module and qualname.startswith(scope):
            found.append(frame.f_locals)
        frame = frame.f_back
    return {name: value for scope in reversed(found) for name, value in scope.items()}


def _context(parameters: list[inspect.Parameter], type_of: Callable[[Any], Any]) -> str | None:
    """The first parameter, if it is annotated as the Context, or is just called `ctx`."""
    if not parameters or parameters[0].kind in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD):
        return None
    first = parameters[0]
    kind = type_of(first.annotation)
    if Context in getattr(kind, "__mro__", ()):
        return first.name
    return first.name if first.name == "ctx" and (kind is _UNRESOLVED or kind is Any) else None
