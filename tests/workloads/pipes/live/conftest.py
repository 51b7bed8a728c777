"""What holds for all tests of pipes with real parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.models import smollm2
from tests.support.pipes.networks import SmallModel

# On some machines what oneDNN finds of bfloat16 is not there to use: set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """A model of six layers with random weights, and words."""
    return SmallModel.made(tmp_path_factory.mktemp("small") / "tiny")


@pytest.fixture(scope="session")
def model_file() -> Path:
    """SmolLM2-135M-Instruct; pipes compute with torch, and need no llama.cpp."""
    return smollm2()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
