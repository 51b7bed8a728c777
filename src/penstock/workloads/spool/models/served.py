"""Which models a config means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.core.errors import Misconfigured
from penstock.core.llm import LlmFailure
from penstock.workloads.spool.config import ModelConfig
from penstock.workloads.spool.models.gguf import GgufFacts
from penstock.workloads.spool.models.shelf import ModelShelf


def served(config: ModelConfig) -> Sequence[GgufFacts]:
    """The models in their order, the default first; each once. Raises NotFound, InvalidRequest,
    and Misconfigured if the file of one is no good."""
    shelf = ModelShelf(config.models_dir or Path("models"))
    if not config.models:
        return shelf.list()
    try:
        found = [shelf.find(one) for one in config.models]
    except LlmFailure as failure:
        raise Misconfigured(failure.message) from failure
    return list({one.name: one for one in found}.values())
