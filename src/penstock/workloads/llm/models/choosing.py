"""Which of the files of a repository is meant. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct

from penstock.core.errors import InvalidRequest, NotFound
from penstock.workloads.llm.models.gguf import SUFFIX, is_projector

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_PRECISIONS = ("f16", "bf16", "q8_0", "f32")
"""Of a projector, the first that there is."""
_SHOWN = 24


class Remote(Struct, frozen=True, kw_only=True):
    """A file that can be fetched."""

    path: str
    size: int
    sha256: str = ""
    git: str = ""
    """Its SHA-1 as git counts it: what small files have instead of a SHA-256."""


def choose(repository: str, wanted: str, files: Sequence[Remote]) -> Remote:
    """The one file, or the one that was asked for by its name or by its quantisation."""
    models = [one for one in files if one.path.endswith(SUFFIX) and not is_projector(one.path)]
    if not models:
        raise NotFound(
            f"{repository} has no GGUF file",
            hint="there is often another repository of the same name with -GGUF at its end",
        )
    meant = [one for one in models if _is_meant(one, wanted)]
    whole = [one for one in meant if not _PART.search(one.path)]
    if len(whole) == 1:
        return whole[0]
    if whole:
        problem = f"{repository} has {len(whole)} that may be meant"
        raise InvalidRequest("model", problem, hint=f"say which, as {repository}:{_shown(whole)}")
    if meant:
        problem = "is in several parts, which have to be fetched and joined by hand"
        raise InvalidRequest("model", f"{repository} {problem}", hint=_shown(meant))
    raise NotFound(f"{repository} has no {wanted}", hint=f"it has {_shown(models)}")


def projector_among(files: Sequence[Remote]) -> Remote | None:
    """What gives the repository's models eyes, if it has that."""
    found = sorted((one for one in files if is_projector(one.path)), key=lambda one: one.path)
    for precision in _PRECISIONS:
        for one in found:
            if _has_word(one.path, precision):
                return one
    return found[0] if found else None


def _is_meant(one: Remote, wanted: str) -> bool:
    if not wanted:
        return True
    if wanted.endswith(SUFFIX):
        return wanted in (one.path, one.path.rpartition("/")[2])
    return _has_word(one.path, wanted)


def _has_word(path: str, word: str) -> bool:
    pattern = rf"(?<![a-z0-9_]){re.escape(word.lower())}(?![a-z0-9_])"
    return re.search(pattern, path.rpartition("/")[2].lower()) is not None


def _shown(files: Sequence[Remote]) -> str:
    names = sorted(one.path for one in files)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
