"""Pointers that Penstock makes itself: `data:` and `blob:` URIs.

    data:application/json;base64,eyJhIjoxfQ==      the payload itself
    blob:sha256-<64 hex digits>                    a stored blob, named by its content
    blob:sha256-<64 hex digits>;type=image/png     the same, when it isn't JSON

Any `data:` URI of RFC 2397 can be read; the first form is what is written, and is read
on a path of its own because every small job takes it twice.
"""

from __future__ import annotations

import re
from binascii import a2b_base64, b2a_base64
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from penstock.core.errors import InvalidRequest, TooLarge, UnreadablePointer

JSON = "application/json"
BINARY = "application/octet-stream"
FIELD = "pointer"

_DATA_JSON = f"data:{JSON};base64,"
_TOKEN = r"[A-Za-z0-9!#$&^_.+-]+"
_MEDIA_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}(;{_TOKEN}={_TOKEN})*", re.ASCII)
_BLOB = re.compile(r"blob:sha256-([0-9a-f]{64})(?:;type=(.+))?", re.ASCII)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):", re.ASCII)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MAX_MEDIA_TYPE = 127


class BlobName(Struct, frozen=True):
    """What a `blob:` URI says."""

    digest: str
    media_type: str = JSON

    @property
    def uri(self) -> str:
        plain = f"blob:sha256-{self.digest}"
        return plain if self.media_type == JSON else f"{plain};type={self.media_type}"


def name_blob(data: bytes, media_type: str = JSON) -> BlobName:
    """The name that these bytes have in every store."""
    if media_type != JSON:
        check_media_type(media_type)
    return BlobName(sha256(data).hexdigest(), media_type)


def parse_blob(uri: str) -> BlobName:
    found = _BLOB.fullmatch(uri)
    media_type = (found[2] or JSON) if found else ""
    if found is None or not _MEDIA_TYPE.fullmatch(media_type):
        raise UnreadablePointer(
            FIELD,
            f"{shown(uri)} is not a valid blob: URI",
            hint="blob:sha256- and 64 lower-case hex digits, as the engine returned it",
        )
    return BlobName(found[1], media_type)


def encode_data(data: bytes, media_type: str = JSON) -> str:
    """The `data:` URI that carries these bytes."""
    if media_type == JSON:
        return _DATA_JSON + _to_base64(data)
    check_media_type(media_type)
    return f"data:{media_type};base64,{_to_base64(data)}"


def decode_data(uri: str) -> bytes:
    """The bytes that a `data:` URI carries."""
    if uri.startswith(_DATA_JSON):
        return _from_base64(uri[len(_DATA_JSON) :])
    head, body = _split_data(uri)
    if head.endswith(";base64"):
        return _from_base64(body)
    if not body.isascii():
        raise _malformed("has characters that must be written as %XX")
    if _BAD_ESCAPE.search(body):
        raise _malformed("has a '%' that two hex digits don't follow")
    return unquote_to_bytes(body)


def data_media_type(uri: str) -> str:
    """The media type that a `data:` URI declares."""
    if uri.startswith(_DATA_JSON):
        return JSON
    media_type = _split_data(uri)[0].removesuffix(";base64")
    if not media_type:
        return "text/plain;charset=US-ASCII"
    return "text/plain" + media_type if media_type.startswith(";") else media_type


def scheme_of(uri: str) -> str:
    """What stands before the first colon, in lower case."""
    found = _SCHEME.match(uri)
    if found is None:
        raise UnreadablePointer(
            FIELD,
            f"{shown(uri)} is not a URI" if uri else "is empty",
            hint="write it with its scheme, as in data:, blob:, file: or https:",
        )
    return found[1].lower()


def check_media_type(media_type: str) -> None:
    if len(media_type) > _MAX_MEDIA_TYPE or not _MEDIA_TYPE.fullmatch(media_type):
        raise InvalidRequest(
            "media_type",
            f"{shown(media_type)} is not a media type",
            hint="type/subtype, as in application/json or text/plain;charset=utf-8",
        )


def check_size(field: str, size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(
            field,
            f"{size:,} bytes; at most {limit:,} are allowed",
            hint="keep it elsewhere and pass a pointer to it, or raise the limit in the settings",
        )


def shown(uri: str) -> str:
    """The URI as an error may show it: short, and without its query, which may be secret."""
    path, query, _ = uri.partition("?")
    short = path if len(path) <= 90 else path[:87] + "..."
    return repr(short + ("?..." if query else ""))


def _split_data(uri: str) -> tuple[str, str]:
    head, comma, body = uri.partition(",")
    if not comma:
        raise _malformed("has no comma before its content")
    return head[len("data:") :], body


def _to_base64(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode("ascii")


def _from_base64(text: str) -> bytes:
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise _malformed(f"is not valid base64: {error}") from None


def _malformed(problem: str) -> UnreadablePointer:
    return UnreadablePointer(
        FIELD, f"the data: URI {problem}", hint="data:<media type>;base64,<content>"
    )
