"""Language models made from the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.config import Settings
from penstock.workloads.spool.config import ModelConfig

if TYPE_CHECKING:
    from penstock.ports.runner import Runner

ALL = "auto"


def model_config(settings: Settings) -> ModelConfig | None:
    """How models are loaded under an engine; None if it serves none."""
    if not settings.models:
        return None
    return ModelConfig(
        models_dir=settings.model_folder,
        models=tuple(model for model in settings.models if model != ALL),
        slots=settings.model_slots,
        context=settings.model_context,
        threads=settings.model_threads,
        memory=settings.model_memory,
    )


def make_runner(config: ModelConfig) -> Runner:
    """What computes, here: llama.cpp."""
    from penstock.workloads.spool.llama.runner import LlamaRunner

    return LlamaRunner(config)
