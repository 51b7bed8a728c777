"""Replies of handlers."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

Headers = Sequence[tuple[bytes, bytes]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

NO_STORE = (b"cache-control", b"no-store")
JSON_HEADERS: Headers = ((b"content-type", b"application/json"), NO_STORE)
SECURITY: Headers = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
"""Security headers of every response."""

LARGE = 16 << 10
"""Bytes from which on an answer is compressed for clients that take gzip. What is secret (tokens)
is in small answers only, so that nobody can guess it by their lengths."""
_LEVEL = 5
_TEXTS = frozenset({b"application/json", b"text/html", b"text/javascript", b"text/css"})

encode = msgspec.json.Encoder().encode


class Reply(Struct, frozen=True):
    """A complete response."""

    body: bytes = b""
    status: int = 200
    headers: Headers = JSON_HEADERS

    async def compressed(self) -> Reply:
        """With gzip, if it is a text that is whole; a part of a content stays as it is."""
        headers = dict(self.headers)
        kind = headers.get(b"content-type", b"").partition(b";")[0]
        if self.status != 200 or kind not in _TEXTS or b"accept-ranges" in headers:
            return self
        body = await asyncio.to_thread(gzip.compress, self.body, _LEVEL)
        more = ((b"content-encoding", b"gzip"), (b"vary", b"Accept-Encoding"))
        return Reply(body, self.status, (*self.headers, *more))

    async def send(self, send: Send) -> None:
        length = (b"content-length", b"%d" % len(self.body))
        start = {
            "type": "http.response.start",
            "status": self.status,
            "headers": [*self.headers, length] if self.status != 204 else self.headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": self.body})


class StreamReply(Struct, frozen=True):
    """An answer in parts, made as they are sent.

    The generator is closed when the reader is gone, takes nothing for too long, or the server
    closes; in the last case an answer of no set length ends as if it were complete.
    """

    content: AsyncGenerator[bytes, None]
    headers: Headers
    status: int = 200
    length: int | None = None
    """How long it is, where that is known; it is among the headers already."""
    watched: bool = True
    """False for one that reads the request's body itself, and so learns who leaves."""
    counted: bool = False
    """Whether it may last, and so takes one of the places for streams (or keeps that of a wait),
    although its operation does not always answer with a stream."""
    whole: bool = False
    """Whether it must not end as if it were complete when it is not."""


class AppReply(Struct, frozen=True):
    """An answer that another ASGI application gives, as Starlette's `StaticFiles`."""

    app: Callable[..., Awaitable[None]]


AnyReply = Reply | StreamReply | AppReply


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(encode(value), status)


NOTHING = Reply(b"", 204, (NO_STORE,))


def page_headers(style: str, forms: str = "none") -> Headers:
    """Those of an HTML page of ours: without scripts, with style sheets from this source."""
    policy = (
        f"default-src 'none'; style-src '{style}'; img-src 'self'; base-uri 'none';"
        f" form-action '{forms}'; frame-ancestors 'none'"
    )
    return (
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        NO_STORE,
    )


EVENT_STREAM: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    NO_STORE,
    (b"x-accel-buffering", b"no"),
)
"""For server-sent events; the last one keeps a proxy from holding them back."""
