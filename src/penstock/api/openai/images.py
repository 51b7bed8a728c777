"""Images that a request names by URL: fetched below `openai.image_sources`, and sent to the
model as `data:` URIs."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING

import aiohttp
from msgspec.structs import replace
from yarl import URL

from penstock.core.errors import InvalidRequest, TooLarge
from penstock.workloads.llm.values import ChatRequest, ImagePart, ImageUrl, LlmRequest

if TYPE_CHECKING:
    from penstock.api.call import Call

_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
_LARGEST = 20 << 20
_MOST = 16
_PATIENCE = 20.0


async def with_images(call: Call, request: LlmRequest) -> LlmRequest:
    """The request with every image in it. Raises InvalidRequest for one that can't be had."""
    if not isinstance(request, ChatRequest):
        return request
    found = _urls(request)
    if not found:
        return request
    if len(found) > _MOST:
        raise InvalidRequest("messages", f"{len(found)} images by URL; at most {_MOST} are allowed")
    sources = call.services.options.image_sources
    images = [
        (number, index, _allowed(_place(number, index), url, sources))
        for number, index, url in found
    ]
    timeout = aiohttp.ClientTimeout(total=_PATIENCE)
    messages, left = list(request.messages), call.services.options.max_upload
    with call.attending():
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for number, index, url in images:
                parts = list(messages[number].content or ())
                data = await _fetched(session, _place(number, index), url, left)
                left -= len(data)
                parts[index] = ImagePart(ImageUrl(data))
                messages[number] = replace(messages[number], content=tuple(parts))
    return replace(request, messages=tuple(messages))


def refuse_urls(request: LlmRequest) -> None:
    """For requests that wait for their turn: the image may be another one by then. Raises
    InvalidRequest."""
    for number, index, _ in _urls(request) if isinstance(request, ChatRequest) else ():
        raise InvalidRequest(_place(number, index), "must be a data: URI in a batch")


def _urls(request: ChatRequest) -> list[tuple[int, int, str]]:
    """Images by URL: the message, the part, and the URL."""
    return [
        (number, index, part.image_url.url)
        for number, message in enumerate(request.messages)
        if isinstance(message.content, tuple)
        for index, part in enumerate(message.content)
        if isinstance(part, ImagePart) and not part.image_url.url.startswith("data:")
    ]


def _place(number: int, index: int) -> str:
    return f"messages[{number}].content[{index}].image_url.url"


def _allowed(where: str, url: str, sources: tuple[str, ...]) -> str:
    """The URL as it is fetched. Raises InvalidRequest unless it is below one of `sources`.

    One parser for the check and the fetch: it resolves `%2e%2e` as it resolves `..`."""
    try:
        given = URL(url)
    except ValueError:
        raise InvalidRequest(where, "is not a URL") from None
    for source in map(URL, sources):
        same = (given.scheme, given.authority) == (source.scheme, source.authority)
        below = f"{given.path}/".startswith(source.path.rstrip("/") + "/")
        if same and below and ".." not in given.path:
            return str(given)
    raise InvalidRequest(
        where,
        "is not below an allowed source",
        hint="send the image as a data: URI, or add its source to the setting openai.image_sources",
    )


async def _fetched(session: aiohttp.ClientSession, where: str, url: str, left: int) -> str:
    """The image as a data: URI; all images of a request have at most `left` characters more."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            kind = response.content_type
            if response.status != 200:
                raise InvalidRequest(where, f"the server answered {response.status}")
            if kind not in _TYPES:
                raise InvalidRequest(where, f"is {kind[:60]!r}; must be png, jpeg, gif or webp")
            data = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                data += chunk
                if len(data) > _LARGEST:
                    raise InvalidRequest(where, f"is larger than {_LARGEST >> 20} MiB")
                if len(data) * 4 > left * 3:  # base64
                    raise TooLarge(where, "the images of this request are too large together")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        why = str(error) or type(error).__name__
        raise InvalidRequest(where, f"can't be fetched: {why[:200]}") from None
    return f"data:{kind};base64,{b64encode(data).decode()}"
