"""The long tail of test_architectures.py: more decoders of transformers, split and packed."""

from __future__ import annotations

import pytest
from tests.support.pipes.architectures import farthest

PACKED = (
    *("afmoe", "apertus", "arcee", "axk1", "bitnet", "cohere", "cohere2_moe", "cwm"),
    *("deepseek_v2", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
    *("flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode"),
    *("gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "jais2", "jetmoe", "llama4_text", "mimo_v2_flash", "minicpm3"),
    *("minimax_m2", "ministral", "ministral3", "mistral", "nanochat", "nemotron", "olmo"),
    *("olmo2", "olmo3", "olmoe", "persimmon", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3"),
    *("seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu", "biogpt"),
    *("flint", "granite_swa", "granitemoe_swa", "hyperclovax", "laguna"),
)
ALONE = (
    *("codegen", "doge", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt", "xglm"),
    *(
        "olmo_hybrid",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "lfm2_moe",
        "axk2",
        "deepseek_v32",
    ),
)


@pytest.mark.parametrize("name", PACKED)
def test_it_is_computed_as_by_transformers_in_1_to_3_segments_and_jobs_together(name: str) -> None:
    packed, away = farthest(name)
    assert packed
    assert away < 2e-3


@pytest.mark.parametrize("name", ALONE)
def test_where_jobs_cant_be_packed_each_is_computed_alone(name: str) -> None:
    packed, away = farthest(name)
    assert not packed
    assert away < 2e-3
