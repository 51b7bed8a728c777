"""What can be asked, declared: the router, the OpenAPI document and the docs are made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.api.problems import ProblemReply
from penstock.api.reply import AnyReply
from penstock.core.caller import KeyRole

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
    """Who may; told in the docs, and checked by the Desk itself. Before a body is read, too."""
    query: type[Struct] | None = None
    body: Any = None
    body_type: str = "application/json"
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
