"""Pictures that come with a job: told by their name and by how they begin."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.core.errors import InvalidRequest, TooLarge

MAX_IMAGE = 50 << 20
FIELD = "images"
_ENDINGS = (".jpg", ".jpeg", ".png", ".gif", ".webp")
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def media_type(data: bytes) -> str | None:
    """What the picture is, whatever its name says; None if it is none of those known."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def check_image(path: Path) -> None:
    """InvalidRequest if this file of the client's is no picture that a job can have."""
    _read(path, 16)


def read_image(path: Path) -> bytes:
    return _read(path, MAX_IMAGE + 1)


def image_name(number: int, path: Path) -> str:
    return f"image_{number:06}{path.suffix}"


def _read(path: Path, most: int) -> bytes:
    if path.suffix.lower() not in _ENDINGS:
        raise InvalidRequest(FIELD, f"{path} does not end in one of {', '.join(_ENDINGS)}")
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, _READ)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InvalidRequest(FIELD, f"{path} is not a file")
            data = file.read(most)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequest(FIELD, f"{path} can't be read: {reason.lower()}") from error
    if max(found.st_size, len(data)) > MAX_IMAGE:
        raise TooLarge(FIELD, f"{path} has {found.st_size} bytes; {MAX_IMAGE} is the most")
    if media_type(data) is None:
        raise InvalidRequest(FIELD, f"{path} is not a JPEG, PNG, GIF or WebP image")
    return data
