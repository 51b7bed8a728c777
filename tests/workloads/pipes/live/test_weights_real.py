"""The real model's file, tensor by tensor and word by word."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tests.support.pipes.random_models import RandomSource, tiny
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penstock.workloads.pipes.weights.prepared import prepare
from penstock.workloads.pipes.weights.source import Source, open_source


@pytest.fixture(scope="module")
def source(model_file: Path) -> Source:
    return open_source(model_file)


@pytest.fixture(scope="module")
def tokenizer(source: Source) -> Any:
    return source.tokenizer()


LAYERS = (0, 13, 29)


class Wordless(gguf.GGUFReader):  # type: ignore[misc]
    """Passes over the vocabulary, an array of which for each word takes seconds, and over most
    of the layers, which are like the others."""

    def _build_tensors(self, start_offs: int, fields: Any) -> None:
        layers = {f"blk.{n}" for n in range(30) if n not in LAYERS}
        left = [one for one in fields if ".".join(one.name.split(".")[:2]) not in layers]
        super()._build_tensors(start_offs, left)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        if (raw_type, kind) != (9, 8):
            return super()._get_field_parts(orig_offs, raw_type)
        end = orig_offs + 12
        for _ in range(count):
            end += 8 + struct.unpack_from("<Q", self.data, end)[0]
        return end - orig_offs, [self.data[orig_offs:end]], [], [gguf.GGUFValueType.ARRAY]


def test_every_tensor_equals_what_transformers_reads(
    source: Source, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "GGUFReader", Wordless)
    # It is asked for once for each module of the model.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    config = AutoConfig.for_model(**source.config)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(model_file, return_tensors=True, model_to_load=skeleton)
    left = dict(theirs["tensors"])
    for n in LAYERS:
        for name, tensor in source.layer(n).items():
            assert torch.equal(tensor, left.pop(f"model.layers.{n}.{name}")), (n, name)
    ends = source.ends()
    assert torch.equal(ends["model.embed_tokens.weight"], left.pop("model.embed_tokens.weight"))
    assert torch.equal(ends["model.norm.weight"], left.pop("model.norm.weight"))
    left.pop("lm_head.weight", None)  # tied
    assert left == {}
    for name, value in theirs["config"].items():
        if name in source.config:
            assert source.config[name] == pytest.approx(value), name


LLAMA_CPP_SAYS = {
    "a  5 apples": [81, 256, 37, 13855],
    "   12  34\n\n 5": [333, 33, 34, 256, 35, 36, 8866, 37],
    "½ ² ٣٤": [16738, 216, 19133, 216, 164, 113, 164, 114],
    "Hello 12345 world": [19556, 216, 33, 34, 35, 36, 37, 905],
}
"""By its server's /tokenize with this file."""


@pytest.mark.parametrize("text", LLAMA_CPP_SAYS)
def test_text_has_the_tokens_that_the_spools_engine_gives_it(text: str, tokenizer: Any) -> None:
    assert tokenizer(text)["input_ids"] == LLAMA_CPP_SAYS[text]


def test_special_tokens_are_whole_and_none_is_put_before_a_text(tokenizer: Any) -> None:
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_words_are_the_same_after_the_model_was_prepared(tokenizer: Any, tmp_path: Path) -> None:
    class Worded(RandomSource):
        def tokenizer(self) -> Any:
            return tokenizer

    prepare(Worded(tiny("llama")[0]), tmp_path / "m")
    again = open_source(tmp_path / "m").tokenizer()
    for text, tokens in LLAMA_CPP_SAYS.items():
        assert again(text)["input_ids"] == tokens
    assert again.chat_template == tokenizer.chat_template
    assert again.decode([19556, 905]) == tokenizer.decode([19556, 905])
    assert (again.bos_token_id, again.eos_token_id) == (1, 2)
