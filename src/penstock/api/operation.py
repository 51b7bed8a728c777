"""The table of operations: the router, the OpenAPI document and the docs are made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from msgspec import Struct

from penstock.api.problems import ProblemReply, Refused
from penstock.api.reply import AnyReply
from penstock.core.errors import NotFound
from penstock.ports.engine_api import KeyRole

if TYPE_CHECKING:
    from penstock.api.call import Call

Handler = Callable[["Call"], Awaitable[AnyReply]]

PUBLIC = "public"
"""No key is needed."""
ANY = "any"
"""Any valid key will do."""


class Pace(StrEnum):
    """How long an answer may take, and what is counted for it."""

    PROMPT = "prompt"
    WAITS = "waits"
    """For a job: broken off when the client leaves."""
    STREAMS = "streams"
    """The answer comes in parts, maybe for ever."""


class Operation(Struct, frozen=True):
    method: str
    path: str
    """With `{names}` for the segments that vary; `{name...}` at the end is one or more of them."""
    handler: Handler
    summary: str
    description: str = ""
    role: KeyRole | str = ANY
    """Required role: documented, checked by the EngineApi, and checked before a body is read."""
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
    """How its errors are told, where they have a shape of their own."""
    problem_kind: type[Struct] | None = None
    """That shape, as JSON."""
    pace: Pace = Pace.PROMPT
    name: str = ""
    """Stable name for clients; the handler's, unless said otherwise."""

    @property
    def id(self) -> str:
        return self.name or self.handler.__name__

    @property
    def action(self) -> str:
        """Its name in the audit log, as `schedule.put` for `put_schedule`."""
        verb, _, noun = self.id.partition("_")
        return f"{noun}.{verb}" if noun else verb

    @property
    def tag(self) -> str:
        """The resource that it belongs to."""
        parts = self.path.removeprefix("/v1").strip("/").split("/")
        return parts[0].partition(":")[0]


Found = tuple[Operation, dict[str, str]]

REST = "..."
"""Ends the name of a last segment that stands for all that are left, as `{path...}`."""


class Node(Struct):
    """One step of a path: what comes next by name, what comes next whatever its name."""

    named: dict[str, Node] = {}
    any: Node | None = None
    methods: dict[str, Operation] = {}
    names: tuple[str, ...] = ()
    """Of the segments that vary, on the way here."""
    takes_rest: bool = False
    """Whether it stands for all the segments that are left."""


class Router:
    """Compiled once; a lookup is one step a segment. `/a/` is not `/a`."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._root = Node()
        for operation in operations:
            self._add(operation)
        self._fixed = {(one.method, one.path): one for one in operations if "{" not in one.path}
        """Those whose path does not vary: a lookup, not a walk. They win over those that do."""

    def _add(self, operation: Operation) -> None:
        node, names = self._root, []
        for segment in operation.path[1:].split("/"):
            if segment.startswith("{"):
                names.append(segment[1:-1].removesuffix(REST))
                if node.any is None:
                    node.any = Node(named={}, methods={})
                node = node.any
            else:
                node = node.named.setdefault(segment, Node(named={}, methods={}))
        assert operation.method not in node.methods, operation.path
        node.methods[operation.method] = operation
        node.names = tuple(names)
        node.takes_rest = operation.path.endswith(REST + "}")

    def find(self, method: str, path: str) -> Found:
        """Raises NotFound, or 405 with what would be allowed.

        The path is as it was sent; its varying segments are unescaped here, so that an
        escaped slash stays within its segment.
        """
        fixed = self._fixed.get((method, path))
        if fixed is not None:
            return fixed, {}
        methods: set[str] = set()
        for node, values in self._fitting(path[1:].split("/")):
            operation = node.methods.get(method)
            if operation is None and method == "HEAD" and "HEAD" in allowed(node):
                operation = node.methods["GET"]
            if operation is None:
                methods.update(allowed(node))
                continue
            try:
                return operation, dict(zip(node.names, map(unescaped, values), strict=True))
            except UnicodeDecodeError:
                raise _nothing_here() from None
        if not methods:
            raise _nothing_here()
        if method == "OPTIONS":
            raise Allowed(sorted(methods))
        raise Refused(
            405,
            "METHOD_NOT_ALLOWED",
            f"{method[:20]} can't be done here",
            hint=f"allowed are: {', '.join(sorted(methods))}",
            headers=(allow_header(sorted(methods)),),
        )

    def _fitting(self, segments: list[str]) -> Iterator[tuple[Node, tuple[str, ...]]]:
        """Where a path may lead, with its varying segments; a name goes before what varies.

        Not only a name: a job may be called like an operation beside it, as `batch`.
        """
        ways: list[tuple[Node, int, tuple[str, ...]]] = [(self._root, 0, ())]
        while ways:
            node, at, values = ways.pop()
            if at == len(segments):
                if node.methods:
                    yield node, values
                continue
            segment = segments[at]
            if segment and (following := node.any) is not None:
                if following.takes_rest:
                    rest = "/".join(segments[at:])
                    ways.append((following, len(segments), (*values, rest)))
                else:
                    ways.append((following, at + 1, (*values, segment)))
            if (following := node.named.get(segment)) is not None:
                ways.append((following, at + 1, values))


class Allowed(Exception):
    """Not an operation but the question what there is."""

    def __init__(self, methods: list[str]) -> None:
        super().__init__(methods)
        self.methods = methods


def allowed(node: Node) -> list[str]:
    methods = set(node.methods) | {"OPTIONS"}
    if "GET" in methods and node.methods["GET"].pace is not Pace.STREAMS:
        methods.add("HEAD")
    return sorted(methods)


def allow_header(methods: list[str]) -> tuple[bytes, bytes]:
    return (b"allow", ", ".join(methods).encode("ascii"))


def _nothing_here() -> NotFound:
    return NotFound("there is nothing at this path", hint="/docs lists what there is")


def unescaped(segment: str) -> str:
    """A part of a path. Raises UnicodeDecodeError for what is no UTF-8."""
    return unquote(segment, errors="strict") if "%" in segment else segment
