"""Which decoders can be split, and where each family differs from Llama.

A family is here if its layer is the common one (norm, grouped attention with rotary positions,
norm, gated feed-forward) with the variations that a `Shape` can say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct


class Family(Struct, frozen=True, kw_only=True):
    """Where a family differs from Llama."""

    defaults: Mapping[str, Any]
    """What its config may leave out."""
    gemma: bool = False
    """Norm weights are offsets from one, and embeddings are scaled."""
    head_norms: bool = False
    after_norms: bool = False
    sliding: Callable[[Mapping[str, Any], int], bool] = lambda config, layer: False
    """Whether a layer looks at a window only, where `layer_types` does not say so."""


def _always(config: Mapping[str, Any], layer: int) -> bool:
    return True


def _qwen(config: Mapping[str, Any], layer: int) -> bool:
    return bool(layer >= config["max_window_layers"])


def _every_other(config: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


def _gemma3(config: Mapping[str, Any], layer: int) -> bool:
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return (layer + 1) % int(pattern) != 0


def _smollm3(config: Mapping[str, Any], layer: int) -> bool:
    return not has_positions(config, layer)


def has_positions(config: Mapping[str, Any], layer: int) -> bool:
    """Some layers of some models see the order of tokens only through the others."""
    listed = config.get("no_rope_layers")
    if listed is not None:
        return bool(listed[layer])
    interval = config.get("no_rope_layer_interval")
    return interval is None or (layer + 1) % int(interval) != 0


_COMMON: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "hidden_act": "silu",
}
_QWEN: Mapping[str, Any] = {
    **_COMMON,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
}
_GEMMA: Mapping[str, Any] = {
    **_COMMON,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
}
_GEMMA2: Mapping[str, Any] = {
    **_GEMMA,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults={**_COMMON, "max_position_embeddings": 2048}),
    "mistral": Family(
        defaults={
            **_COMMON,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
        },
        sliding=_always,
    ),
    "qwen2": Family(defaults=_QWEN, sliding=_qwen),
    "qwen3": Family(defaults={**_QWEN, "head_dim": 128}, sliding=_qwen, head_norms=True),
    "gemma": Family(
        defaults={**_GEMMA, "max_position_embeddings": 8192, "num_key_value_heads": 16}, gemma=True
    ),
    "gemma2": Family(
        defaults={**_GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        gemma=True,
        after_norms=True,
        sliding=_every_other,
    ),
    "gemma3_text": Family(
        defaults={
            **_GEMMA2,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        gemma=True,
        head_norms=True,
        after_norms=True,
        sliding=_gemma3,
    ),
    "phi3": Family(
        defaults={**_COMMON, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        sliding=_always,
    ),
    "smollm3": Family(
        defaults={
            **_COMMON,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
        },
        sliding=_smollm3,
    ),
}
