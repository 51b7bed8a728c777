"""A model's config.json, and what a layer of it must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.workloads.pipes.weights.refusing import invalid, not_found, not_supported

_TIED = ("gemma", "gemma2", "gemma3_text")
"""Families whose embedding is the head unless they say otherwise."""
_COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_OUTER = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise not_found(path, "does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(path, f"is no JSON that can be read: {error}") from error
    if not isinstance(read, dict):
        raise invalid(path, "is no JSON object")
    return read


def read_config(path: Path) -> dict[str, Any]:
    return checked(flattened(read_json(path)), path)


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Of a model with several parts only what describes its language model."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = {name: config[name] for name in (*_OUTER, "quantization_config") if name in config}
    return {"architectures": config.get("architectures"), **outer, **inner}


def checked(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """With what every family has, and numbers that can be reckoned with."""
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise invalid(path, "does not say what architecture the model has (model_type)")
    for name in _COUNTS:
        count = config.get(name)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise invalid(path, f"has no usable {name}: {count!r}")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "some method")
        raise not_supported(
            path, f"describes weights quantised by {method}: take plain ones, or a GGUF"
        )
    return config


def tied(config: Mapping[str, Any], has_head: bool) -> bool:
    """Whether the embedding is the head too."""
    said = config.get("tie_word_embeddings")
    if isinstance(said, bool):
        return said
    return config["model_type"] in _TIED or not has_head


def check_number(config: Mapping[str, Any], n: int, path: Path) -> None:
    if not 0 <= n < config["num_hidden_layers"]:
        raise invalid(path, f"has layers 0 to {config['num_hidden_layers'] - 1}, and no {n}")


def check_layer(
    config: Mapping[str, Any], n: int, shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Refuses what lacks something, or has it in another size than the config says."""
    check_number(config, n, path)
    for name, shape in layer_shapes(config).items():
        _check(f"layer {n}", name, shapes.get(name), shape, path)
    if not shapes:
        raise invalid(path, f"has no tensors of layer {n}")


def check_ends(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    hidden = config["hidden_size"]
    for name in ("embed", "norm") if tied(config, "head" in shapes) else ("embed", "norm", "head"):
        there = shapes.get(name)
        rows = there[:-1] if there else ()
        expected = (hidden,) if name == "norm" else (*rows, hidden)
        _check("the end model", name, there, expected, path)


def _check(
    where: str, name: str, there: tuple[int, ...] | None, expected: tuple[int, ...], path: Path
) -> None:
    if there is None:
        raise invalid(path, f"is not whole: {where} lacks {name}")
    if there != expected:
        raise invalid(
            path,
            f"is not as its config says: {name} of {where} is {list(there)}, not {list(expected)}",
        )


def layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a layer must have; empty for a family that is not known here."""
    family = config["model_type"]
    if family not in _FAMILIES:
        return {}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if family == "phi3":
        shapes["self_attn.qkv_proj.weight"] = (queries + 2 * keys, hidden)
        shapes["mlp.gate_up_proj.weight"] = (2 * inner, hidden)
    else:
        shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (inner, hidden)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"self_attn.{name}_proj.weight"] = (rows, hidden)
            if family == "qwen2" or config.get("attention_bias"):
                shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if family in ("qwen3", "gemma3_text"):
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (size,)
    if family in ("gemma2", "gemma3_text"):
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    return shapes


_FAMILIES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3"),
        *("gemma", "gemma2", "gemma3_text"),
    }
)
