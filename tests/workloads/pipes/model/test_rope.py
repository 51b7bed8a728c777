"""Positions as rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.workloads.pipes.model.rope import RotaryTable, frequencies, interleave
from penstock.workloads.pipes.model.shape import Shape

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0 + n / 10 for n in range(16)],
        "long_factor": [2.0 + n for n in range(16)],
        "original_max_position_embeddings": 64,
    },
}
YARNS: tuple[dict[str, Any], ...] = (
    {},
    {"attention_factor": 1.5},
    {"mscale": 0.7, "mscale_all_dim": 0.9},
    {"beta_fast": 20.0, "beta_slow": 2.0},
    {"truncate": False},
    {"original_max_position_embeddings": 4096},
)


def both(kind: str, **more: Any) -> tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]]:
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=256,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4, **KINDS[kind], **more},
    )
    rope = Shape.of(config.to_dict()).ropes[0]
    assert rope is not None
    return frequencies(rope), ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind: str) -> None:
    (ours, length), (theirs, scaling) = both(kind)
    torch.testing.assert_close(ours, theirs)
    assert length == pytest.approx(scaling)


@pytest.mark.parametrize("more", YARNS)
def test_yarn_is_that_of_transformers_with_all_that_it_can_be_told(more: dict[str, Any]) -> None:
    (ours, length), (theirs, scaling) = both("yarn", **more)
    torch.testing.assert_close(ours, theirs)
    assert length == pytest.approx(scaling)


def test_reordered_heads_keep_what_queries_and_keys_make_of_each_other() -> None:
    queries, keys = torch.randn(3, 16), torch.randn(5, 16)
    one, other = (interleave(rows.t().contiguous(), 8, 6).t() for rows in (queries, keys))
    torch.testing.assert_close(one @ other.t(), queries @ keys.t())
    order = interleave(torch.arange(8), 8, 6)
    assert order.tolist() == [0, 3, 1, 4, 2, 5, 6, 7]


def test_a_table_grows_with_the_positions_that_are_asked_for() -> None:
    rope = Shape.of(
        LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1).to_dict()
    ).ropes[0]
    assert rope is not None
    turns = RotaryTable(rope)
    few = turns.upto(3)[:3].clone()
    many = turns.upto(1000)
    assert len(many) >= 1000
    assert torch.equal(many[:3], few)
