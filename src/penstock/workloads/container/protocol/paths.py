"""Paths of files that come with a job or out of one: always below a folder of the worker's.

The rules hold for input files, for what a build's context brings, for the members of archives
and for the names of artifacts. They are about names only: that no link on the way leads
elsewhere is for whoever opens the file.
"""

from __future__ import annotations

import re

MAX_PATH = 1024
"""Bytes of a whole path."""
MAX_PART = 255
"""Bytes of one of its parts: what file systems take."""
MAX_DEPTH = 32

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DRIVE = re.compile(r"[A-Za-z]:")


def checked_path(path: str) -> str:
    """The path in its one normal form ('./a//b/' is 'a/b'), or ValueError with a sentence.

    What it returns has no '.', no '..' and no empty part, does not begin with a slash, and can
    be put below any folder. The folder itself ('.') is no path of a file and is refused.
    """
    _check_characters(path)
    if path.startswith("/"):
        raise ValueError("is absolute; write it relative to the folder")
    if _DRIVE.match(path):
        raise ValueError("begins with a drive letter")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise ValueError("names no file" if path else "is empty")
    if ".." in parts:
        raise ValueError("has a part '..'")
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"is {len(parts)} folders deep; at most {MAX_DEPTH} are allowed")
    if any(len(part.encode()) > MAX_PART for part in parts):
        raise ValueError(f"has a part longer than {MAX_PART} bytes")
    return "/".join(parts)


def checked_folder(path: str) -> str:
    """The same for a folder, of which '.' is the top."""
    return "." if path in (".", "./") else checked_path(path)


def _check_characters(path: str) -> None:
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise ValueError("is not UTF-8") from None
    if size > MAX_PATH:
        raise ValueError(f"is {size} bytes long; at most {MAX_PATH} are allowed")
    if "\0" in path:
        raise ValueError("has a NUL character")
    if _CONTROL.search(path):
        raise ValueError("has a control character")
    if "\\" in path:
        raise ValueError("has a backslash; parts are divided by '/'")
