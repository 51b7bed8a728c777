"""The models of this benchmark: a real one, one of plumbing alone, and layers of a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
SIZES: dict[str, dict[str, int]] = {
    # Compute nearly nil: what is left is what lies between the nodes.
    "plumbing": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    # The layers of a model of 1.1 billion weights, but only some of its 22.
    "billion": {"num_hidden_layers": 8, **_BILLION},
    "whole_billion": {"num_hidden_layers": 22, **_BILLION},
}
LAYERS = {"real": 30, **{name: size["num_hidden_layers"] for name, size in SIZES.items()}}


def make(name: str, gguf: Path, folder: Path) -> None:
    """A folder with safetensors in float32, as each side reads it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from penstock.workloads.pipes.weights.source import open_source

    source = open_source(gguf)
    tokenizer = source.tokenizer()
    torch.manual_seed(1)
    if name == "real":
        model = LlamaForCausalLM(LlamaConfig(**source.config)).float()
        model.load_state_dict(_tensors(source), strict=False)
    else:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            **SIZES[name],
        )
        model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tensors(source: Any) -> dict[str, Any]:
    """By the names of transformers; the head is the embedding."""
    found = dict(source.ends())
    for layer in range(source.config["num_hidden_layers"]):
        for name, tensor in source.layer(layer).items():
            found[f"model.layers.{layer}.{name}"] = tensor
    return found


def prompt(length: int, number: int = 0) -> list[int]:
    """Tokens of no meaning, the same for each side; none is special."""
    return [100 + (number * 7919 + position * 31) % 40_000 for position in range(length)]
