"""How language models are loaded, and what an engine's settings say of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from penstock.config import Settings

ALL = "auto"
"""Serve every model in the folder."""
Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]


class ModelConfig(Struct, frozen=True, kw_only=True):
    """How models are loaded."""

    models_dir: Path | None = None
    """Where `penstock model` keeps them."""
    models: tuple[str, ...] = ()
    """Names in that folder, or files; the first is the default. None means all in the folder."""
    slots: Annotated[int, Meta(ge=1, le=256)] = 8
    """Jobs that one model computes at once."""
    context: Annotated[int, Meta(ge=0, le=16_777_216)] = 0
    """Tokens that one job may have, prompt and answer; 0 means 8192, less if the model was made
    for less or memory is short."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads that compute; 0 means one for each core."""
    memory: Annotated[int, Meta(ge=0)] = 0
    """Bytes that all loaded models may take together; 0 means three quarters of the machine's."""
    gpu_layers: Annotated[int, Meta(ge=-1, le=100_000)] = -1
    """Layers that are computed on GPUs: 0 means none, -1 as many as the build of llama.cpp and
    the memory of the GPUs allow."""
    tensor_split: Annotated[tuple[Annotated[float, Meta(ge=0)], ...], Meta(max_length=16)] = ()
    """How the layers are divided between several GPUs, as proportions; none means by memory."""
    projector_gpu: bool = True
    """Whether the projector (mmproj) of a model with vision is on a GPU, if there is one."""
    idle: Seconds = 0.0
    """Seconds after which a model that nobody uses is unloaded; 0 means never."""
    spin: bool = False
    """Whether waiting threads spin: a little faster on a machine that does nothing else, much
    slower on any other."""
    load_timeout: Seconds = 600.0
    stall: Seconds = 300.0
    """Seconds without a sign of life after which an answer is given up, and the engine with it."""


def model_config(settings: Settings) -> ModelConfig | None:
    """How models are loaded under an engine; None if it serves none."""
    if not settings.models.serve:
        return None
    return replace(
        msgspec.convert(settings.models, ModelConfig, from_attributes=True),
        models_dir=settings.model_folder,
        models=tuple(model for model in settings.models.serve if model != ALL),
    )
