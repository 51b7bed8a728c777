"""Tokens are bytes, and bytes make up a text as the tokenizer makes it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.pipes.small_tokenizers import CORPUS, byte_level, sentence_piece
from tokenizers import decoders

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.text.vocabulary import Vocabulary, readable

KINDS = {"byte-level": byte_level(), "sentence-piece": sentence_piece()}


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    return str(
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.sampled_from(CORPUS) | st.text(max_size=40))
def test_a_text_is_the_same_as_the_tokenizers(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    tokens = tokenizer.encode(text)

    assert Vocabulary(tokenizer).text_of(tokens) == decoded(tokenizer, tokens)


def test_each_byte_has_a_token_and_each_token_its_bytes() -> None:
    for tokenizer in KINDS.values():
        vocabulary = Vocabulary(tokenizer)
        known = {vocabulary.bytes_of(token) for token in range(len(tokenizer))}
        assert known >= {bytes([byte]) for byte in range(256)}


def test_special_tokens_have_a_name_and_no_text() -> None:
    vocabulary = Vocabulary(byte_level())
    assert vocabulary.bytes_of(2) == b""
    assert vocabulary.name_of(2) == b"<|done|>"


def test_tokens_added_by_hand_are_text_as_they_read() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a<think>b  two spaces")
    assert Vocabulary(tokenizer).text_of(tokens) == "a<think>b  two spaces"


def test_a_token_beyond_the_vocabulary_is_nothing() -> None:
    assert Vocabulary(byte_level()).bytes_of(100_000) == b""


def test_characters_that_are_not_whole_are_left_out_and_wrong_ones_are_marked() -> None:
    assert readable("a🌟".encode()[:-1]) == "a"
    assert readable(b"a\x9f\xf0\x9fb") == "a\ufffd\ufffdb"


def test_a_tokenizer_that_makes_text_otherwise_is_refused() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(LlmFailure, match="WordPiece") as refused:
        Vocabulary(tokenizer)

    assert refused.value.code is LlmCode.NOT_SUPPORTED
