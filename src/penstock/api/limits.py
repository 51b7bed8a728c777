"""Limits: how many jobs at once, how fast, and how many may wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.operation import Operation
from penstock.api.reply import NOTHING, Reply, json_reply
from penstock.core.errors import NotFound
from penstock.core.verdict import Rate
from penstock.ports.engine_api import KeyRole, Limit, LimitView

if TYPE_CHECKING:
    from penstock.api.call import Call


class LimitList(Struct, frozen=True):
    limits: list[LimitView]


class RateFields(Struct, frozen=True, forbid_unknown_fields=True):
    """So many in so many seconds; all of them may come at once."""

    count: int
    per: float


class LimitBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds for the jobs that match; jobs with the same values of `key` share it."""

    key: tuple[str, ...] = ()
    """`tenant`, `topic`, `label:NAME`; none means that all matching jobs share it."""
    topics: tuple[str, ...] = ()
    """Globs; any may match."""
    tenants: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    """All must be there; values are globs."""
    concurrency: int | None = None
    """How many may be with workers at once."""
    rate: RateFields | None = None
    """How many may be given to workers in a time."""
    max_waiting: int | None = None
    """How many may wait; a submission beyond that is refused with 429."""


async def list_limits(call: Call) -> Reply:
    return json_reply(LimitList(await call.api.limits.list()))


async def get_limit(call: Call) -> Reply:
    name = call.params["name"]
    for view in await call.api.limits.list():
        if view.limit.name == name:
            return json_reply(view)
    raise NotFound(f"there is no limit {name[:100]!r}")


async def put_limit(call: Call) -> Reply:
    given = await call.json(LimitBody)
    limit = Limit(
        name=call.params["name"],
        key=given.key,
        topics=given.topics,
        tenants=given.tenants,
        labels=given.labels,
        concurrency=given.concurrency,
        rate=None if given.rate is None else Rate(given.rate.count, given.rate.per),
        max_waiting=given.max_waiting,
    )
    return json_reply(await call.api.limits.put(limit))


async def delete_limit(call: Call) -> Reply:
    await call.api.limits.delete(call.params["name"])
    return NOTHING


_PATH = "/v1/limits/{name}"

OPERATIONS = (
    Operation("GET", "/v1/limits", list_limits, answer=LimitList, summary="List limits"),
    Operation("GET", _PATH, get_limit, answer=LimitView, refusals=(404,), summary="Get a limit"),
    Operation(
        "PUT",
        _PATH,
        put_limit,
        role=KeyRole.OPERATE,
        body=LimitBody,
        answer=LimitView,
        refusals=(413, 415, 422),
        summary="Create or change a limit",
        description="It applies from the next dispatch on.",
    ),
    Operation(
        "DELETE",
        _PATH,
        delete_limit,
        role=KeyRole.OPERATE,
        status=204,
        refusals=(404,),
        summary="Delete a limit",
    ),
)
