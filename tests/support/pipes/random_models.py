"""Tiny models with random weights, one for each family: of transformers, and as a Source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 96
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "smollm3",
)
_SIZE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that it never ends by itself
}
_VARIED: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 5, "query_pre_attn_scalar": 12, "sliding_window_pattern": 3},
    "phi3": {"sliding_window": 9},
    "smollm3": {"no_rope_layer_interval": 2},
}


class RandomSource:
    """A Source over the weights of a model in memory."""

    def __init__(self, model: Any) -> None:
        self.path = Path("a random model")
        self.config: Mapping[str, Any] = model.config.to_dict()
        self.generation: Mapping[str, Any] = {}
        self.layers_read: list[int] = []
        self._tensors: Mapping[str, torch.Tensor] = model.state_dict()

    def layer(self, n: int) -> Mapping[str, torch.Tensor]:
        self.layers_read.append(n)
        prefix = f"model.layers.{n}."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }

    def ends(self) -> Mapping[str, torch.Tensor]:
        tied = self.config["tie_word_embeddings"]
        return {
            name: tensor
            for name, tensor in self._tensors.items()
            if not name.startswith("model.layers.") and not (tied and name == "lm_head.weight")
        }

    @property
    def size(self) -> int:
        parts = [self.ends(), *(self.layer(n) for n in range(self.config["num_hidden_layers"]))]
        return sum(one.nbytes for part in parts for one in part.values())

    def tokenizer(self) -> Any:
        raise NotImplementedError("a random model has no words")


def tiny(family: str, **changes: Any) -> tuple[Any, RandomSource]:
    """A model of transformers, and the same weights as a Source. The same each time."""
    torch.set_num_threads(1)
    settings = {**_SIZE, **_VARIED[family], **changes}
    if family in ("phi3", "qwen2", "smollm3"):
        settings.pop("head_dim")
    config = transformers.AutoConfig.for_model(family, **settings)
    config._attn_implementation = "eager"  # the one that knows every family's ways
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        # As they come, weights are so small that every token looks alike.
        for name, tensor in model.named_parameters():
            tensor.normal_(0, 0.2 if tensor.dim() == 1 else 0.25)
            if family.startswith("gemma") and "embed" in name:
                tensor.mul_(0.1)  # it is scaled, and is the head: every token would repeat itself
            if name.endswith("norm.weight") and not family.startswith("gemma"):
                tensor.add_(1)
    torch.random.set_rng_state(state)
    return model, RandomSource(model)


def generated(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens that transformers generates, greedily, whatever they are."""
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
        )
    return [int(token) for token in answer[0, len(prompt) :]]
