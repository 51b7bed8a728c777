"""What the API says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.api.operation import PUBLIC, Operation
from penstock.api.page import STYLE_HASH
from penstock.api.reply import JSON_HEADERS, NO_STORE, Headers, Reply

if TYPE_CHECKING:
    from penstock.api.call import Call

PAGE: Headers = (
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'sha256-%b'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'" % STYLE_HASH.encode(),
    ),
    NO_STORE,
)


async def get_openapi(call: Call) -> Reply:
    return Reply(call.services.document(), 200, JSON_HEADERS)


async def get_docs(call: Call) -> Reply:
    return Reply(call.services.page(), 200, PAGE)


_DESCRIPTION = "OpenAPI 3.1, made from the same table as the server's own routes."

OPERATIONS = (
    Operation(
        "GET",
        "/v1/openapi.json",
        get_openapi,
        answer=dict[str, Any],
        summary="Get this document",
        description=_DESCRIPTION,
    ),
    Operation(
        "GET",
        "/openapi.json",
        get_openapi,
        name="get_openapi_openly",
        role=PUBLIC,
        answer=dict[str, Any],
        summary="Get this document, without a key",
        description=_DESCRIPTION,
    ),
    Operation(
        "GET",
        "/docs",
        get_docs,
        role=PUBLIC,
        answer=str,
        answer_type="text/html",
        summary="Read this document",
    ),
)
