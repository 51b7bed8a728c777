"""Which images a Dockerfile needs.

An engine fetches a base that is not here, whatever it is told; so the bases are looked up first.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.workloads.container.engine import BuildFailed

_DIRECTIVES = ("escape", "syntax", "check")


def bases(dockerfile: str) -> list[str]:
    """The images that it starts from or copies from. Raises BuildFailed for one that only the
    build itself could tell."""
    stages: set[str] = set()
    found: dict[str, None] = {}
    count = 0
    for words in _instructions(dockerfile):
        verb = words[0].upper()
        flags = dict(_flag(word) for word in words[1:] if word.startswith("--"))
        plain = [word for word in words[1:] if not word.startswith("--")]
        if verb == "FROM" and plain:
            _add(plain[0], stages, found)
            stages.add(str(count))
            count += 1
            if len(plain) == 3 and plain[1].upper() == "AS":
                stages.add(plain[2].lower())
        elif verb in ("COPY", "ADD", "ONBUILD") and (copied := flags.get("from")):
            _add(copied, stages, found)
        elif verb == "RUN" and "mount" in flags:
            raise BuildFailed("RUN --mount is not supported")
    return list(found)


def _add(name: str, stages: set[str], found: dict[str, None]) -> None:
    if "$" in name:
        raise BuildFailed(f"an image must be named plainly, not as {name!r}")
    if name.lower() not in stages and name != "scratch":
        found[name] = None


def _flag(word: str) -> tuple[str, str]:
    name, _, value = word.lstrip("-").partition("=")
    return name.lower(), value


def _instructions(dockerfile: str) -> Iterator[list[str]]:
    """Each instruction's words, its continued lines joined."""
    escape, pending = "\\", ""
    top = True
    for line in dockerfile.splitlines():
        text = line.strip()
        if text.startswith("#"):
            name, _, value = text[1:].partition("=")
            if top and name.strip().lower() == "escape":
                escape = value.strip()
            top = top and name.strip().lower() in _DIRECTIVES
            continue
        top = False
        if not text and pending:
            continue
        if text.endswith(escape):
            pending += text[: -len(escape)] + " "
            continue
        if words := (pending + text).split():
            yield words
        pending = ""
    if words := pending.split():
        yield words
