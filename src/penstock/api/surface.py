"""What one server offers: the machinery below is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from penstock.api.cors import Cors
from penstock.api.operation import Operation
from penstock.api.problems import ProblemReply, problem_reply
from penstock.ports.door import Guest

Enter = Callable[[Mapping[bytes, bytes]], Guest]
"""Who has sent these headers. Raises NotAuthenticated."""


class Surface(Struct, frozen=True):
    operations: tuple[Operation, ...]
    document: Callable[[], bytes]
    """The OpenAPI document."""
    page: Callable[[], bytes]
    """The same, to be read by people."""
    problem: ProblemReply = problem_reply
    cors: Cors | None = None
    """Which pages from elsewhere may call; None leaves browsers to their own rules."""
