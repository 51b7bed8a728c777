"""What holds for all tests that hurt processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

# On some machines what oneDNN finds of bfloat16 is not there to use: set before torch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

if TYPE_CHECKING:
    from tests.support.pipes.networks import SmallModel


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """A model of six layers with random weights, and words."""
    from tests.support.pipes.networks import SmallModel

    return SmallModel.made(tmp_path_factory.mktemp("small") / "tiny")
