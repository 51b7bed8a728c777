"""Tokenizers as transformers reads them. Only an origin comes here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.workloads.pipes.weights.refusing import invalid


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
