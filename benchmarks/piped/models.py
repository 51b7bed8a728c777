"""The models of this benchmark: a real small one, one of plumbing alone, and a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    # Compute nearly nil: what is left is what lies between the nodes.
    "plumbing": {
        "num_hidden_layers": 8,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "larger": {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 2752,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
LAYERS = {"real": 30, "plumbing": 8, "larger": 24}


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
    found = {}
    for layer in range(source.config["num_hidden_layers"]):
        for name, tensor in source.layer(layer).items():
            found[f"model.layers.{layer}.{name}"] = tensor
    ends = source.ends()
    return found | {"model.embed_tokens.weight": ends["embed"], "model.norm.weight": ends["norm"]}


def prompt(length: int, number: int = 0) -> list[int]:
    """Tokens of no meaning, the same for each side; none is special."""
    return [100 + (number * 7919 + position * 31) % 40_000 for position in range(length)]
