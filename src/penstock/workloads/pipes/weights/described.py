"""A model's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.workloads.pipes.weights.refusing import invalid, not_found

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
    """Of a model with several parts only what describes its language model."""
    config = read_json(path)
    inner = config.get("text_config")
    if isinstance(inner, dict):
        outer = {name: config[name] for name in _OUTER if name in config}
        config = {"architectures": config.get("architectures"), **outer, **inner}
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise invalid(path, "does not say what architecture the model has (model_type)")
    return config


def check_number(config: Mapping[str, Any], n: int, path: Path) -> None:
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or not 0 <= n < count:
        raise invalid(path, f"has layers 0 to {int(count or 0) - 1}, and no {n}")
