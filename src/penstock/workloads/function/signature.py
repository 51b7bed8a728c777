"""What a function takes and returns, as JSON.

The input of a job is a JSON object with an argument per parameter. A msgspec Struct made from
the signature checks it twice by the same rules: at submit, so that a wrong call is refused
before anything is stored, and at the worker, where it decodes straight into the arguments. A
refusal names the argument: ``input.text: expected str, got int``. The return annotation is how a
result is checked at the worker, and read by whoever asks for it.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, GenericAlias, SimpleNamespace
from typing import Any

import msgspec

from penstock import values
from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.ports.executor import Context

INPUT = "input"

_P = inspect.Parameter
_UNRESOLVED: Any = object()
"""The type of an annotation whose names can't be found."""
_ANYTHING = (object, typing.NoReturn, typing.Never)
"""Annotations that say nothing of a value."""
_PLAIN = (bool, int, float, str, bytes, type(None))
_asdict = msgspec.structs.asdict


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
                return _asdict(self._decode(payload or b"{}"))
            given = msgspec.json.decode(payload or b"{}", type=dict[str, Any])
            if self.context is not None and self.context in given:
                raise values.unexpected(INPUT, self.context, self.names)
            own = {name: given.pop(name) for name in self.names if name in given}
            known = _asdict(values.convert(own, self.input))
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
