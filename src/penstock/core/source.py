"""Which pointers to others' data may be followed: an allow-list of URI prefixes.

A prefix permits what lies below it, component by component: `https://host/a` permits
`https://host/a` and `https://host/a/b`, but neither `https://host/abc` nor a way around
through `..`. Anything two programs could read differently (an escaped dot, a backslash, a
chain of file systems) is refused rather than understood.

`file:` prefixes are judged here by their text only; who opens the file must also resolve
symbolic links (see `penstock.adapters.files.foreign`).
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import FIELD, scheme_of, shown

_UNCLEAN = re.compile(r"[\x00-\x20\x7f\\]")
_SEPARATOR = re.compile(r"[/\\?#]")

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
