"""A text model that may stand in for the rules, named in the config as "module:attribute"."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from penstock.core.errors import Misconfigured


@runtime_checkable
class TextModel(Protocol):
    """What it says is never taken on trust: the auditor reads its texts, and its labels must be
    among those that were offered. It is called from several threads at once."""

    def rewrite(self, text: str) -> str:
        """The same text in a neutral tone."""
        ...

    def classify(self, title: str, labels: Sequence[str]) -> str:
        """One of `labels`."""
        ...


@functools.lru_cache(maxsize=4)
def load_model(name: str) -> TextModel:
    """A model by "module:attribute"; a class, or a function without arguments, is called once.
    Raises Misconfigured."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise Misconfigured(f"model {name!r} names no model", hint='write "module:attribute"')
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Misconfigured(f"model {name!r} can't be loaded: {error}") from error
    if isinstance(found, type) or not isinstance(found, TextModel):
        found = found() if callable(found) else found
    if not isinstance(found, TextModel):
        raise Misconfigured(
            f"model {name!r} is no text model", hint="it needs rewrite(text) and classify(...)"
        )
    return found
