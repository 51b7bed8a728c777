"""A model on the disk, and how it is opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.models.gguf import stem_of
from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.refusing import invalid, not_found, not_supported

if TYPE_CHECKING:
    from torch import Tensor

NEEDED = ("torch", "safetensors", "gguf", "transformers", "cryptography")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class Source(Protocol):
    """Every method raises LlmFailure, with a reason that names the file."""

    config: Mapping[str, Any]
    """config.json as transformers has it. Of a model that also sees or hears only what describes
    its language model; `tie_word_embeddings` is always there."""

    def layer(self, n: int) -> Mapping[str, Tensor]:
        """The names come without `model.layers.N.`, the values in the source's precision: what
        is quantised comes as float32. The tensors belong to the caller, and nothing of the file
        stays in memory beside them."""
        ...

    def ends(self) -> Mapping[str, Tensor]:
        """`embed`, `norm`, and `head` unless the embedding is the head too."""
        ...

    def layer_bytes(self, n: int) -> int:
        """As stored."""
        ...

    def layer_values(self, n: int) -> int:
        """How many numbers it has, to know its size in another precision."""
        ...

    def ends_bytes(self) -> int:
        """As stored."""
        ...

    @property
    def generation(self) -> Mapping[str, Any]:
        """generation_config.json; empty if there is none. It lies with the ends."""
        ...

    @property
    def fingerprints(self) -> Sequence[str]:
        """Of the layers, as far as they are known without reading any; else none."""
        ...

    def tokenizer(self) -> Any:
        """Of transformers, with the chat template. Only an origin asks for it."""
        ...


def open_source(path: Path) -> Source:
    """Nothing of the weights is read here, only what describes them."""
    needs_engine()
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise not_found(path, "does not exist")
    if path.suffix == ".gguf" or _begins(path, b"GGUF"):
        from penstock.workloads.pipes.weights.gguf import GgufSource

        return GgufSource(path)
    if path.suffix in _PICKLES:
        raise not_supported(path, f"is a pickle, which can run code: {_CONVERT}")
    if path.suffix == ".safetensors":
        raise invalid(path, "is one file of a model: its folder is needed, for the config.json")
    raise invalid(path, "is neither a GGUF file nor a folder with a model")


def needs_engine() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise LlmFailure(
            LlmCode.ENGINE_MISSING,
            f"{', '.join(missing)} missing: pip install 'penstock[pipes]' to split models",
        )


_CONVERT = "take the model's safetensors or GGUF files"


def _open_folder(path: Path) -> Source:
    if (path / "manifest.json").exists():
        from penstock.workloads.pipes.weights.prepared import PreparedSource

        return PreparedSource(path)
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists():
        from penstock.workloads.pipes.weights.safetensors import SafetensorsSource

        return SafetensorsSource(path)
    models = {stem_of(file.name): file for file in sorted(path.glob("*.gguf"))}
    if len(models) == 1:
        return open_source(*models.values())
    if models:
        raise invalid(path, f"has {len(models)} GGUF files: name one of them")
    if any(file.suffix in _PICKLES for file in path.iterdir()):
        raise not_supported(path, f"has its weights as pickles, which can run code: {_CONVERT}")
    raise not_found(path, "has no model: neither safetensors nor a GGUF file")


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
