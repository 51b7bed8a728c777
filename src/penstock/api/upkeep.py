"""The engine itself: how it is, and its upkeep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.operation import Operation
from penstock.api.reply import Reply, json_reply
from penstock.ports.engine_api import Cleaned, EngineStatus, KeyRole
from penstock.ports.store import Verified

if TYPE_CHECKING:
    from penstock.api.call import Call


async def get_status(call: Call) -> Reply:
    return json_reply(await call.api.status())


async def verify(call: Call) -> Reply:
    return json_reply(await call.api.verify())


class PruneBody(Struct, frozen=True, forbid_unknown_fields=True):
    older_than: Annotated[float, Meta(ge=0)]
    """Seconds since a job has ended."""


async def prune(call: Call) -> Reply:
    given = await call.json(PruneBody)
    return json_reply(await call.api.prune(given.older_than))


OPERATIONS = (
    Operation(
        "GET",
        "/v1/status",
        get_status,
        answer=EngineStatus,
        summary="How the engine is",
        description="And how many jobs are in which state; with a tenant's key, of that tenant.",
    ),
    Operation(
        "POST",
        "/v1/verify",
        verify,
        role=KeyRole.ADMIN,
        answer=Verified,
        summary="Compare every record with its history",
        description="Reads the whole store; with many jobs it takes a while.",
    ),
    Operation(
        "POST",
        "/v1/prune",
        prune,
        role=KeyRole.ADMIN,
        body=PruneBody,
        answer=Cleaned,
        refusals=(415, 422),
        summary="Forget old jobs",
        description="What ended before that, with history and logs, and blobs nobody points to.",
    ),
)
