"""What a Dockerfile builds on, and what one that came with a job may say.

Every image that it names has to be found, or the list of bases would be no protection. Builders
differ in what they read beyond the plain language, so whatever could make one of them see another
file than is seen here is refused: directives, heredocs, a variable or a quote in a name, flags of
RUN, a broken continuation. ADD is refused because it fetches from the network on behalf of the
engine itself; COPY and archives in the context do the rest of what it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.workloads.container.protocol.image_rules import parse_reference

MAX_BYTES = 128 << 10
MAX_STAGES = 32
SCRATCH = "scratch"

_PLAIN = frozenset(
    {
        *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
        *("MAINTAINER", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    }
)
_REFUSED = {
    "ADD": "use COPY, and `archive` for what is to be unpacked",
    "ONBUILD": "nothing is built on what a job builds",
}
_ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|[^\S \t\n]")
"""Control characters, and spaces that not every builder takes for one."""
_SPACES = re.compile(r"[ \t]+")
_DIRECTIVE = re.compile(r"#\s*[A-Za-z]+\s*=")
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?[^<\s]")
_FLAG = re.compile(r"--(?P<name>[a-z]+)(?:=(?P<value>[A-Za-z0-9._/:@,+-]*))?", re.ASCII)
_STAGE = re.compile(r"[a-z][a-z0-9_.-]*", re.ASCII | re.IGNORECASE)
_FLAGS = {"FROM": {"platform"}, "COPY": {"from", "chown", "chmod", "link"}}


def bases_of(text: str) -> tuple[str, ...]:
    """The images that it names, in order and once each; ValueError with a sentence if it can't
    be used."""
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    text = text.replace("\r\n", "\n")
    if _ODD.search(text):
        raise ValueError("has a control character, or a space that is not a plain one")
    reader = _Reader()
    for number, _, line in _instructions(text):
        try:
            reader.read(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not reader.stages:
        raise ValueError("has no FROM line")
    return tuple(dict.fromkeys(reader.bases))


def labelled(text: str, label: str) -> str:
    """The same, one that `bases_of` takes, with a label that each stage has from its beginning."""
    lines = text.replace("\r\n", "\n").split("\n")
    instructions = list(_instructions("\n".join(lines)))
    for _, end, line in reversed(instructions):
        if _SPACES.split(line)[0].upper() == "FROM":
            lines.insert(end, f"LABEL {label}=1")
    return "\n".join(lines)


def _instructions(text: str) -> Iterator[tuple[int, int, str]]:
    """Of each instruction the numbers of its first and its last line, and its lines joined."""
    begun, seen = 0, False
    parts: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        bare = line.strip(" \t")
        if bare.startswith("#"):
            if not seen and _DIRECTIVE.match(bare):
                raise ValueError(f"line {number}: directives such as syntax= are not supported")
            continue
        if not bare:
            if parts:
                raise ValueError(f"line {number}: an empty line after a backslash")
            continue
        seen = True
        if bare.endswith("\\\\"):
            raise ValueError(f"line {number}: ends in two backslashes")
        begun = begun if parts else number
        parts.append(line.rstrip(" \t").removesuffix("\\"))
        if not bare.endswith("\\"):
            yield begun, number, _joined(begun, parts)
            parts = []
    if parts:
        raise ValueError("ends in a backslash")


def _joined(number: int, parts: list[str]) -> str:
    """Some builders keep the spaces that a continued line begins with, some don't: where images
    are named it must make no difference."""
    kept = "".join(parts).strip(" \t")
    dropped = "".join(part.lstrip(" \t") for part in parts)
    differ = _SPACES.split(kept) != _SPACES.split(dropped)
    if differ and (_names_images(kept) or _names_images(dropped)):
        raise ValueError(f"line {number}: there must be a space before the backslash")
    return kept


def _names_images(line: str) -> bool:
    return line.upper().startswith(("FROM", "COPY"))


class _Reader:
    """Instructions one by one, and the stages and images that they named so far."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        """Names in small letters; empty for a stage without one."""
        self.bases: list[str] = []

    def read(self, line: str) -> None:
        word, *words = _SPACES.split(line)
        name = word.upper()
        if name in _REFUSED:
            raise ValueError(f"{name} is not supported here: {_REFUSED[name]}")
        if name not in _PLAIN:
            raise ValueError(f"{word[:40]!r} is not an instruction")
        if not self.stages and name not in ("FROM", "ARG"):
            raise ValueError(f"{name} before the first FROM")
        if _HEREDOC.search(line):
            raise ValueError("heredocs are not supported here")
        if name in ("FROM", "COPY", "RUN"):
            flags, words = _split_flags(name, words)
            if name == "FROM":
                self._begin_stage(words)
            elif "from" in flags:
                self._copy_from(flags["from"])

    def _begin_stage(self, words: list[str]) -> None:
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
            raise ValueError("FROM must be followed by an image, and AS and a name if you like")
        if words[0].lower() not in self.stages:
            self.bases.append(_image(words[0]))
        stage = words[2] if len(words) == 3 else ""
        if stage and not _STAGE.fullmatch(stage):
            raise ValueError(f"{stage[:40]!r} is not the name of a stage")
        if len(self.stages) == MAX_STAGES:
            raise ValueError(f"more than {MAX_STAGES} stages")
        self.stages.append(stage.lower())

    def _copy_from(self, source: str) -> None:
        """A stage by its name or number, else an image."""
        is_stage = source and source.lower() in self.stages
        is_number = source.isdecimal() and int(source) < len(self.stages)
        if not is_stage and not is_number:
            self.bases.append(_image(source))


def _split_flags(name: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    for count, word in enumerate(words):
        # A quote or a backslash may hide the dashes of a flag from everyone but the builder.
        if not word.startswith(("-", '"-', "'-", "\\")):
            return flags, words[count:]
        found = _FLAG.fullmatch(word)
        if found is None or found["name"] not in _FLAGS.get(name, ()):
            raise ValueError(f"{word[:40]!r} is not supported with {name} here")
        flags[found["name"]] = found["value"] or ""
    return flags, []


def _image(word: str) -> str:
    try:
        parse_reference(word)
    except ValueError as error:
        raise ValueError(f"{word[:80]!r} {error}") from None
    return word
