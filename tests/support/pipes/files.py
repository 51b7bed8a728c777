"""Tiny models as files: the folders and GGUFs that the sources read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "phi3": "phi3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
PLAIN = {
    "qwen2": {"use_sliding_window": False},
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 5, "attn_logit_softcapping": 50.0},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window_pattern": 6, "sliding_window": 5},
    "smollm3": {"no_rope_layer_interval": 4},
}
"""Changes to a tiny model without which its GGUF could not say all of it."""


def write_folder(model: Any, folder: Path, *, words: bool = True, **how: Any) -> Path:
    """As Hugging Face has it."""
    model.save_pretrained(folder, **how)
    if words:
        small_tokenizer().save_pretrained(folder)
    return folder


def small_tokenizer() -> Any:
    words = {f"w{n}": n for n in range(96)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="w1")


def change_json(file: Path, **changes: Any) -> None:
    """A change to None removes."""
    read = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in read.items() if value is not None}))


def write_gguf(
    model: Any,
    file: Path,
    *,
    kinds: Mapping[str, Kind] | None = None,
    facts: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    tensors: Mapping[str, numpy.ndarray] | None = None,
    largest: int = 0,
) -> Path:
    """As llama.cpp's converter does it. `kinds` are how tensors are stored, by a part of their
    name. `largest` cuts it into files of so many tensors."""
    config = model.config.to_dict()
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=largest)
    metadata = {**_facts(arch, config), **(facts or {})}
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key.replace("*", arch), value)
    writer.add_token_list([f"w{n}" for n in range(config["vocab_size"])])
    for name, values in {**converted(model), **(tensors or {})}.items():
        if not any(part in name for part in without):
            kind = next((kind for part, kind in (kinds or {}).items() if part in name), Kind.F32)
            stored = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: Any, key: str, value: Any) -> None:
    kinds = {str: "string", int: "uint32", float: "float32", bool: "bool", list: "array"}
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _facts(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "*.block_count": config["num_hidden_layers"],
        "*.context_length": config["max_position_embeddings"],
        "*.embedding_length": config["hidden_size"],
        "*.feed_forward_length": config["intermediate_size"],
        "*.attention.head_count": config["num_attention_heads"],
        "*.attention.head_count_kv": config["num_key_value_heads"],
        "*.attention.key_length": head,
        "*.attention.value_length": head,
        "*.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "*.rope.freq_base": float(rope["rope_theta"]),
        "*.rope.dimension_count": head,
        "*.attention.sliding_window": config.get("sliding_window") if arch != "qwen3" else None,
        "*.attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "*.final_logit_softcapping": config.get("final_logit_softcapping"),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.model": "gpt2",
    }


def converted(model: Any) -> dict[str, numpy.ndarray]:
    """By gguf's own table of names, with queries and keys interleaved and norms shifted where
    llama.cpp has them so."""
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.detach().to(torch.float32).numpy()
        if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            queries = "q_proj" in name
            heads = config.num_attention_heads if queries else config.num_key_value_heads
            values = interleaved(values, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        stem, _, kind = name.rpartition(".")
        found[f"{names.get_name(stem)}.{kind}"] = numpy.ascontiguousarray(values)
    return found


def interleaved(values: numpy.ndarray, heads: int) -> numpy.ndarray:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
