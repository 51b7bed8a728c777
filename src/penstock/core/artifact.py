"""Artifacts: the files that a job leaves, as named pointers in its result."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256

import msgspec
from msgspec import Struct

from penstock.core.errors import InvalidRequest, TooLarge

MAX_ARTIFACTS = 1000
"""Of one job; many small files belong in an archive."""
MAX_NAME = 1024
"""Bytes of a name."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\\]")


class Artifact(Struct, frozen=True, gc=False):
    """One file that a job left."""

    name: str
    """A relative path with '/' between its parts, as `plots/loss.png`."""
    size: int
    sha256: str
    media_type: str
    pointer: str
    """The URI of its content: `blob:sha256-…`."""


def check_name(name: str, field: str = "name") -> str:
    """The name of an artifact, if it can be a path below any folder. Raises InvalidRequest."""
    if not isinstance(name, str):
        raise InvalidRequest(field, f"must be text, got {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(field, "must be valid Unicode text") from None
    if not 0 < size <= MAX_NAME:
        raise InvalidRequest(field, f"must have 1 to {MAX_NAME} bytes, has {size}")
    if _CONTROL.search(name):
        raise InvalidRequest(field, f"{name!r} has a control character or a backslash")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise InvalidRequest(
            field, f"{name!r} must be a relative path without '.' and '..', as plots/loss.png"
        )
    return name


def check_count(count: int) -> None:
    """Raises TooLarge for more artifacts than a job may have."""
    if count > MAX_ARTIFACTS:
        raise TooLarge(
            "artifacts",
            f"a job may leave {MAX_ARTIFACTS:,} artifacts",
            hint="pack many small files into one archive",
        )


# -- as checkpointed rows ---------------------------------------------------------------------

ROW = "artifact:"
"""How the names of their rows begin."""
_LONGEST = 150


def check_rows(rows: Iterable[object]) -> None:
    """Raises InvalidRequest if a job's own row has a name that only artifacts may have."""
    for index, row in enumerate(rows):
        if str(getattr(row, "name", "")).startswith(ROW):
            raise InvalidRequest(
                f"rows[{index}].name",
                f"must not begin with {ROW!r}",
                hint="leave a file with ctx.artifact(name, source)",
            )


def row_name(name: str) -> str:
    """The name of the row that refers to an artifact. One artifact, one row."""
    short = len(name) <= _LONGEST  # no name begins with a slash
    return ROW + (name if short else f"/{sha256(name.encode()).hexdigest()}")


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Artifact).decode
