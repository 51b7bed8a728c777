"""What a run of the news pipeline may reach: folders and text models that the operator allows.

The config of a run comes from whoever may submit a job. It can name a folder or a model, but only
one that the operator of the process that runs the pipeline has allowed: in code by `allow`, in
the environment by PENSTOCK_NEWS_FOLDERS and PENSTOCK_NEWS_MODELS, or, where the run goes on in
the process of a command, by that command (`allow_named_in`).
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from penstock.core.errors import InvalidRequest, Misconfigured

FOLDERS = "PENSTOCK_NEWS_FOLDERS"
"""Folders, with the system's separator of paths between them."""
MODELS = "PENSTOCK_NEWS_MODELS"
"""Models, as `name=module:attribute,...`."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


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


Maker = str | TextModel | Callable[[], TextModel]
"""A model, what makes one, or `module:attribute` of either."""

_folders: list[Path] = []
_models: dict[str, Maker] = {}
_made: dict[str, tuple[Maker, TextModel]] = {}
_lock = threading.Lock()


def allow(*, folders: Iterable[str | Path] = (), models: Mapping[str, Maker] | None = None) -> None:
    """Let runs in this process read and write below these folders, and use these models."""
    _folders.extend(Path(folder).resolve() for folder in folders)
    _models.update(models or {})


def allow_named_in(config: Mapping[str, Any]) -> None:
    """Allow what this config names: the operator gave it on the command line."""
    sources = config.get("sources")
    paths = [local_path(one) for one in sources or () if isinstance(one, str)]
    if isinstance(out := config.get("out"), str) and out:
        paths.append(Path(out))
    named = (config.get("model"), config.get("teacher_model"))
    models: dict[str, Maker] = {name: name for name in named if isinstance(name, str)}
    allow(folders=[path for path in paths if path is not None], models=models)


def local_path(source: str) -> Path | None:
    """The file that a source names; None for what is no file of this machine."""
    scheme = _SCHEME.match(source)
    if scheme is None:
        return Path(source)
    return Path(unquote(urlsplit(source).path)) if scheme[1].lower() == "file" else None


# -- checks --------------------------------------------------------------------------------


def check_path(field: str, path: str | Path) -> Path:
    """The path, links resolved. Raises InvalidRequest if it is in no allowed folder."""
    named = os.environ.get(FOLDERS, "").split(os.pathsep)
    allowed = [*_folders, *(Path(folder).resolve() for folder in named if folder)]
    try:
        meant = Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidRequest(field, f"{str(path)!r} is no path: {error}") from error
    if not any(meant.is_relative_to(folder) for folder in allowed):
        raise InvalidRequest(
            field,
            f"{str(path)!r} is in no folder that is allowed here",
            hint=f"the operator of the worker allows folders with {FOLDERS}",
        )
    return meant


def check_model(field: str, name: str) -> None:
    """Raise InvalidRequest for a model that is not registered."""
    known = _known_models()
    if name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(
            field,
            f"no model {name!r} is registered here (there are: {there})",
            hint=f"the operator of the worker registers models with {MODELS}",
        )


def _known_models() -> dict[str, Maker]:
    named = os.environ.get(MODELS, "")
    pairs = (pair.strip().partition("=") for pair in named.split(",") if pair.strip())
    return {**{name: target for name, _, target in pairs}, **_models}


# -- models --------------------------------------------------------------------------------


def load_model(name: str) -> TextModel:
    """A registered model; made once. Raises InvalidRequest, or Misconfigured if it is none."""
    check_model("config.model", name)
    given = _known_models()[name]
    with _lock:
        known = _made.get(name)
        if known is None or known[0] != given:
            known = _made[name] = given, _make(name, given)
        return known[1]


def _make(name: str, given: Maker) -> TextModel:
    found: Any = _imported(name, given) if isinstance(given, str) else given
    if isinstance(found, type) or not isinstance(found, TextModel):
        found = found() if callable(found) else found
    if not isinstance(found, TextModel):
        raise Misconfigured(
            f"model {name!r} is no text model", hint="it needs rewrite(text) and classify(...)"
        )
    return found


def _imported(name: str, target: str) -> Any:
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise Misconfigured(
            f"model {name!r}: {target!r} names no model", hint='write "module:attribute"'
        )
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Misconfigured(f"model {name!r} can't be loaded: {error}") from error
    return found
