"""Decoders of many architectures compute what transformers computes, or are refused."""

from __future__ import annotations

import pytest
from tests.support.pipes.architectures import Checkpoint, farthest, tiny_model
from tests.support.pipes.walking import Split

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.model.architecture import Architecture

PACKED = (
    *("llama", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "mixtral", "deepseek_v3", "phi3"),
    *("opt", "qwen3_moe", "stablelm", "cohere2"),
)
ALONE = ("bloom", "qwen3_next", "lfm2")
REFUSED = {
    "mamba": "its forward takes no past_key_values",
    "openai-gpt": "its forward takes no past_key_values",
    "minimax": "uses cache of its own",
    "recurrent_gemma": "its layers keep a state; one job at a time, its results differ",
    "bert": "its forward takes no inputs_embeds",
}


@pytest.mark.seed("000", "3.7", "18.9")
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_wrongly_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(LlmFailure, match=REFUSED[name]) as caught:
        Split(Checkpoint(tiny_model(name)))
    assert caught.value.code is LlmCode.NOT_SUPPORTED
    assert f"models of architecture {name} can't be split" in caught.value.message


def test_what_transformers_does_not_know_is_refused_by_its_name() -> None:
    with pytest.raises(LlmFailure, match=r"NewForCausalLM \(newest\) can't be split") as caught:
        Architecture({"model_type": "newest", "architectures": ["NewForCausalLM"]})
    assert caught.value.facts["architecture"] == "newest"
