"""What is made of a model's config."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tests.support.pipes.random_models import FAMILIES

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.model.shape import Shape

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "vocab_size": 200_000,
}


def of(family: str, **more: Any) -> Shape:
    return Shape.of({"model_type": family, **SIZES, **more})


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(family: str) -> None:
    filled = transformers.AutoConfig.for_model(family, **SIZES).to_dict()
    assert of(family) == Shape.of(filled)


def test_a_window_that_is_null_is_none() -> None:
    assert of("mistral").windows == (4096,) * 12
    assert of("mistral", sliding_window=None).windows == (None,) * 12


def test_layers_look_as_far_as_their_family_or_their_list_says() -> None:
    assert of("gemma2", sliding_window=8).windows == (8, None) * 6
    assert of("gemma3_text", sliding_window=8).windows == ((8,) * 5 + (None,)) * 2
    kinds = ["full_attention"] * 11 + ["sliding_attention"]
    assert of("gemma2", sliding_window=8, layer_types=kinds).windows == (None,) * 11 + (8,)
    assert of("qwen2", sliding_window=8, max_window_layers=3).windows == (None,) * 12
    slides = of("qwen2", sliding_window=8, max_window_layers=3, use_sliding_window=True)
    assert slides.windows == (None,) * 3 + (8,) * 9


def test_every_way_to_write_positions_is_read_alike() -> None:
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    old = of("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    middle = of("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = of("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    for shape in (old, middle, new):
        rope = shape.ropes[0]
        assert rope is not None
        assert (rope.kind, rope.theta, dict(rope.scaling)["factor"]) == ("llama3", 5e5, 4.0)


def test_an_older_gemma3_scales_only_the_layers_that_look_far() -> None:
    shape = of(
        "gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    near, far = shape.ropes[0], shape.ropes[5]
    assert near is not None
    assert far is not None
    assert (near.theta, near.kind) == (1e4, "default")
    assert (far.theta, far.kind) == (1e6, "linear")


def test_a_model_for_long_texts_by_other_factors_is_used_for_short_ones() -> None:
    shape = of(
        "phi3",
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    )
    assert shape.max_positions == 4096


@pytest.mark.parametrize("name", ["mixtral", "gpt2", "mamba", ""])
def test_an_architecture_that_is_not_known_is_refused_by_name(name: str) -> None:
    with pytest.raises(LlmFailure) as caught:
        Shape.of({"model_type": name, "architectures": ["ThatForCausalLM"], **SIZES})
    assert caught.value.code == LlmCode.NOT_SUPPORTED
    assert "ThatForCausalLM" in caught.value.message
    assert (name or "unnamed") in caught.value.message


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"rope_scaling": {"rope_type": "axial", "rope_theta": 1.0}}, "axial"),
    ],
)
def test_what_a_known_family_does_not_know_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(LlmFailure, match=word) as caught:
        of("llama", **change)
    assert caught.value.code == LlmCode.NOT_SUPPORTED


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"hidden_size": "wide"},
        {"head_dim": 7},
        {"num_hidden_layers": 0},
        {"layer_types": ["full_attention"]},
        {"partial_rotary_factor": 0.01},
    ],
)
def test_a_config_that_makes_no_sense_is_invalid(change: dict[str, Any]) -> None:
    with pytest.raises(LlmFailure) as caught:
        of("llama", **change)
    assert caught.value.code == LlmCode.MODEL_INVALID
