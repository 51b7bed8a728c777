"""Tokenizers of the two kinds that models have, small, made of a few lines of text."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import processors as processing
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then over 12 more.",
    "naïve café Zürich Straße; 日本語のテキスト 日本 東京 漢字 北京 你好世界",
    "😀 🌟🎉 👩‍👩‍👧 emoji, and 한국어 too. Привет, мир!",
    '{"city": "Oslo", "size": true}\n\t  spaces   and\n\nlines',
] * 3
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools, please') }}"
    "{% endif %}<|start|>{{ m.role }}\n{{ m.content }}<|done|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIALS = ["<|eos|>", "<|start|>", "<|done|>"]


def byte_level(**more: Any) -> Any:
    """As those of Llama 3, Qwen and SmolLM: each token is bytes."""
    return _wrapped(_byte_level(), **more)


def sentence_piece(**more: Any) -> Any:
    """As those of Llama 2, Mistral and Phi-3: characters, and bytes for those that are rare."""
    return _wrapped(_sentence_piece(), **more)


def _wrapped(definition: str, **more: Any) -> Any:
    more = {"chat_template": TEMPLATE, "eos_token": "<|eos|>", **more}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(definition), **more)


@cache
def _byte_level() -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<think>"), AddedToken("  two spaces")])
    return str(made.to_str())


@cache
def _sentence_piece() -> str:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=90,
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processing.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", made.token_to_id("<|start|>"))]
    )
    definition = json.loads(made.to_str())
    # Bytes are made to be tokens like the others.
    definition["added_tokens"] = [
        one for one in definition["added_tokens"] if not one["content"].startswith("<0x")
    ]
    return json.dumps(definition)
