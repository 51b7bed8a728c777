"""The table of operations: how each method of the engine's API is called over HTTP, and by whom.

`operation` stands above a method of a Protocol, as in `penstock.ports.engine_api`. The HTTP routes,
the OpenAPI document, the HTTP and link clients and the role checks are derived from it, from the
method's signature and from its type hints. A new operation is a method of a Protocol, its
implementation in `control` and a line of the Python client.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from msgspec import NODEFAULT, Meta, Struct

from penstock.core.errors import InvalidRequest

F = TypeVar("F", bound=Callable[..., Any])
Method = Callable[..., Any]
"""A function of a Protocol."""


class KeyRole(StrEnum):
    """What a key is good for. Any of them may look at what its tenant has."""

    SUBMIT = "submit"
    """Submit jobs; cancel and retry single ones."""
    OPERATE = "operate"
    """Schedules, limits and pools; cancel and retry in bulk."""
    APPROVE = "approve"
    """Approve and reject jobs that are awaiting approval."""
    ADMIN = "admin"
    """Everything, and keys, rules and the audit log besides."""


class Paging(Struct, frozen=True):
    """A listing over HTTP is read page by page: `cursor` in, `next` out."""

    start: str
    """The parameter with the position after which a page begins."""
    by: tuple[str, ...]
    """The fields of an item that are its position."""
    most: int = 1000
    """Items of one page."""


class Binding(Struct, frozen=True, kw_only=True):
    """One operation. Without a path it has no HTTP route of its own."""

    name: str
    """Stable name for clients, as `cancel_job`."""
    action: str
    """Its name in the audit log, as `job.cancel`."""
    role: KeyRole | None = None
    """Required role; None: any valid key."""
    all_tenants: bool = False
    """It affects every tenant: a key that is bound to one is refused."""
    once: bool = False
    """A client must not send it again after the answer was lost. The others only read, or have the
    same effect and answer when they are repeated; a submission has its client's id."""
    method: str = ""
    path: str = ""
    query: Mapping[str, str] = {}
    """Parameters of the query: their names in the URL, and those in Python."""
    given: Mapping[str, Any] = {}
    """Values that the path stands for."""
    summary: str = ""
    description: str = ""
    field: str = ""
    """The field of the answer that has the value; empty: the answer is the value."""
    status: int = 200
    refusals: tuple[int, ...] = ()
    """Problems that are this operation's own; those that all can have are not listed."""
    waits: bool = False
    """It may wait for a job; the server ends the wait when the client disconnects."""
    patience: float = 0.0
    """Seconds that a client allows it beyond its usual timeout."""
    paging: Paging | None = None

    @property
    def in_path(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.path)


def operation(
    name: str,
    route: str = "",
    summary: str = "",
    description: str = "",
    *,
    action: str = "",
    **fields: Any,
) -> Callable[[F], F]:
    """Mark a method of a Protocol as an operation; `fields` are those of `Binding`.

    `route` is written as `GET /v1/runs?pipeline&status=statuses`: parameters that are neither in
    the path nor in the query are fields of the JSON body. A method that takes one Struct has the
    fields of that Struct as its parameters. A method may have several routes.
    """
    method, _, target = route.partition(" ")
    path, _, names = target.partition("?")
    pairs = [part.partition("=") for part in names.split("&")] if names else []
    verb, _, noun = name.partition("_")
    binding = Binding(
        name=name,
        action=action or (f"{noun}.{verb}" if noun else verb),
        method=method,
        path=path,
        query={wire: parameter or wire for wire, _, parameter in pairs},
        summary=summary,
        description=description,
        **fields,
    )

    def mark(declared: F) -> F:
        declared.__dict__[_MARK] = (binding, *bindings_of(declared))
        return declared

    return mark


_MARK = "__operations__"


def bindings_of(method: Method) -> tuple[Binding, ...]:
    found: tuple[Binding, ...] = getattr(method, _MARK, ())
    return found


def binding_of(method: Method, **values: Any) -> Binding:
    """The binding of a method; of several routes, the one that stands for these values."""
    for binding in bindings_of(method):
        if binding.given.items() <= values.items():
            return binding
    raise TypeError(f"{method.__qualname__} is not an operation")


def about(text: str, **limits: Any) -> Meta:
    """What a parameter means, for the OpenAPI document, and which values HTTP accepts."""
    return Meta(description=text, **limits)


# -- interfaces -------------------------------------------------------------------


def methods_of(interface: type) -> Iterator[tuple[str, Method]]:
    for name, declared in vars(interface).items():
        if inspect.isfunction(declared) and not name.startswith("_"):
            yield name, declared


def parts_of(interface: type, workloads: Mapping[str, type]) -> dict[str, type]:
    """The interfaces of its parts, by name.

    `workloads` are the classes that annotations name and that this layer can't import.
    """
    return {
        name: typing.get_type_hints(declared.fget, None, dict(workloads))["return"]
        for name, declared in vars(interface).items()
        if isinstance(declared, property)
    }


def proxy_class(
    interface: type, base: type, make: Callable[[str, Method], Callable[..., Any]]
) -> type[Any]:
    """A class with every method of an interface: those that `base` has, the others from `make`."""
    members = {
        name: make(name, declared)
        for name, declared in methods_of(interface)
        if not hasattr(base, name)
    }
    return type(f"{base.__name__.strip('_')}{interface.__name__}", (base,), members)


class Parameters:
    """The parameters of a method by name; of one that takes a Struct, the fields of that."""

    def __init__(self, method: Method) -> None:
        hints = typing.get_type_hints(method, include_extras=True)
        self.answer: Any = hints["return"]
        signature = list(inspect.signature(method).parameters.values())[1:]
        self.source: type[Struct] | None = None
        self.kinds: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self._argument = ""
        for one in signature:
            kind = hints[one.name]
            if isinstance(kind, type) and issubclass(kind, Struct):
                self.source, self._argument = kind, one.name
                for field in msgspec.structs.fields(kind):
                    self.kinds[field.name] = field.type
                    if field.default is not NODEFAULT:
                        self.defaults[field.name] = field.default
                    elif field.default_factory is not NODEFAULT:
                        self.defaults[field.name] = field.default_factory()
            else:
                self.kinds[one.name] = kind
                if one.default is not one.empty:
                    self.defaults[one.name] = one.default

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What to call the method with, of the values by name."""
        if self.source is None:
            return dict(values)
        own = self.source.__struct_fields__
        fields = {name: value for name, value in values.items() if name in own}
        others = {name: value for name, value in values.items() if name not in own}
        return {**others, self._argument: self.source(**fields)}

    def values(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The values by name, of what the method was called with."""
        if self.source is None:
            return dict(arguments)
        others = {name: value for name, value in arguments.items() if name != self._argument}
        return {**others, **msgspec.structs.asdict(arguments[self._argument])}

    def converted(self, name: str, value: Any) -> Any:
        """A value of another Struct with the same fields, as the one that the method takes."""
        if isinstance(value, Struct):
            return msgspec.convert(value, self.kinds[name], from_attributes=True)
        return value


# -- cursors ----------------------------------------------------------------------

_LONGEST = 1000
_HINT = "pass `next` of the page before, with the same filters and order"


def cursor(listing: str, position: object) -> str:
    """Where the next page of a listing begins, as an opaque text."""
    data = msgspec.msgpack.encode((listing, position))
    return urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def position(listing: str, kind: Any, text: str | None) -> Any:
    """The position that a cursor stands for. Raises InvalidRequest if it is not of this listing."""
    if text is None:
        return None
    try:
        if len(text) > _LONGEST:
            raise ValueError(text)
        data = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        own, found = msgspec.msgpack.decode(data, type=tuple[str, Any])
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise InvalidRequest("cursor", "is not one that a page gave", hint=_HINT) from None
    try:
        found = msgspec.convert(found, kind)
        if own == listing and all(map(_is_sound, found if isinstance(found, tuple) else (found,))):
            return found
    except msgspec.ValidationError:
        pass
    raise InvalidRequest("cursor", "belongs to another listing", hint=_HINT)


def _is_sound(value: object) -> bool:
    match value:
        case int():
            return -1 <= value < 1 << 62
        case float():
            return math.isfinite(value)
    return isinstance(value, str)
