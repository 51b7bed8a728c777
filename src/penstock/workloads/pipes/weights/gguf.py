"""A GGUF file, alone or in several parts, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from penstock.models.gguf import GgufHeader, GgufTensor, Malformed, Value, part_paths
from penstock.workloads.pipes.weights.gguf_config import GgufConfig
from penstock.workloads.pipes.weights.memory import give_back
from penstock.workloads.pipes.weights.source import (
    check_number,
    gguf_tokenizer,
    invalid,
    not_found,
    not_supported,
)

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PHI3 = {"ffn_up": "mlp.gate_up_proj"}
_SANDWICHED = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NAMES = {
    "": _LAYER,
    "phi3": _LAYER | _PHI3,
    "gemma2": _LAYER | _SANDWICHED,
    "gemma3": _LAYER | _SANDWICHED,
}
"""What transformers calls a layer's tensors, by architecture where it differs."""
_TOKENIZER = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token")
_DERIVED = ("rope_freqs", "attn_rot_embd")
"""Positions in another form, and no weights."""
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_INTERLEAVED = ("llama", "smollm3")
"""Whose queries and keys lie in pairs of neighbours there, and in two halves here."""
_SHIFTED = ("gemma", "gemma2", "gemma3")
"""Whose norms have the one added there that transformers adds when it computes."""
_PLAIN = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_PIECE = 1 << 18
"""Values that are made of a quantised tensor at once: the work on them needs several times
their room, and is fastest in a processor's cache."""


class GgufSource:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, GgufTensor] = {}
        self._metadata: Mapping[str, Value] = {}
        for number, part in enumerate(parts(path)):
            header = _header(part)
            self._metadata = self._metadata if number else header.metadata
            self._tensors.update(header.tensors)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        config = GgufConfig(path, self._metadata, shapes, self._small).config()
        self.config: Mapping[str, Any] = config
        self.size = sum(tensor.size for tensor in self._tensors.values())
        self._arch = str(self._metadata["general.architecture"])
        self._names = NAMES.get(self._arch, NAMES[""])
        self._refuse_unknown_types()

    @property
    def generation(self) -> Mapping[str, Any]:
        """Of the ends, where a turn ends beside where the text does."""
        ends = [
            self._metadata[key]
            for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
            if key in self._metadata
        ]
        return {"eos_token_id": ends} if ends else {}

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return ()

    def layer(self, n: int) -> Mapping[str, torch.Tensor]:
        give_back()  # what the layer before was made of
        check_number(self.config, n, self.path)
        places = self._layer_places(n)
        return {name: self._converted(place) for name, place in places.items()}

    def ends(self) -> Mapping[str, torch.Tensor]:
        return {
            name: self._converted(self._tensors[theirs])
            for name, theirs in _ENDS.items()
            if theirs in self._tensors
        }

    def tokenizer(self) -> Any:
        return gguf_tokenizer(parts(self.path)[0], self._metadata)

    def _layer_places(self, n: int) -> dict[str, GgufTensor]:
        places = {}
        for name, tensor in self._tensors.items():
            if name.startswith(f"blk.{n}."):
                stem, _, kind = name.removeprefix(f"blk.{n}.").rpartition(".")
                # What is not known keeps its name, and whoever computes refuses it.
                if stem not in _DERIVED:
                    places[f"{self._names.get(stem, stem)}.{kind}"] = tensor
        return places

    def _converted(self, place: GgufTensor) -> torch.Tensor:
        try:
            return self._turned(place, read(place))
        except (RuntimeError, ValueError) as error:
            raise invalid(self.path, f"has {place.name} of a wrong size: {error}") from error

    def _turned(self, place: GgufTensor, tensor: torch.Tensor) -> torch.Tensor:
        if self._arch in _SHIFTED and "norm.weight" in place.name:
            return tensor - 1
        if self._arch in _INTERLEAVED and ".attn_q." in place.name:
            return halved(tensor, int(self.config["num_attention_heads"]))
        if self._arch in _INTERLEAVED and ".attn_k." in place.name:
            return halved(tensor, int(self.config["num_key_value_heads"]))
        return tensor

    def _small(self, name: str) -> list[float]:
        values: list[float] = read(self._tensors[name]).tolist()
        return values

    def _refuse_unknown_types(self) -> None:
        """Before anything is loaded."""
        types = {tensor.kind: tensor.type_name for tensor in self._tensors.values()}
        for number, name in types.items():
            if number in _PLAIN:
                continue
            try:
                kind = GGMLQuantizationType(number)
                block = numpy.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=numpy.uint8)
                dequantize(block, kind)
            except (NotImplementedError, ValueError):
                raise not_supported(
                    self.path, f"has tensors of the type {name}, which can't be read"
                ) from None


def parts(path: Path) -> list[Path]:
    """All files of a model that was cut into several; whichever of them was named."""
    try:
        return part_paths(path)
    except Malformed as problem:
        raise invalid(path, str(problem)) from None


def _header(path: Path) -> GgufHeader:
    try:
        return GgufHeader(path, _wanted)
    except FileNotFoundError:
        raise not_found(path, "does not exist") from None
    except Malformed as problem:
        raise invalid(path, str(problem)) from None
    except OSError as error:
        raise invalid(path, f"can't be read: {error.strerror}") from error


def read(place: GgufTensor) -> torch.Tensor:
    """Plain floats as they are, quantised values as float32."""
    kind = GGMLQuantizationType(place.kind)
    plain = _PLAIN.get(kind)
    if plain is not None:
        tensor = torch.empty(place.shape, dtype=plain)
        read_into(place.path, place.offset, tensor.reshape(-1).view(torch.uint8))
        return tensor
    stored = torch.empty(place.size, dtype=torch.uint8)
    read_into(place.path, place.offset, stored)
    block, length = GGML_QUANT_SIZES[kind]
    packed = stored.numpy().reshape(-1, length)
    values = numpy.empty((len(packed), block), dtype=numpy.float32)
    step = max(1, _PIECE // block)
    for start in range(0, len(packed), step):
        # As one row: of many it would take sixteen at a time.
        piece = packed[start : start + step].reshape(1, -1)
        values[start : start + step] = dequantize(piece, kind).reshape(-1, block)
    return torch.from_numpy(values).reshape(place.shape)


def read_into(path: Path, offset: int, tensor: torch.Tensor) -> None:
    """Fills a tensor of bytes."""
    left = memoryview(tensor.numpy())
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left:
            got = file.readinto(left)
            if not got:
                raise invalid(path, "became shorter while it was read")
            left = left[got:]


def halved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows 0, 2, 4… of each head first, then 1, 3, 5…"""
    paired = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)


def _wanted(key: str) -> bool:
    """No words: they are for the tokenizer, and read when it is asked for."""
    return not key.startswith("tokenizer.") or key.endswith("_token_id") or key in _TOKENIZER
