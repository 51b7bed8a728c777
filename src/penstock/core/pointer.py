"""Pointers: the `data:` and `blob:` URIs that Penstock makes, and which others may be followed.

    data:application/json,{"a":1}                  the payload itself
    data:application/json;base64,IsOpIg==          the same, where it can't be written as it is
    blob:sha256-<64 hex digits>                    a stored blob, named by its content
    blob:sha256-<64 hex digits>;type=image/png     the same, when it isn't JSON

Any `data:` URI of RFC 2397 can be read. JSON of printable ASCII without `%` and `#` needs no
escaping and is written unchanged, so most jobs pay for no encoding; anything else is base64,
which is shorter than percent-encoding.

Others' data may be read below the prefixes of an allow-list. A prefix permits what lies below
it, component by component: `https://host/a` permits `https://host/a` and `https://host/a/b`, but
neither `https://host/abc` nor a way around through `..`. Anything two programs could read
differently (an escaped dot, a backslash, a chain of file systems) is refused rather than
understood. `file:` prefixes are judged here by their text only; who opens the file must also
resolve symbolic links (see `penstock.adapters.files.foreign`).
"""

from __future__ import annotations

import re
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import msgspec
from msgspec import Raw, Struct

from penstock.core.errors import InvalidRequest, TooLarge, UnreadablePointer

JSON = "application/json"
BINARY = "application/octet-stream"
FIELD = "pointer"

_DATA_JSON = f"data:{JSON},"
_BASE64 = ";base64"
_TOKEN = r"[A-Za-z0-9!#$&^_.+-]+"
_MEDIA_TYPE = re.compile(rf"{_TOKEN}/{_TOKEN}(;{_TOKEN}={_TOKEN})*", re.ASCII)
_BLOB = re.compile(r"blob:sha256-([0-9a-f]{64})(?:;type=(.+))?", re.ASCII)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):", re.ASCII)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_UNCLEAN = re.compile(r"[\x00-\x20\x7f\\]")
_SEPARATOR = re.compile(r"[/\\?#]")
_MAX_MEDIA_TYPE = 127

WITHOUT_PLACE = frozenset({"memory"})
"""Schemes that are allowed as a whole: they have no host, bucket or folder to name."""

INDIRECT = frozenset(
    {
        "arrow_hdfs",
        "asynclocal",
        "blob",
        "blockcache",
        "cached",
        "data",
        "dir",
        "filecache",
        "generic",
        "git",
        "libarchive",
        "local",
        "reference",
        "simplecache",
        "tar",
        "zip",
    }
)
"""Schemes that reach the local disk, or another scheme, by a way that isn't checked."""


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


def no_such_blob(uri: str) -> UnreadablePointer:
    return UnreadablePointer(
        FIELD,
        f"there is no blob {shown(uri)}",
        hint="it was never stored here, or its retention has passed",
    )


def encode_data(data: bytes, media_type: str = JSON) -> str:
    """The `data:` URI that carries these bytes."""
    if media_type == JSON:
        if data.isascii():
            text = data.decode()
            if text.isprintable() and "%" not in text and "#" not in text:
                return _DATA_JSON + text
    else:
        check_media_type(media_type)
    return f"data:{media_type}{_BASE64},{b2a_base64(data, newline=False).decode()}"


def decode_data(uri: str) -> bytes:
    """The bytes that a `data:` URI carries."""
    if uri.startswith(_DATA_JSON) and uri.isascii() and "%" not in uri:
        return uri[len(_DATA_JSON) :].encode()
    head, body = _split_data(uri)
    if head.endswith(_BASE64):
        return _from_base64(body)
    if not body.isascii():
        raise _malformed("has characters that must be written as %XX")
    if _BAD_ESCAPE.search(body):
        raise _malformed("has a '%' that two hex digits don't follow")
    return unquote_to_bytes(body)


def data_media_type(uri: str) -> str:
    """The media type that a `data:` URI declares."""
    media_type = _split_data(uri)[0].removesuffix(_BASE64)
    if not media_type:
        return "text/plain;charset=US-ASCII"
    return "text/plain" + media_type if media_type.startswith(";") else media_type


def media_type(uri: str) -> str:
    """The media type of what a pointer names; JSON where it does not say."""
    if uri.startswith(_DATA_JSON):
        return JSON
    if uri.startswith("data:"):
        return data_media_type(uri)
    return parse_blob(uri).media_type if uri.startswith("blob:") else JSON


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


def _from_base64(text: str) -> bytes:
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise _malformed(f"is not valid base64: {error}") from None


def _malformed(problem: str) -> UnreadablePointer:
    return UnreadablePointer(
        FIELD,
        f"the data: URI {problem}",
        hint="data:<media type>,<text> or data:<media type>;base64,<content>",
    )


# -- others' data ---------------------------------------------------------------------------


class Source(Struct, frozen=True):
    """One entry of the allow-list, or where a pointer leads."""

    scheme: str
    place: tuple[str, ...]
    """Host (or bucket) first, then the components of the path."""

    def permits(self, other: Source) -> bool:
        """Whether the other is this one or lies below it."""
        return other.scheme == self.scheme and other.place[: len(self.place)] == self.place

    @property
    def path(self) -> str:
        """What a `file:` source names."""
        return "/" + "/".join(unquote(part) for part in self.place[1:])


def parse_source(prefix: str) -> Source:
    """Read one entry; raises ValueError, with what is wrong, for one that isn't safe."""
    try:
        source = locate(prefix)
    except UnreadablePointer as error:
        raise ValueError(error.problem) from None
    if source.scheme in INDIRECT:
        raise ValueError(
            f"'{source.scheme}:' can't be allowed; for local folders write file:///folder"
        )
    if "?" in prefix or "#" in prefix:
        raise ValueError(f"{shown(prefix)} has a '?' or '#'; a prefix ends with a path")
    place = source.place
    while place and not place[-1]:
        place = place[:-1]
    if not place and source.scheme not in WITHOUT_PLACE:
        raise ValueError(f"{shown(prefix)} names no host, bucket or folder")
    return Source(source.scheme, place)


def locate(uri: str) -> Source:
    """Where a pointer leads. Refuses what could be read in two ways."""
    scheme = scheme_of(uri)
    if problem := _unclean(uri):
        raise UnreadablePointer(FIELD, f"{shown(uri)} {problem}", hint="write it out plainly")
    try:
        parts = urlsplit(uri)
    except ValueError:
        raise UnreadablePointer(FIELD, f"{shown(uri)} is not a URI") from None
    host, path = parts.netloc.lower(), parts.path.removeprefix("/")
    if scheme == "file":
        host = "" if host == "localhost" else host
        if host or path == parts.path:
            raise UnreadablePointer(
                FIELD, f"{shown(uri)} names no absolute path", hint="file:///folder/name"
            )
    return Source(scheme, (host, *path.split("/")) if host or path else ())


def _unclean(uri: str) -> str:
    if _UNCLEAN.search(uri):
        return "has a space, a backslash or a control character; escape it as %XX"
    if "::" in uri:
        return "chains file systems with '::'"
    if {"..", "."} & set(_SEPARATOR.split(_unescaped(uri))):
        return "has '.' or '..' in its path"
    return ""


def _unescaped(uri: str) -> str:
    """The text with every layer of %XX taken off, as a careless server might."""
    while (plain := unquote(uri)) != uri:
        uri = plain
    return uri


# -- results of other jobs in an input -----------------------------------------------

RESULT_OF = "$result_of"
"""Where an input has `{"$result_of": "<job id>"}`, and its request says `takes_results`, the job
gets the result of that job, which is one of its `after`. It is put in when the job starts."""


def references(plain: Any) -> Iterator[str]:
    """The ids of the jobs whose results an input has, as it was decoded from JSON."""
    stack = [plain]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            if (job_id := _reference(value)) is not None:
                yield job_id
            else:
                stack += value.values()


def filled(payload: bytes, results: Mapping[str, Raw]) -> bytes:
    """The input with results, each as JSON, in place of the references to these jobs."""

    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            if (job_id := _reference(value)) is not None:
                return results.get(job_id, value)
            return {key: fill(item) for key, item in value.items()}
        return value

    return msgspec.json.encode(fill(msgspec.json.decode(payload)))


def _reference(value: dict[str, Any]) -> str | None:
    job_id = value.get(RESULT_OF) if len(value) == 1 else None
    return job_id if isinstance(job_id, str) else None
