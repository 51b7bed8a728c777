"""Downloads that resume: a file by its URL, checked against what was announced."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from penstock.core.errors import Unavailable
from penstock.models.store import FULL, Progress, check_space, copy, exclusive
from penstock.models.values import LlmCode, LlmFailure

_TIMEOUT = 30.0
_DELAYS = (1.0, 2.0, 4.0)
"""Seconds between tries when nothing comes."""
_PARTIAL, _NO_SUCH_RANGE = 206, 416
_CHUNK = 1 << 18
_LARGEST_PAGE = 64 << 20
_CERTIFICATES = ("PIP_CERT", "REQUESTS_CA_BUNDLE")
"""Environment variables that name certificate authorities, beside those that OpenSSL reads."""


class Remote(Struct, frozen=True, kw_only=True):
    """A file that can be fetched."""

    path: str
    """As people know it: its name, or its path in a repository."""
    size: int = 0
    """0 if it is not known."""
    sha256: str = ""
    git: str = ""
    """Its SHA-1 as git counts it: what small files have instead of a SHA-256."""
    url: str = ""
    headers: Mapping[str, str] = {}
    """Sent to the host of the URL, and to none that it redirects to."""
    version: str = ""
    """Tells one version of the file from another where there is no checksum."""


class HttpRefused(Exception):
    """The server answered with an error."""

    def __init__(self, url: str, status: int, code: str, reason: str) -> None:
        super().__init__(f"HTTP {status} {reason}".rstrip())
        self.url, self.status, self.code = url, status, code


def get(url: str, headers: Mapping[str, str]) -> tuple[bytes, Mapping[str, str]]:
    """A small document, and its headers with names in lower case. Raises Refused, OSError."""
    with _open(url, headers) as response:
        try:
            return response.read(_LARGEST_PAGE), _headers(response)
        except http.client.HTTPException as error:
            raise OSError(str(error) or type(error).__name__) from error


def describe(url: str, path: str) -> Remote:
    """A file of the web, by its headers. Raises Refused, OSError."""
    with _open(url, {}, method="HEAD") as response:
        headers = _headers(response)
    length = headers.get("content-length", "")
    version = headers.get("etag", "") or headers.get("last-modified", "")
    return Remote(path=path, size=int(length) if length.isdigit() else 0, url=url, version=version)


def fetch(file: Remote, folder: Path, target: Path, progress: Progress | None) -> Path:
    """The whole file, checked. What an earlier try has left in `folder` is not fetched again.

    Raises Refused, Conflict if another program is fetching it, StoreFull, Unavailable if the
    connection broke off, and LlmFailure if it came damaged; then nothing is kept.
    """
    folder.mkdir(exist_ok=True, mode=0o700)
    part = folder / f"{_key(file)}.part"
    with exclusive(part) as written:
        have = os.fstat(written.fileno()).st_size
        if file.size and have > file.size:
            written.truncate(have := 0)
        check_space(folder, max(0, file.size - have))
        try:
            if not file.size or have < file.size:
                written.seek(have)
                _resume(file, written, progress)
            written.flush()
            _check(part, file, progress)
        except LlmFailure:
            part.unlink()
            raise
        return part.rename(target)


def reason_of(error: Exception) -> str:
    """One line."""
    why = getattr(error, "reason", None) or error
    return (str(why).strip().splitlines() or [type(error).__name__])[0]


def damaged(path: str, why: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_INVALID, f"{path} came damaged: {why}; nothing was kept")


def _key(file: Remote) -> str:
    """The name of what was fetched so far: the same only for the same content."""
    checksum = file.sha256 or file.git
    if checksum.isalnum():  # a server says it, and it becomes a file's name
        return checksum
    said = f"{file.url} {file.version} {file.size} {checksum}"
    return hashlib.sha256(said.encode()).hexdigest()


def _resume(file: Remote, written: BinaryIO, progress: Progress | None) -> None:
    """Go on from where the file is at; as long as something comes, so do we."""
    delays = list(_DELAYS)
    while True:
        before = written.tell()
        try:
            return _stream(file, written, progress)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            if written.tell() > before:
                delays = list(_DELAYS)
            elif not delays:
                raise _broken(file, written.tell(), error) from error
            else:
                time.sleep(delays.pop(0))


def _stream(file: Remote, written: BinaryIO, progress: Progress | None) -> None:
    have = written.tell()
    headers = {**file.headers, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = _open(file.url, headers)
    except HttpRefused as refused:
        if not have or refused.status != _NO_SUCH_RANGE:
            raise
        written.truncate(written.seek(0))  # the next try fetches all of it
        raise ConnectionError(str(refused)) from refused
    with response:
        if response.status != _PARTIAL:
            have = written.seek(0)
            written.truncate()
        elif not _headers(response).get("content-range", "").startswith(f"bytes {have}-"):
            written.truncate(written.seek(0))
            raise ConnectionError("the server sent a different range than requested")
        length = _headers(response).get("content-length", "")
        size = file.size or (have + int(length) if length.isdigit() else 0)
        while data := response.read(_CHUNK):
            have += written.write(data)
            if file.size and have > file.size:
                raise damaged(file.path, "it is longer than announced")
            if progress:
                progress("fetching", have, size)
        if have < size:
            raise ConnectionError("the connection was closed")


def _check(part: Path, file: Remote, progress: Progress | None) -> None:
    size = part.stat().st_size
    if file.size and size != file.size:
        raise damaged(file.path, "it is not as long as announced")
    expected = file.sha256 or file.git
    if not expected:
        return
    # Git's checksum is of the file with its length in front.
    found = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size)
    with part.open("rb") as read:
        copy(read, found.update, "checking", size, progress)
    if found.hexdigest() != expected:
        raise damaged(file.path, "its checksum is another one than announced")


def _broken(file: Remote, have: int, error: Exception) -> Unavailable:
    if not have:
        why = f"{file.path} can't be fetched: {reason_of(error)}"
        return Unavailable(why, hint="is there a network?")
    return Unavailable(
        f"{file.path} broke off after {have:,} of {file.size:,} bytes: {reason_of(error)}",
        hint="the same command goes on from there",
    )


def _open(url: str, headers: Mapping[str, str], method: str = "GET") -> Any:
    request = urllib.request.Request(url, method=method)
    for name, value in headers.items():
        if name == "Authorization":
            request.add_unredirected_header(name, value)
        else:
            request.add_header(name, value)
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT, context=_trusted())
    except urllib.error.HTTPError as error:
        with error:
            code = error.headers.get("X-Error-Code", "")
            raise HttpRefused(url, error.code, code, error.reason) from None
    except (ValueError, http.client.HTTPException) as error:  # a port, or an answer, that is none
        raise OSError(str(error) or type(error).__name__) from error


def _trusted() -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in _CERTIFICATES:
        if file := os.environ.get(name):
            context.load_verify_locations(file)
    return context


def _headers(response: Any) -> Mapping[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}
