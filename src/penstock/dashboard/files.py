"""The files of the page, and the headers that they are sent with.

Every path below the page's own that is not a file is one of its views: the browser gets the same
document and draws what the path says. The files hold no data, so nobody has to be signed in.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from msgspec import Struct

from penstock.dashboard.vocabulary import stylesheet, vocabulary

HOME = "/dashboard/"
"""Where the page is. Its files are below `/dashboard/static/`."""
HEADERS = {
    # No markup and no script from data: not even own scripts may write markup (trusted types).
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "same-origin",
    # Asked for each time and answered with 304: a new version is never mixed with an old one.
    "cache-control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
_MADE = {"vocabulary.json": vocabulary, "states.css": stylesheet}


class File(Struct, frozen=True):
    content: bytes
    media_type: str
    etag: str


def file_at(path: str) -> File | None:
    """The file at a path below HOME, as `jobs` or `static/dom.js`; None if there is none."""
    if not path.startswith("static/"):
        return _files()["index.html"]
    return _files().get(path.removeprefix("static/"))


@cache
def _files() -> dict[str, File]:
    folder = Path(__file__).with_name("static")
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in _TYPES
    }
    contents |= {name: make() for name, make in _MADE.items()}
    return {name: _file(name, content) for name, content in contents.items()}


def _file(name: str, content: bytes) -> File:
    etag = hashlib.sha256(content).hexdigest()[:32]
    return File(content, _TYPES[Path(name).suffix], f'"{etag}"')
