"""A model that can't be split is refused by the name of its architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.source import open_source


def test_one_whose_config_counts_layers_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LlmFailure, match="GPT2LMHeadModel") as refused:
        open_source(tmp_path)
    assert refused.value.code is LlmCode.NOT_SUPPORTED
