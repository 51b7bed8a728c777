"""Names of images: the grammar that registries share, and when two names mean the same.

    name            alpine, team/tool, registry.example:5000/team/tool
    name:tag        without a tag it is `latest`
    name@digest     sha256: and 64 hex digits; a tag beside it says nothing
    sha256:…        an image's id, as an engine that has it calls it

Whatever is no such name never reaches an engine, so none can be taken for an option.
"""

from __future__ import annotations

import re

from msgspec import Struct

MAX_REFERENCE = 255
ANY = "*"
ANY_TAG = ":*"

_PART = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?"
_REFERENCE = re.compile(
    rf"(?P<name>(?:{_HOST}/)?{_PART}(?:/{_PART})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}))?",
    re.ASCII,
)
_ID = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_BARE_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)


class Reference(Struct, frozen=True):
    """An image's name in its parts; two that mean the same are equal."""

    name: str = ""
    """With its registry, if it names one; empty for an id."""
    tag: str = ""
    """`latest` if none was written; empty beside a digest, which is what counts then."""
    digest: str = ""
    id: str = ""

    @property
    def repository(self) -> str:
        """The name without a registry: what remains of it wherever it comes from."""
        first, _, rest = self.name.partition("/")
        path = rest if rest and _names_host(first) else self.name
        return path.removeprefix("library/")


def parse_reference(text: str) -> Reference:
    """Take a name apart, or raise ValueError with a sentence."""
    if not text:
        raise ValueError("is empty")
    if len(text) > MAX_REFERENCE:
        raise ValueError(f"is {len(text)} characters long; at most {MAX_REFERENCE} are allowed")
    if text.startswith("-"):
        raise ValueError("begins with a dash")
    if any(char.isspace() for char in text):
        raise ValueError("has a space in it")
    if _ID.fullmatch(text):
        return Reference(id=text)
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ValueError("is not a name of an image: [registry/]name[:tag][@sha256:…]")
    # Engines take these for the beginning of an image's id, whatever it is the id of.
    if found["name"] in ("sha256", "sha512") or _BARE_ID.fullmatch(text):
        raise ValueError("is a part of an id: write sha256: and all of its 64 digits")
    digest = found["digest"] or ""
    tag = "" if digest else found["tag"] or "latest"
    return Reference(name=found["name"], tag=tag, digest=digest)


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a rule that can match nothing: for reading a configuration."""
    if pattern != ANY:
        parse_reference(pattern.removesuffix(ANY_TAG))


def _names_host(first: str) -> bool:
    return "." in first or ":" in first or first == "localhost" or first != first.lower()
