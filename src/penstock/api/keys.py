"""Keys, and the log of who did what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.operation import Operation
from penstock.api.reply import Reply, json_reply
from penstock.api.selection import Limit, Seq, cursor, place_in
from penstock.ports.engine_api import KeyRole, KeyView, NewKey
from penstock.ports.store import AuditEntry, AuditQuery

if TYPE_CHECKING:
    from penstock.api.call import Call


class KeyList(Struct, frozen=True):
    keys: list[KeyView]


class KeyBody(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    """The principal that it makes of its holder."""
    roles: Annotated[tuple[KeyRole, ...], Meta(min_length=1, max_length=4)]
    tenant: str | None = None
    """The only tenant whose things it sees; none: every tenant's."""
    expires_in: Annotated[float, Meta(gt=0)] | None = None
    """Seconds after which it is good for nothing; none: never."""


async def list_keys(call: Call) -> Reply:
    return json_reply(KeyList(await call.api.keys.list()))


async def create_key(call: Call) -> Reply:
    given = await call.json(KeyBody)
    made = await call.api.keys.create(
        given.name, given.roles, tenant=given.tenant, expires_in=given.expires_in
    )
    return json_reply(made, 201)


async def revoke_key(call: Call) -> Reply:
    return json_reply(await call.api.keys.revoke(call.params["key_id"]))


class AuditListing(Struct, frozen=True, kw_only=True):
    principal: str | None = None
    action: str | None = None
    """A glob, as in `key.*`."""
    subject: str | None = None
    tenant: str | None = None
    before: Seq | None = None
    """Only entries with a lower `n`."""
    limit: Limit = 50
    cursor: str | None = None
    """`next` of the page before."""


class AuditPage(Struct, frozen=True):
    entries: list[AuditEntry]
    next: str | None
    """The `cursor` of the next page; null on the last."""


async def read_audit(call: Call) -> Reply:
    given = call.query(AuditListing)
    query = AuditQuery(
        principal=given.principal,
        action=given.action,
        subject=given.subject,
        tenant=given.tenant,
        before=given.before if given.cursor is None else place_in("a", given.cursor),
        limit=given.limit + 1,
    )
    entries = await call.api.audit.read(query)
    more = len(entries) > given.limit
    shown = entries[: given.limit]
    return json_reply(AuditPage(shown, cursor("a", shown[-1].n) if more else None))


OPERATIONS = (
    Operation(
        "GET",
        "/v1/keys",
        list_keys,
        role=KeyRole.ADMIN,
        answer=KeyList,
        summary="List keys",
        description="Without their tokens, which are not stored.",
    ),
    Operation(
        "POST",
        "/v1/keys",
        create_key,
        role=KeyRole.ADMIN,
        body=KeyBody,
        answer=NewKey,
        status=201,
        refusals=(409, 413, 415, 422),
        summary="Create a key",
        description="Its token is shown once; only its hash is stored.",
    ),
    Operation(
        "DELETE",
        "/v1/keys/{key_id}",
        revoke_key,
        role=KeyRole.ADMIN,
        answer=KeyView,
        refusals=(404, 409, 422),
        summary="Revoke a key",
        description="By its id, or by its name if only one valid key has it.",
    ),
    Operation(
        "GET",
        "/v1/audit",
        read_audit,
        role=KeyRole.ADMIN,
        query=AuditListing,
        answer=AuditPage,
        refusals=(422,),
        summary="Read the audit log",
        description="Who did what and whether it was permitted, newest first.",
    ),
)
