"""Writes a model as a folder in which each layer is a file of its own (`penstock node prepare`).

It is a folder as Hugging Face has it, with a shard for each layer:

    config.json                    what the model is
    model.safetensors.index.json   which file has which tensor, and a fingerprint for each layer
    layer-000.safetensors …
    ends.safetensors, tokenizer/, generation_config.json

A machine that has layers alone needs the first two and its layers' files, and opens nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.safetensors import FINGERPRINTS, INDEX, TOKENIZER
from penstock.workloads.pipes.weights.source import Source, fingerprint

if TYPE_CHECKING:
    from torch import Tensor

_ENDS = "ends.safetensors"


class Prepared(Struct, frozen=True, kw_only=True):
    """What was written."""

    num_layers: int
    layer_bytes: int
    """Of all layers."""
    end_bytes: int


def prepare(
    source: Source, folder: Path, on_progress: Callable[[int, int], None] | None = None
) -> Prepared:
    """Write a model as a folder, which appears when all of it is written.

    `on_progress` is called with the number of parts that are written, and of all."""
    folder = folder.absolute()
    if folder.exists():
        raise LlmFailure(LlmCode.MODEL_INVALID, f"{folder} is there already: name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        prepared = _write(source, unfinished, on_progress or (lambda *_: None))
        _settle(unfinished)
        unfinished.rename(folder)
    except LlmFailure:
        raise
    except Exception as error:  # who writes tensors or words has a kind of its own for a full disk
        raise LlmFailure(LlmCode.MODEL_INVALID, f"{folder} can't be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return prepared


def _write(source: Source, folder: Path, on_progress: Callable[[int, int], None]) -> Prepared:
    count = source.config["num_hidden_layers"]
    where: dict[str, str] = {}
    prints: list[str] = []

    def save(tensors: Mapping[str, Tensor], file: str) -> int:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
        where.update(dict.fromkeys(tensors, file))
        return sum(tensor.nbytes for tensor in tensors.values())

    layer_bytes = 0
    for n in range(count):
        on_progress(n, count + 1)
        layer = source.layer(n)
        prints.append(fingerprint(layer))
        named = {f"model.layers.{n}.{name}": tensor for name, tensor in layer.items()}
        layer_bytes += save(named, f"layer-{n:03}.safetensors")
    on_progress(count, count + 1)
    end_bytes = save(source.ends(), _ENDS)
    source.tokenizer().save_pretrained(folder / TOKENIZER)
    _dump(source.generation, folder / "generation_config.json")
    _dump(source.config, folder / "config.json")
    metadata = {"total_size": layer_bytes + end_bytes, FINGERPRINTS: prints}
    _dump({"metadata": metadata, "weight_map": where}, folder / INDEX)
    on_progress(count + 1, count + 1)
    return Prepared(num_layers=count, layer_bytes=layer_bytes, end_bytes=end_bytes)


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
