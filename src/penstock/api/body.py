"""A request's body, taken in no faster than it is used, and no slower than is decent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from penstock.api.options import HttpOptions
from penstock.api.problems import Refused
from penstock.core.errors import TooLarge

Receive = Callable[[], Awaitable[dict[str, Any]]]


class Gone(Exception):
    """The client left; nobody is there to answer."""


async def read_body(
    receive: Receive, length: bytes | None, most: int, options: HttpOptions
) -> bytes:
    """The whole body, if it is no larger than allowed; refused before all of it is read."""
    if length is not None and int(length) > most:
        raise too_large(most)
    return await _gather(receive, most, options)


async def _gather(receive: Receive, most: int, options: HttpOptions) -> bytes:
    parts: list[bytes] = []
    size, begun = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(_due(begun, size, options)) as limit:
            while True:
                message = _present(await receive())
                parts.append(message["body"])
                size += len(message["body"])
                if size > most:
                    raise too_large(most)
                if not message["more_body"]:
                    return b"".join(parts)
                limit.reschedule(_due(begun, size, options))
    except TimeoutError:
        raise slow() from None


def _due(begun: float, size: int, options: HttpOptions) -> float:
    """When the next part must be here, given what has come so far."""
    return begun + min(options.body_timeout, options.body_grace + size / options.min_rate)


async def parts_of(receive: Receive, options: HttpOptions) -> AsyncGenerator[bytes, None]:
    """A body of any length, part by part; the next is asked for when it is wanted."""
    more = True
    while more:
        try:
            async with asyncio.timeout(options.idle):
                message = _present(await receive())
        except TimeoutError:
            raise slow() from None
        more = message["more_body"]
        if message["body"]:
            yield message["body"]


def _present(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "http.disconnect":
        raise Gone
    return message


def too_large(most: int) -> TooLarge:
    return TooLarge(
        "body",
        f"is longer than {most:,} bytes",
        hint="send large inputs to /v1/blobs and pass the pointer, or many jobs in several calls",
    )


def slow() -> Refused:
    return Refused(
        408,
        "SLOW",
        "the body did not come in time",
        hint="send it faster, or in smaller requests",
        headers=((b"connection", b"close"),),
    )
