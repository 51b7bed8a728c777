"""Which models a config means."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import Misconfigured
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.models.gguf import GgufFacts
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.values import LlmFailure


def served(config: ModelConfig) -> Sequence[GgufFacts]:
    """The models in their order, the default first; each once. Raises NotFound, InvalidRequest,
    and Misconfigured if the file of one is no good, or two files have the same name."""
    shelf = ModelShelf(config.models_dir or Path("models"))
    if not config.models:
        return shelf.list()
    try:
        found = [shelf.find(one) for one in config.models]
    except LlmFailure as failure:
        raise Misconfigured(failure.message) from failure
    models: dict[str, GgufFacts] = {}
    for one in found:
        if not os.path.samefile(models.setdefault(one.name, one).path, one.path):
            raise Misconfigured(
                f"two files are the model {one.name!r}: {models[one.name].path} and {one.path}",
                hint="jobs name a model by its file's name: rename one of the files",
            )
    return list(models.values())
