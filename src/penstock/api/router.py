"""From a method and a path to the operation that is meant."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from penstock.api.call import unescaped
from penstock.api.operation import Operation, Pace
from penstock.api.problems import Refused
from penstock.core.errors import NotFound

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
        node, values = self._root, []
        segments = path[1:].split("/")
        for place, segment in enumerate(segments):
            following = node.named.get(segment)
            if following is None:
                following = node.any
                if following is None or not segment:
                    raise _nothing_here()
                if following.takes_rest:
                    values.append("/".join(segments[place:]))
                    node = following
                    break
                values.append(segment)
            node = following
        operation = node.methods.get(method) or self._stand_in(node, method)
        if not values:
            return operation, {}
        try:
            return operation, dict(zip(node.names, map(unescaped, values), strict=True))
        except UnicodeDecodeError:
            raise _nothing_here() from None

    def _stand_in(self, node: Node, method: str) -> Operation:
        if not node.methods:
            raise _nothing_here()
        if method == "HEAD" and "HEAD" in allowed(node):
            return node.methods["GET"]
        if method == "OPTIONS":
            raise Allowed(allowed(node))
        raise Refused(
            405,
            "METHOD_NOT_ALLOWED",
            f"{method[:20]} can't be done here",
            hint=f"allowed are: {', '.join(allowed(node))}",
            headers=(allow_header(allowed(node)),),
        )


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
