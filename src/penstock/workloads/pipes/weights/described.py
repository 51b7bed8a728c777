"""A model's config.json, and what a layer of it must have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.workloads.llm.values import LlmFailure
from penstock.workloads.pipes.model.families import FAMILIES
from penstock.workloads.pipes.model.shape import Shape
from penstock.workloads.pipes.weights.refusing import invalid, not_found, not_supported

_TIED = ("gemma", "gemma2", "gemma3_text", "smollm3")
"""Families whose embedding is the head unless they say otherwise."""
MOST_LAYERS = 10_000
"""Far from what any model has: a number beyond is damage, and would take all memory."""
_OUTER = (
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("torch_dtype", "dtype", "quantization_config"),
)


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise not_found(path, "does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise invalid(path, f"is not readable JSON: {error}") from error
    if not isinstance(read, dict):
        raise invalid(path, "is not a JSON object")
    return read


def read_config(path: Path) -> dict[str, Any]:
    return flattened(read_json(path))


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Of a model with several parts only what describes its language model."""
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        return config
    outer = {name: config[name] for name in _OUTER if name in config}
    return {"architectures": config.get("architectures"), **outer, **inner}


def read_shape(config: Mapping[str, Any], path: Path) -> Shape:
    """Whether it is a model that can be split, before anything else of it is looked at."""
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise invalid(path, "does not say what architecture the model has (model_type)")
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise not_supported(
            path,
            f"describes weights quantised by {method or 'some method'}: take plain ones, or a GGUF",
        )
    layers = config.get("num_hidden_layers")
    is_known = config["model_type"] in FAMILIES
    if is_known and not (isinstance(layers, int) and 1 <= layers <= MOST_LAYERS):
        raise invalid(path, f"has a config of {str(layers)[:80]} layers")
    try:
        shape = Shape.of(config)
    except LlmFailure as failure:
        raise LlmFailure(failure.code, f"{path}: {failure.message}", **failure.facts) from failure
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise invalid(path, f"has a config that can't be understood: {error}") from error
    sizes = (shape.num_layers, shape.hidden, shape.intermediate, shape.heads, shape.kv_heads)
    if min(*sizes, shape.head_dim) < 1 or shape.heads % shape.kv_heads:
        raise invalid(path, f"has a config with impossible sizes: {list(sizes)}")
    return shape


def tied(config: Mapping[str, Any], has_head: bool) -> bool:
    """Whether the embedding is the head too."""
    said = config.get("tie_word_embeddings")
    if isinstance(said, bool):
        return said
    return config["model_type"] in _TIED or not has_head


def check_number(shape: Shape, n: int, path: Path) -> None:
    if not 0 <= n < shape.num_layers:
        raise invalid(path, f"has layers 0 to {shape.num_layers - 1}, and no {n}")


def check_layer(shape: Shape, n: int, there: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Refuses what lacks something, or has it in another size than the config says."""
    check_number(shape, n, path)
    expected = layer_shapes(shape)
    for name, size in there.items():
        rows = expected.get(name.removesuffix(".bias") + ".weight") if ".bias" in name else None
        if rows is not None:
            expected[name] = rows[:1]
        if not all(size):
            raise invalid(path, f"is damaged: {name} of layer {n} is empty")
    for name, size in expected.items():
        _check(f"layer {n}", name, there.get(name), size, path)


def check_ends(shape: Shape, there: Mapping[str, tuple[int, ...]], path: Path) -> None:
    words = shape.vocabulary or there.get("embed", (0,))[0]
    expected = {"embed": (words, shape.hidden), "norm": (shape.hidden,)}
    for name, size in expected.items():
        _check("the end model", name, there.get(name), size, path)
    if not shape.tied:
        _check("the end model", "head", there.get("head"), expected["embed"], path)


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


def layer_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """What a layer must have."""
    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if shape.family == "phi3":
        shapes["self_attn.qkv_proj.weight"] = (queries + 2 * keys, hidden)
        shapes["mlp.gate_up_proj.weight"] = (2 * inner, hidden)
    else:
        shapes["mlp.gate_proj.weight"] = shapes["mlp.up_proj.weight"] = (inner, hidden)
        shapes["self_attn.q_proj.weight"] = (queries, hidden)
        shapes["self_attn.k_proj.weight"] = shapes["self_attn.v_proj.weight"] = (keys, hidden)
    if shape.family == "qwen2":
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    if shape.head_norms:
        shapes["self_attn.q_norm.weight"] = (shape.head_dim,)
        shapes["self_attn.k_norm.weight"] = (shape.head_dim,)
    if shape.after_norms:
        shapes["pre_feedforward_layernorm.weight"] = (hidden,)
        shapes["post_feedforward_layernorm.weight"] = (hidden,)
    return shapes
