"""A function's signature as the shape of its input.

The input of a job is a JSON object with an argument per parameter. A msgspec Struct
made from the signature checks it twice by the same rules: at submit, so that a wrong
call is refused before anything is stored, and at the worker, where it decodes straight
into the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.ports.executor import Context
from penstock.workloads.function.annotations import UNRESOLVED, Annotations
from penstock.workloads.function.problems import (
    INPUT,
    JSON_TROUBLE,
    check_numbers,
    unexpected,
    unreadable,
    unstorable,
)

_P = inspect.Parameter
_PLAIN = (bool, int, float, str, bytes, type(None))
_encode = msgspec.json.Encoder().encode
_asdict = msgspec.structs.asdict


class Signature:
    """What a function takes, and how to get it from a call and from JSON."""

    context: str | None
    """The name of the parameter that is given the Context, if there is one."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._name = getattr(fn, "__name__", type(fn).__name__)
        parameters, annotations = _parameters(fn), Annotations(fn)
        self.context = _context(parameters, annotations)
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
        self.input = self._struct(own, annotations)
        self._decode: Callable[[bytes], msgspec.Struct] = msgspec.json.Decoder(self.input).decode
        self._rest_type = self._type_of_rest(annotations)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name, checked as the worker will check them."""
        if args:
            if len(args) > len(self._positional):
                raise InvalidRequest(
                    INPUT,
                    f"{self._name} takes {len(self._positional)} positional arguments,"
                    f" {len(args)} were given",
                )
            arguments = dict(zip(self._positional, args, strict=False))
            for name in kwargs:
                if name in arguments:
                    raise InvalidRequest(f"{INPUT}.{name}", "is given twice")
            arguments.update(kwargs)
        else:
            arguments = dict(kwargs)
        self.encode(arguments)
        return arguments

    def encode(self, arguments: Mapping[str, Any]) -> bytes:
        """The JSON payload of these arguments, once the signature has accepted it."""
        try:
            payload = _encode(arguments)
        except JSON_TROUBLE as problem:
            raise unstorable(arguments, problem) from None
        check_numbers(INPUT, arguments, payload)
        self.decode(payload)
        return payload

    def decode(self, payload: bytes) -> dict[str, Any]:
        """The arguments in a payload, defaults filled in. Raises InvalidRequest."""
        if self._rest is not None:
            return self._decode_open(payload or b"{}")
        try:
            return _asdict(self._decode(payload or b"{}"))
        except (ValueError, RecursionError) as problem:
            raise unreadable(problem, self.names) from None

    def call(self, fn: Callable[..., Any], arguments: dict[str, Any], ctx: Context) -> Any:
        """Call `fn` with decoded arguments, and with the Context where it takes one."""
        if self.context is not None:
            arguments[self.context] = ctx
        if self._unnamed:
            first = [arguments.pop(name) for name in self._unnamed]
            return fn(*first, **arguments)
        return fn(**arguments)

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the input."""
        schema = msgspec.json.schema(self.input)
        if self._rest is not None:
            (extra,), defs = msgspec.json.schema_components([self._rest_type])
            own = schema["$defs"][self.input.__name__]
            own["additionalProperties"] = extra.get("additionalProperties") or True
            schema["$defs"] = {**defs, **schema["$defs"]}
        return schema

    def _decode_open(self, payload: bytes) -> dict[str, Any]:
        try:
            given = msgspec.json.decode(payload, type=dict[str, Any])
            if self.context is not None and self.context in given:
                raise unexpected(self.context, self.names)
            own = {name: given.pop(name) for name in self.names if name in given}
            known = _asdict(msgspec.convert(own, self.input, str_keys=True))
            known.update(msgspec.convert(given, self._rest_type, str_keys=True))
            return known
        except InvalidRequest:
            raise
        except (ValueError, RecursionError) as problem:
            raise unreadable(problem, self.names) from None

    def _struct(
        self, own: list[inspect.Parameter], annotations: Annotations
    ) -> type[msgspec.Struct]:
        fields = [self._field(p, annotations) for p in own]
        return msgspec.defstruct(
            self._name, fields, kw_only=True, forbid_unknown_fields=self._rest is None
        )

    def _field(self, p: inspect.Parameter, annotations: Annotations) -> Any:
        kind = self._readable(p, annotations)
        if p.default is _P.empty:
            return p.name, kind
        if isinstance(p.default, _PLAIN):
            return p.name, kind, p.default
        return p.name, kind, msgspec.field(default_factory=lambda: p.default)

    def _type_of_rest(self, annotations: Annotations) -> Any:
        if self._rest is None:
            return None
        return dict[str, self._readable(self._rest, annotations)]  # type: ignore[misc]

    def _readable(self, p: inspect.Parameter, annotations: Annotations) -> Any:
        """The type of a parameter, if msgspec can read it from JSON."""
        kind = annotations.meaning(p.annotation)
        if kind is UNRESOLVED:
            raise Misconfigured(
                f"{self._name}: the annotation of {p.name}, {p.annotation!r}, can't be resolved",
                hint="import its names where they exist at run time, not under TYPE_CHECKING",
            )
        try:
            msgspec.json.schema(kind)
        except TypeError as problem:
            why = str(problem).splitlines()[-1]
            raise Misconfigured(
                f"{self._name}: {p.name} can't be read from JSON: {why}",
                hint="use a builtin type, a dataclass, a msgspec Struct or an Enum",
            ) from None
        return kind


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        raise Misconfigured(f"{fn!r} has no signature that can be read") from None


def _context(parameters: list[inspect.Parameter], annotations: Annotations) -> str | None:
    """The first parameter, if it is annotated as the Context, or is just called `ctx`."""
    if not parameters or parameters[0].kind in (_P.VAR_POSITIONAL, _P.VAR_KEYWORD):
        return None
    first = parameters[0]
    kind = annotations.meaning(first.annotation)
    if Context in getattr(kind, "__mro__", ()):
        return first.name
    if first.name == "ctx" and (kind is UNRESOLVED or kind is Any):
        return first.name
    return None
