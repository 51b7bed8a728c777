"""Serves the files of the web page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.api.operation import PUBLIC, route
from penstock.api.reply import Reply
from penstock.core.errors import NotFound
from penstock.dashboard.files import HEADERS, HOME, file_at

if TYPE_CHECKING:
    from penstock.api.call import Call

_HEADERS = tuple((name.encode(), value.encode()) for name, value in HEADERS.items())


class ViewQuery(Struct, frozen=True):
    """What the page itself reads: filters and so on."""


_PAGE: dict[str, Any] = {
    "role": PUBLIC,
    "query": ViewQuery,
    "answer": str,
    "answer_type": "text/html",
    "others": {304: None},
    "refusals": (404,),
}


@route(f"GET {HOME}", summary="Open the dashboard", **_PAGE)
@route(
    f"GET {HOME}{{path...}}",
    name="get_dashboard_file",
    summary="Open a view of the dashboard, or a file",
    **_PAGE,
)
async def get_dashboard(call: Call) -> Reply:
    file = file_at(call.params.get("path", ""))
    if file is None:
        raise NotFound("the dashboard has no such file")
    headers = (*_HEADERS, (b"etag", file.etag.encode()))
    if call.header(b"if-none-match") == file.etag:
        return Reply(b"", 304, headers)
    return Reply(file.content, 200, ((b"content-type", file.media_type.encode()), *headers))


@route("GET /", role=PUBLIC, status=303)
@route("GET /dashboard", name="open_dashboard_too", role=PUBLIC, status=303)
async def open_dashboard(call: Call) -> Reply:
    """Go to the dashboard."""
    return Reply(b"", 303, ((b"location", HOME.encode()), (b"cache-control", b"no-store")))
