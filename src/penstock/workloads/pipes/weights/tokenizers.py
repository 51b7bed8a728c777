"""Tokenizers as transformers reads them. Only an origin comes here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.workloads.pipes.weights.refusing import invalid


def folder_tokenizer(path: Path) -> Any:
    return _read(path, path)


def gguf_tokenizer(path: Path) -> Any:
    return _read(path, path.parent, gguf_file=path.name)


def _read(path: Path, folder: Path, **more: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **more
        )
    except Exception as error:  # it has no one kind of its own
        raise invalid(path, f"has no tokenizer that can be read: {error}") from error
