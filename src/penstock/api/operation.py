"""The table of operations: the router, the OpenAPI document and the docs are made of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from msgspec import Struct
from msgspec.structs import force_setattr

from penstock.api.problems import ProblemReply, Refused
from penstock.api.reply import AnyReply
from penstock.core.errors import NotFound
from penstock.ports.engine_api import KeyRole

if TYPE_CHECKING:
    from penstock.api.call import Call

Handler = Callable[["Call"], Awaitable[AnyReply]]
H = TypeVar("H", bound=Callable[..., Awaitable[AnyReply]])

PUBLIC = "public"
"""No key is needed."""
ANY = "any"
"""Any valid key will do."""


class Pace(StrEnum):
    """How long an answer may take, and what is counted for it."""

    PROMPT = "prompt"
    WAITS = "waits"
    """Waits for a job; aborted when the client disconnects."""
    STREAMS = "streams"
    """The answer comes in parts, maybe for ever."""


class Operation(Struct, frozen=True):
    method: str
    path: str
    """With `{names}` for the segments that vary; `{name...}` at the end is one or more of them."""
    handler: Handler
    summary: str = ""
    """The first line of the handler's docstring, unless said otherwise."""
    description: str = ""
    """The rest of it."""
    role: KeyRole | str = ANY
    """Required role: documented, and checked here and by the EngineApi."""
    all_tenants: bool = False
    """It affects every tenant: a key that is bound to one is refused."""
    query: type[Struct] | None = None
    body: Any = None
    body_type: str = "application/json"
    reader: Callable[..., Any] | None = None
    """Reads its body, with the parameters of `read_json`, which is the default."""
    may_be_empty: bool = False
    """Without a body, every field of it has its default."""
    large: bool = False
    """The body may be as large as an upload."""
    answer: Any = None
    answer_type: str = "application/json"
    other_types: tuple[str, ...] = ()
    """Further media types in which it may come."""
    status: int = 200
    others: Mapping[int, Any] = {}
    """Further statuses that are no problems, with what they answer."""
    refusals: tuple[int, ...] = ()
    """Problems that are this operation's own; those that all can have are not named."""
    problem: ProblemReply | None = None
    """Its error format, if it differs."""
    problem_kind: type[Struct] | None = None
    """Type of such an error."""
    pace: Pace = Pace.PROMPT
    name: str = ""
    """Stable name for clients; the handler's, unless said otherwise."""
    audited: str = ""
    """Its name in the audit log; derived from `name`, unless said otherwise."""

    def __post_init__(self) -> None:
        if not self.summary:
            summary, _, rest = (inspect.getdoc(self.handler) or "").partition("\n")
            force_setattr(self, "summary", summary.removesuffix("."))
            force_setattr(self, "description", " ".join(rest.split()))

    @property
    def id(self) -> str:
        return self.name or self.handler.__name__

    @property
    def action(self) -> str:
        """Its name in the audit log, as `schedule.put` for `put_schedule`."""
        if self.audited:
            return self.audited
        verb, _, noun = self.id.partition("_")
        return f"{noun}.{verb}" if noun else verb

    @property
    def tag(self) -> str:
        """The resource that it belongs to."""
        parts = self.path.removeprefix("/v1").strip("/").split("/")
        return parts[0].partition(":")[0]


# -- handlers and their routes ----------------------------------------------------

_MARK = "__routes__"


def route(target: str, **fields: Any) -> Callable[[H], H]:
    """Declare a handler's route, as `@route("GET /v1/me", answer=Me)`; it may have several.

    `fields` are those of Operation. Summary and description are the handler's docstring.
    """
    method, _, path = target.partition(" ")
    return marked(method=method, path=path, **fields)


def marked(**fields: Any) -> Callable[[H], H]:
    def mark(handler: H) -> H:
        handler.__dict__[_MARK] = (fields, *getattr(handler, _MARK, ()))
        return handler

    return mark


def routes_of(*places: object, **fields: Any) -> tuple[Operation, ...]:
    """The operations of handlers that are declared in modules, or are methods of objects.

    `fields` are those that an operation does not set itself.
    """
    return tuple(
        Operation(handler=handler, **{**fields, **own})
        for place in places
        for handler in _functions(place)
        for own in getattr(handler, _MARK, ())
    )


def _functions(place: object) -> Iterator[Any]:
    if isinstance(place, ModuleType):
        for one in vars(place).values():
            if isinstance(one, FunctionType) and one.__module__ == place.__name__:
                yield one
    else:
        for name, one in vars(type(place)).items():
            if isinstance(one, FunctionType):
                yield getattr(place, name)


# -- finding one by its path ------------------------------------------------------

Found = tuple[Operation, dict[str, str]]
Methods = dict[str, Operation]

REST = "..."
"""Ends the name of a last segment that stands for all that are left, as `{path...}`."""
_SEGMENT, _REST = re.compile(r"\\{(\w+)\\}"), re.compile(r"\\{(\w+)\\.\\.\\.\\}")
"""In an escaped path."""


class Router:
    """Compiled once. `/a/` is not `/a`."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        paths: dict[str, Methods] = {}
        for operation in operations:
            methods = paths.setdefault(operation.path, {})
            assert operation.method not in methods, operation.path
            methods[operation.method] = operation
        self._fixed = {(one.method, one.path): one for one in operations if "{" not in one.path}
        """Those whose path does not vary: a lookup. They win over those that do."""
        self._patterns: dict[str, list[tuple[re.Pattern[str], Methods]]] = {}
        """By the resource, which is the first segment. A name goes before what varies."""
        for path in sorted(paths, key=_variable_segments):
            pattern = _REST.sub(r"(?P<\1>[^/].*)", re.escape(path))
            pattern = _SEGMENT.sub(r"(?P<\1>[^/]+)", pattern)
            found = self._patterns.setdefault(resource_of(path), [])
            found.append((re.compile(pattern, re.S), paths[path]))

    def find(self, method: str, path: str) -> Found:
        """Raises NotFound, or 405 with what would be allowed.

        The path is as it was sent; its varying segments are unescaped here, so that an
        escaped slash stays within its segment.
        """
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed, {}
        allowed: set[str] = set()
        for pattern, methods in self._patterns.get(resource_of(path), ()):
            match = pattern.fullmatch(path)
            if match is None:
                continue
            may_head = "GET" in methods and methods["GET"].pace is not Pace.STREAMS
            operation = methods.get("GET" if method == "HEAD" and may_head else method)
            # Not the first that fits: a job may be called like an operation beside it, as `batch`.
            if operation is not None:
                try:
                    return operation, {k: unescaped(v) for k, v in match.groupdict().items()}
                except UnicodeDecodeError:
                    raise NoSuchPath(method, path) from None
            allowed.update(methods, ("HEAD", "OPTIONS") if may_head else ("OPTIONS",))
        if not allowed:
            raise NoSuchPath(method, path)
        if method == "OPTIONS":
            raise Allowed(sorted(allowed))
        raise Refused(
            405,
            "METHOD_NOT_ALLOWED",
            f"{method[:20]} is not allowed for this path",
            hint=f"allowed are: {', '.join(sorted(allowed))}",
            headers=(allow_header(sorted(allowed)),),
        )


def resource_of(path: str) -> str:
    """The first segment of a path, or the second after `/v1`."""
    return path.removeprefix("/v1").lstrip("/").partition("/")[0]


def _variable_segments(path: str) -> list[bool]:
    return ["{" in segment for segment in path.split("/")]


class Allowed(Exception):
    """An OPTIONS request: which methods there are."""

    def __init__(self, methods: list[str]) -> None:
        super().__init__(methods)
        self.methods = methods


def allow_header(methods: list[str]) -> tuple[bytes, bytes]:
    return (b"allow", ", ".join(methods).encode("ascii"))


class NoSuchPath(NotFound):
    """No operation has this path."""

    def __init__(self, method: str, path: str) -> None:
        super().__init__("there is no such path", hint="/docs lists all paths")
        self.asked = f"{method[:20]} {path[:120]}"


def unescaped(segment: str) -> str:
    """A part of a path. Raises UnicodeDecodeError for what is no UTF-8."""
    return unquote(segment, errors="strict") if "%" in segment else segment
