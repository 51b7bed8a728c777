"""A network on one machine: who holds what, and what the children are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from penstock.app.nodes import children_of, cut, shared
from penstock.config import Settings, load
from penstock.workloads.pipes.config import parse_layers
from penstock.workloads.pipes.weights.source import Source

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


class Described:
    """A model that nobody reads."""

    path, config = Path("described"), CONFIG


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "model").mkdir()
    flags: dict[str, Any] = {
        "data_dir": str(tmp_path / "data"),
        "node__model": "Smol",
        "node__source": str(tmp_path / "model"),
        "node__node_id": "n",
        "node__end_model": True,
        "node__listen": "127.0.0.1:7499",
        "node__join": ("10.0.0.1:7",),
        "node__keep_cache": 7.5,
        "node__dtype": "int8",
    }
    return load(environ={}, flags=flags)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_every_layer_is_held(settings: Settings, count: int) -> None:
    ranges = cut(cast(Source, Described()), settings, count)
    assert set(ranges) <= {"n", *(f"n-{number}" for number in range(2, count + 1))}
    held = {0}  # beside the end model
    for text in ranges.values():
        held |= {n for one in parse_layers(text) or () for n in range(one.start, one.end)}
    assert held == set(range(30))


def test_who_has_the_text_has_fewer_layers(settings: Settings) -> None:
    ranges = cut(cast(Source, Described()), settings, 3)
    assert ranges == {"n": "1-5", "n-2": "6-17", "n-3": "18-29"}


def test_nodes_share_the_machine_unless_it_is_said_what_each_has(settings: Settings) -> None:
    alone, three = shared(settings, 1), shared(settings, 3)
    assert 0 < three.node.memory <= alone.node.memory // 3 + 1
    assert 1 <= three.node.threads <= alone.node.threads
    assert shared(three, 7) == three


def test_children_are_told_what_concerns_them_and_the_key_by_their_environment(
    settings: Settings,
) -> None:
    children = children_of(settings, {"n-2": "6-17"})
    command, environ = children._commands["n-2"], children._environment
    assert command == ("--node-id", "n-2", "--layers", "6-17")
    told = load(environ={k: v for k, v in environ.items() if "_NODE__" in k}).node
    key = settings.pipe_key_file.read_text().strip()
    assert (told.key, told.model, told.keep_cache) == (key, "Smol", 7.5)
    assert (told.source, told.dtype) == (settings.node.source, settings.node.dtype)
    assert (told.join, told.listen) == ((), "127.0.0.1:0")
    assert not told.end_model
