"""A folder in which each layer is a file of its own, made by `penstock node prepare`.

    config.json           what the model is
    manifest.json         what the files are, with a fingerprint for each
    layers/000.safetensors …
    ends/                 embedding, norm and head; the tokenizer; how to generate

A machine that has layers alone needs config, manifest and its layers' files, and opens nothing
else: `ends/` need not be copied there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.safetensors import read_file
from penstock.workloads.pipes.weights.source import (
    Source,
    check_number,
    fingerprint,
    folder_tokenizer,
    invalid,
    not_found,
    not_supported,
    read_config,
    read_json,
)

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 2
_ENDS = "ends"


class Part(msgspec.Struct, frozen=True):
    """A file of the folder."""

    file: str
    bytes: int
    fingerprint: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    model: str
    num_layers: int
    layers: tuple[Part, ...]
    ends: Part


class PreparedSource:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _read_manifest(path / "manifest.json")
        self.config: Mapping[str, Any] = read_config(path / "config.json")
        if self.config.get("num_hidden_layers") != self.manifest.num_layers:
            raise invalid(path, "has a config and a manifest of different models")
        parts = (*self.manifest.layers, self.manifest.ends)
        self.size = sum(part.bytes for part in parts)

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        file = self.path / _ENDS / "generation_config.json"
        return read_json(file) if file.exists() else {}

    @property
    def fingerprints(self) -> Sequence[str]:
        return tuple(part.fingerprint for part in self.manifest.layers)

    def layer(self, n: int) -> Mapping[str, Tensor]:
        check_number(self.config, n, self.path)
        return self._read(self.manifest.layers[n])

    def ends(self) -> Mapping[str, Tensor]:
        return self._read(self.manifest.ends)

    def tokenizer(self) -> Any:
        return folder_tokenizer(self.path / _ENDS)

    def _read(self, part: Part) -> Mapping[str, Tensor]:
        path = self.path / part.file
        if not path.exists():
            raise not_found(path, "is not there: copy it from where the model was prepared")
        return read_file(path)


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise invalid(path, f"is not the manifest of a prepared model: {error}") from error
    if manifest.format != FORMAT:
        raise not_supported(path, f"has the format {manifest.format}; prepare the model anew")
    if len(manifest.layers) != manifest.num_layers:
        raise invalid(path, f"lists {len(manifest.layers)} layers of {manifest.num_layers}")
    expected = [_layer_file(n) for n in range(manifest.num_layers)] + [_ends_file()]
    if [part.file for part in (*manifest.layers, manifest.ends)] != expected:
        raise invalid(path, "names files that are not a prepared model's")
    return manifest


def prepare(
    source: Source,
    folder: Path,
    told: Callable[[int, int], None] | None = None,
    *,
    model: str = "",
) -> Manifest:
    """The folder is there when all of it is, or not at all. `told` hears how many parts of how
    many are written."""
    folder = folder.absolute()
    if folder.exists():
        raise LlmFailure(LlmCode.MODEL_INVALID, f"{folder} is there already: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        manifest = _write(source, unfinished, told or (lambda *_: None), model or folder.name)
        _settle(unfinished)
        unfinished.rename(folder)
    except LlmFailure:
        raise
    except Exception as error:  # who writes tensors or words has a kind of its own for a full disk
        raise LlmFailure(LlmCode.MODEL_INVALID, f"{folder} can't be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _write(source: Source, folder: Path, told: Callable[[int, int], None], model: str) -> Manifest:
    count = source.config["num_hidden_layers"]
    (folder / "layers").mkdir(parents=True)
    (folder / _ENDS).mkdir()
    layers = []
    for n in range(count):
        told(n, count + 1)
        layers.append(_save(source.layer(n), folder, _layer_file(n)))
    told(count, count + 1)
    ends = _save(source.ends(), folder, _ends_file())
    source.tokenizer().save_pretrained(folder / _ENDS)
    _dump(source.generation, folder / _ENDS / "generation_config.json")
    _dump(source.config, folder / "config.json")
    manifest = Manifest(
        format=FORMAT, model=model, num_layers=count, layers=tuple(layers), ends=ends
    )
    _dump(msgspec.to_builtins(manifest), folder / "manifest.json")
    told(count + 1, count + 1)
    return manifest


def _save(tensors: Mapping[str, Tensor], folder: Path, file: str) -> Part:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return Part(
        file=file,
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        fingerprint=fingerprint(tensors),
    )


def _dump(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _settle(folder: Path) -> None:
    """What a name is given to must not be lost in a power cut."""
    for path in (folder, *folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _layer_file(n: int) -> str:
    return f"layers/{n:03}.safetensors"


def _ends_file() -> str:
    return f"{_ENDS}/ends.safetensors"
