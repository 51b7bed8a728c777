"""A model on the disk, and how it is opened."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.models.gguf import stem_of
from penstock.workloads.llm.values import LlmCode, LlmFailure

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


# -- why a model's files are not taken, in one tone ---------------------------------------


def not_found(path: Path, why: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_NOT_FOUND, f"{path} {why}", path=str(path))


def invalid(path: Path, why: str) -> LlmFailure:
    return LlmFailure(LlmCode.MODEL_INVALID, f"{path} {why}", path=str(path))


def not_supported(path: Path, why: str) -> LlmFailure:
    return LlmFailure(LlmCode.NOT_SUPPORTED, f"{path} {why}", path=str(path))


# -- a model's config.json ----------------------------------------------------------------

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


# -- tokenizers as transformers reads them. Only an origin comes here ---------------------


def folder_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return _read(AutoTokenizer, path, path, trust_remote_code=False)


def gguf_tokenizer(path: Path, facts: Mapping[str, Any]) -> Any:
    """transformers takes the vocabulary from the file; two of its facts it passes over."""
    # AutoTokenizer would read the file twice, the first time slowly.
    from transformers import PreTrainedTokenizerFast

    tokenizer = _read(PreTrainedTokenizerFast, path, path.parent, gguf_file=path.name)
    if facts.get("tokenizer.ggml.pre") == "smollm":
        _split_digits(tokenizer)
    sentencepiece = facts.get("tokenizer.ggml.model") == "llama"
    tokenizer.add_bos_token = bool(facts.get("tokenizer.ggml.add_bos_token", sentencepiece))
    return tokenizer


def _split_digits(tokenizer: Any) -> None:
    """Each digit is a word to these, so that spaces before it stay together."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def _read(kind: Any, path: Path, folder: Path, **more: Any) -> Any:
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **more)
    except Exception as error:  # it has no one kind of its own
        raise invalid(path, f"has no tokenizer that can be read: {error}") from error


# -- what a layer's numbers are, in 32 characters -----------------------------------------

_CHUNK = 1 << 20


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Of names, shapes and values. The values count as float32, so that stores of the same
    numbers in bfloat16 and in float32 have the same one; a layout in memory has no say."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name} {list(tensor.shape)} ".encode())
        whole.update(_digest(tensor))
    return whole.hexdigest()[:32]


def _digest(tensor: Tensor) -> bytes:
    """In pieces, as a float32 copy of a large tensor may not fit beside it."""
    digest = hashlib.sha256()
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK].float().contiguous()
        digest.update(memoryview(piece.numpy()))
    return digest.digest()
