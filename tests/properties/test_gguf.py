"""Whatever a file holds, it is described or refused with a reason, and nothing else happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.models import gguf

from penstock.models.facts import GgufFacts, read_facts
from penstock.workloads.llm.values import LlmCode, LlmFailure

WHOLE = gguf(
    {
        "llama.block_count": 2,
        "llama.attention.head_count_kv": [1, 2],
        "tokenizer.ggml.tokens": ["a", "", "ccc"] * 9,
        "tokenizer.chat_template": "{{ messages }}",
    }
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "m.gguf"


def look(file: Path, data: bytes) -> GgufFacts | LlmFailure:
    file.write_bytes(data)
    try:
        found: GgufFacts | LlmFailure = read_facts(file)
    except LlmFailure as failure:
        found = failure
    if isinstance(found, LlmFailure):
        assert found.code is LlmCode.MODEL_INVALID
        assert found.message.startswith("m.gguf ")
        assert len(found.message) < 300
    return found


@given(data=st.binary(max_size=400).map(lambda tail: b"GGUF\x03\0\0\0" + tail))
def test_any_bytes_are_described_or_refused(data: bytes, file: Path) -> None:
    look(file, data)


@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_file_that_is_cut_anywhere_is_refused(length: int, file: Path) -> None:
    assert isinstance(look(file, WHOLE[:length]), LlmFailure)


@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=1, max_size=8)), max_size=5
    )
)
def test_a_file_with_any_bytes_changed_is_described_or_refused(
    changes: list[tuple[int, bytes]], file: Path
) -> None:
    data = bytearray(WHOLE)
    for at, new in changes:
        data[at : at + len(new)] = new
    facts = look(file, bytes(data))
    if isinstance(facts, GgufFacts):
        assert facts.kv_bytes_per_token >= 0
        assert facts.parameters > 0
