"""A model on the disk, and how it is opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.models.gguf import stem_of
from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.refusing import invalid, not_found, not_supported

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.workloads.pipes.model.architecture import Architecture

NEEDED = ("torch", "safetensors", "gguf", "transformers", "cryptography")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class Source(Protocol):
    """Every method raises LlmFailure, with a reason that names the file."""

    @property
    def path(self) -> Path: ...

    config: Mapping[str, Any]
    """config.json as transformers has it. Of a model that also sees or hears only what describes
    its language model."""

    @property
    def size(self) -> int:
        """Bytes of all weights, as stored."""
        ...

    def layer(self, n: int) -> Mapping[str, Tensor]:
        """The names are a checkpoint's, without `model.layers.N.`, and the values in the source's
        precision: what is quantised comes as float32. The tensors belong to the caller, and nothing
        of the file stays in memory beside them."""
        ...

    def ends(self) -> Mapping[str, Tensor]:
        """All that is in no layer, by the names of a checkpoint."""
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


def architecture_of(source: Source) -> Architecture:
    """What its config says. Raises LlmFailure, which names the file."""
    from penstock.workloads.pipes.model.architecture import Architecture

    with naming(source):
        return Architecture(source.config)


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """What is refused in here names the model's files."""
    try:
        yield
    except LlmFailure as failure:
        if str(source.path) in failure.message:
            raise
        said = f"{source.path}: {failure.message}"
        raise LlmFailure(failure.code, said, **failure.facts) from failure


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
