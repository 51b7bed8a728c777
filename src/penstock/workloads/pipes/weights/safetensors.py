"""A folder as Hugging Face has it: config.json, safetensors in one file or in many."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from penstock.workloads.pipes.weights.memory import give_back
from penstock.workloads.pipes.weights.source import (
    folder_tokenizer,
    invalid,
    not_found,
    not_supported,
    read_config,
    read_json,
)

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
FINGERPRINTS = "fingerprints"
"""In the metadata of the index, if `penstock node prepare` wrote it."""
TOKENIZER = "tokenizer"
"""The folder of a tokenizer that is not to be taken for what config.json makes one expect."""
_LAYER = re.compile(r"(?P<list>(?:[^.]+\.)*?)(?P<number>\d+)\.(?P<name>.+)")
"""A tensor of a list of modules: `model.layers.3.mlp.up_proj.weight`."""
_OTHER_TOWERS = re.compile(r"vision|visual|audio|speech|image|projector")
_DERIVED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|\.attention\.(masked_)?bias$")
"""An old checkpoint's tables: no weights."""


class SafetensorsSource:
    """Shards are opened when one of their tensors is asked for: those of other layers need not
    even be there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = read_config(path / "config.json")

    @cached_property
    def size(self) -> int:
        if (self.path / INDEX).exists():
            total = self._metadata.get("total_size")
            return total if isinstance(total, int) else 0
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        file = self.path / "generation_config.json"
        return read_json(file) if file.exists() else {}

    @property
    def fingerprints(self) -> tuple[str, ...]:
        told = self._metadata.get(FINGERPRINTS)
        return tuple(map(str, told)) if isinstance(told, list) else ()

    @cached_property
    def _metadata(self) -> Mapping[str, Any]:
        index = self.path / INDEX
        metadata = read_json(index).get("metadata") if index.exists() else None
        return metadata if isinstance(metadata, dict) else {}

    def layer(self, n: int) -> Mapping[str, Tensor]:
        start = f"{self._list}{n}."
        names = {name: name.removeprefix(start) for name in self._where if name.startswith(start)}
        if not names:
            raise invalid(self.path, f"has no tensors of layer {n}")
        return self._read(names)

    def ends(self) -> Mapping[str, Tensor]:
        root = self._list.rpartition(".")[0].rpartition(".")[0]
        inner = "language_model" in root
        names = {}
        for name in self._where:
            if name.startswith(self._list):
                continue
            if not inner:
                names[name] = name
            elif name.startswith(f"{root}."):
                names[name] = "model." + name.removeprefix(f"{root}.")
            elif name.endswith("lm_head.weight"):
                names[name] = "lm_head.weight"
        return self._read(names)

    def tokenizer(self) -> Any:
        apart = self.path / TOKENIZER
        return folder_tokenizer(apart if apart.is_dir() else self.path)

    @cached_property
    def _where(self) -> dict[str, str]:
        """Which file has which tensor."""
        index = self.path / INDEX
        if index.exists():
            where = read_json(index).get("weight_map")
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
            with opened(file) as tensors:
                where.update(dict.fromkeys(tensors.keys(), file.name))
        return where

    @cached_property
    def _list(self) -> str:
        """The list of the language model's layers: of several as long as it, the one of text."""
        lists: dict[str, set[int]] = {}
        for name in self._where:
            if found := _LAYER.fullmatch(name):
                lists.setdefault(found["list"], set()).add(int(found["number"]))
        count = self.config.get("num_hidden_layers") or self.config.get("n_layer") or 1
        long = [
            name
            for name, numbers in lists.items()
            if not _OTHER_TOWERS.search(name) and count - 1 in numbers and 0 in numbers
        ]
        if not long:
            raise invalid(self.path, f"has no tensors of a language model of {count} layers")
        return max(long, key=lambda name: sum(one.startswith(name) for one in self._where))

    def _read(self, names: Mapping[str, str]) -> dict[str, Tensor]:
        wanted = {theirs: ours for theirs, ours in names.items() if not _DERIVED.search(theirs)}
        found: dict[str, Tensor] = {}
        for file in sorted({self._where[name] for name in wanted}):
            here = {theirs: ours for theirs, ours in wanted.items() if self._where[theirs] == file}
            found |= read_file(self.path / file, here)
        return found


def opened(path: Path) -> Any:
    """A safetensors file. Raises LlmFailure."""
    try:
        path.open("rb").close()  # the library's own errors are of many kinds
        return safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise not_found(path, "does not exist: copy it from where the whole model is") from None
    except SafetensorError as error:
        raise invalid(path, f"is damaged or cut off: {error}") from error
    except OSError as error:
        raise invalid(path, f"can't be read: {error.strerror or error}") from error


def read_file(path: Path, names: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Tensors of a file by new names, or all of them. The library maps the file, and each tensor
    would keep the map: they are copied."""
    give_back()  # what was read before
    found = {}
    with opened(path) as tensors:
        there = set(tensors.keys())
        for theirs, ours in (names or dict(zip(there, there, strict=True))).items():
            if theirs not in there:
                raise invalid(path, f"lacks {theirs}, which the index says is in it")
            tensor = tensors.get_tensor(theirs)
            if not tensor.is_floating_point() or tensor.itemsize < 2:
                raise not_supported(
                    path, f"has {theirs} as {tensor.dtype}: only plain floats are taken"
                )
            found[ours] = tensor.clone()
    return found
