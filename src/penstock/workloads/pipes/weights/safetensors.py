"""A folder as Hugging Face has it: config.json, safetensors in one file or in many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.workloads.pipes.weights import described
from penstock.workloads.pipes.weights.memory import give_back
from penstock.workloads.pipes.weights.refusing import invalid
from penstock.workloads.pipes.weights.tensor_file import TensorFile, TensorLocation
from penstock.workloads.pipes.weights.tokenizers import folder_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
"""What may stand before `layers.0`; the later ones are of models that also see or hear."""


class SafetensorsSource:
    """Shards are opened when one of their tensors is asked for: those of other layers need not
    even be there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / "config.json"
        config = described.read_config(file)
        described.read_shape(config, file)
        self._files: dict[str, TensorFile] = {}
        self._where = self._index()
        self._prefix = self._find_prefix()
        config["tie_word_embeddings"] = described.tied(config, self._head_name() in self._where)
        self.config: Mapping[str, Any] = config
        self._shape = described.read_shape(config, file)

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        file = self.path / "generation_config.json"
        return described.read_json(file) if file.exists() else {}

    @property
    def fingerprints(self) -> tuple[str, ...]:
        return ()

    def layer(self, n: int) -> Mapping[str, Tensor]:
        give_back()  # what the layer before was made of
        start = f"{self._prefix}layers.{n}."
        places = self._layer_places(n)
        return {name: self._file(start + name).read(start + name) for name in places}

    def ends(self) -> Mapping[str, Tensor]:
        names = self._end_names()
        self._end_places()
        return {short: self._file(name).read(name) for short, name in names.items()}

    def layer_bytes(self, n: int) -> int:
        return sum(place.size for place in self._layer_places(n).values())

    def layer_values(self, n: int) -> int:
        """By the config: the layer's shard need not be here."""
        described.check_number(self._shape, n, self.path)
        return sum(math.prod(shape) for shape in described.layer_shapes(self._shape).values())

    def ends_bytes(self) -> int:
        return sum(place.size for place in self._end_places().values())

    def tokenizer(self) -> Any:
        return folder_tokenizer(self.path)

    def _index(self) -> dict[str, str]:
        """Which file has which tensor."""
        index = self.path / _INDEX
        if index.exists():
            where = described.read_json(index).get("weight_map")
            if not isinstance(where, dict) or not where:
                raise invalid(index, "does not say where the tensors are (weight_map)")
            for file in where.values():
                if not isinstance(file, str) or Path(file).name != file:
                    raise invalid(index, f"names a file outside of its folder: {str(file)[:80]!r}")
            return where
        files = sorted(self.path.glob("*.safetensors"))
        whole = self.path / "model.safetensors"
        where = {}
        for file in [whole] if whole in files else files:
            where.update(dict.fromkeys(self._opened(file.name).places, file.name))
        return where

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            start = f"{prefix}layers.0."
            if any(name.startswith(start) for name in self._where):
                return prefix
        raise invalid(self.path, "has no tensors of a language model's layer 0")

    def _head_name(self) -> str:
        outer = "language_model." if self._prefix == "language_model.model." else ""
        return outer + "lm_head.weight"

    def _end_names(self) -> dict[str, str]:
        names = {
            "embed": f"{self._prefix}embed_tokens.weight",
            "norm": f"{self._prefix}norm.weight",
        }
        return names if self.config["tie_word_embeddings"] else names | {"head": self._head_name()}

    def _layer_places(self, n: int) -> dict[str, TensorLocation]:
        start = f"{self._prefix}layers.{n}."
        names = [name for name in self._where if name.startswith(start)]
        places = {name.removeprefix(start): self._file(name).places[name] for name in names}
        # An old checkpoint's rotary table: derived, and no weight.
        places.pop("self_attn.rotary_emb.inv_freq", None)
        shapes = {name: place.shape for name, place in places.items()}
        described.check_layer(self._shape, n, shapes, self.path)
        return places

    def _end_places(self) -> dict[str, TensorLocation]:
        names = {short: name for short, name in self._end_names().items() if name in self._where}
        places = {short: self._file(name).places[name] for short, name in names.items()}
        shapes = {short: place.shape for short, place in places.items()}
        described.check_ends(self._shape, shapes, self.path)
        return places

    def _file(self, name: str) -> TensorFile:
        file = self._opened(self._where[name])
        if name not in file.places:
            raise invalid(file.path, f"lacks {name}, which the index says is in it")
        return file

    def _opened(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile(self.path / file)
        return self._files[file]
