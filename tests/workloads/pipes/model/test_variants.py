"""What a family's models may have or not have, each compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.pipes.random_models import generated, tiny
from tests.support.pipes.walking import Split

PROMPT = [5, 17, 40, 3, 88, 21, 9, 60, 33, 71, 12, 50, 4, 29]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5],
    "long_factor": [3.0, 4.0],
    "partial_rotary_factor": 0.5,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"head_dim": 16, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 2}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma3_text", {"attention_bias": True}),
    (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 5}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_a_variant_computes_what_transformers_computes(
    family: str, changes: dict[str, Any]
) -> None:
    model, source = tiny(family, **changes)
    split = Split(source, (2,))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(
        split.step((split.job(), PROMPT, 0))[0], expected, rtol=1e-4, atol=1e-4
    )
    assert split.greedy(PROMPT, 6, chunk=5) == generated(model, PROMPT, 6)
