"""The file of a real model: what its header says, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.models import smollm2

from penstock.models.facts import read_facts
from penstock.models.package import SMOLLM2
from penstock.models.pull import pull
from penstock.models.store import ModelStore, digest
from penstock.workloads.llm.values import LlmCode, LlmFailure


def refusal_of(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(LlmFailure) as refused:
        read_facts(file)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert refused.value.message.startswith("m.gguf ")
    return refused.value.message


def test_a_real_model_is_described() -> None:
    facts = read_facts(smollm2())

    assert facts.name == "SmolLM2-135M-Instruct"
    assert facts.architecture == "llama"
    assert facts.parameters == 134_515_008
    assert facts.quantisation == "Q4_1"
    assert facts.train_context == 8192
    assert facts.size == smollm2().stat().st_size
    assert facts.layers == 30
    assert facts.embedding_length == 576
    assert facts.kv_bytes_per_token == 30 * 3 * (64 + 64) * 2
    assert facts.chat_template
    assert not facts.embeds
    assert not facts.vision


def test_a_real_model_that_lacks_one_byte_is_cut_off(tmp_path: Path) -> None:
    whole = smollm2().read_bytes()
    said = refusal_of(tmp_path / "m.gguf", whole[:-1])
    assert "cut off" in said
    assert "98,362,432" in said
    assert "98,362,431" in said


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "m.gguf"


@example(part=1.0)
@given(part=st.floats(0, 1))
def test_a_header_that_is_cut_anywhere_is_refused(part: float, file: Path) -> None:
    header = 1_800_000
    with smollm2().open("rb") as whole:
        data = whole.read(int(part * header))
    assert len(refusal_of(file, data)) < 300


@pytest.mark.seed("004", "13.12")
def test_the_small_default_is_the_model_that_tests_run(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    assert digest(smollm2()) == SMOLLM2.sha256
    store.add(smollm2())
    assert pull("smollm2", store).name == SMOLLM2.name
