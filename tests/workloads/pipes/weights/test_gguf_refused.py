"""A GGUF that is not what it should be is refused with a reason, whatever is in it."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import gguf as looks_like
from tests.support.pipes.files import converted, write_gguf
from tests.support.pipes.random_models import tiny
from tests.support.pipes.walking import load_all

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights import gguf as ours
from penstock.workloads.pipes.weights.source import open_source


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")[0]


@pytest.fixture(scope="module")
def whole(model: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def refused(file: Path) -> LlmFailure:
    with pytest.raises(LlmFailure) as caught:
        load_all(open_source(file))
    assert file.name in caught.value.message
    return caught.value


@settings(max_examples=60)
@given(data=st.data())
def test_a_file_cut_off_anywhere_is_refused(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("cut") / "m.gguf"
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert refused(file).code is LlmCode.MODEL_INVALID


@settings(max_examples=150)
@given(data=st.data())
def test_a_header_with_wrong_bytes_is_read_or_refused_but_never_crashes(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = whole.index(b"output.weight") + 40
    at = data.draw(st.integers(0, header - 8))
    wrong = data.draw(st.binary(min_size=1, max_size=8))
    file = tmp_path_factory.mktemp("wrong") / "m.gguf"
    file.write_bytes(whole[:at] + wrong + whole[at + len(wrong) :])
    with suppress(LlmFailure):
        source = open_source(file)
        source.layer(0)
        source.ends()


def test_an_unknown_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(looks_like({"general.architecture": "mamba"}))
    failure = refused(file)
    assert failure.code is LlmCode.NOT_SUPPORTED
    assert "'mamba'" in failure.message
    assert "llama" in failure.message


def test_a_mixture_of_experts_is_refused_by_its_name(model: Any, tmp_path: Path) -> None:
    failure = refused(write_gguf(model, tmp_path / "m.gguf", facts={"*.expert_count": 8}))
    assert failure.code is LlmCode.NOT_SUPPORTED
    assert "mixture of experts" in failure.message


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("*.block_count", "lacks llama.block_count"),
        ("*.attention.head_count", "lacks llama.attention.head_count"),
        ("*.attention.layer_norm_rms_epsilon", "lacks llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_a_fact_that_is_missing_is_named(key: str, said: str, model: Any, tmp_path: Path) -> None:
    failure = refused(write_gguf(model, tmp_path / "m.gguf", facts={key: None}))
    assert failure.code is LlmCode.MODEL_INVALID
    assert said in failure.message


def test_a_tensor_that_is_missing_is_named_with_its_layer(model: Any, tmp_path: Path) -> None:
    failure = refused(write_gguf(model, tmp_path / "m.gguf", without=("blk.3.attn_k",)))
    assert failure.code is LlmCode.MODEL_INVALID
    assert "layer 3 lacks self_attn.k_proj.weight" in failure.message


def test_a_tensor_of_another_size_than_the_facts_say_is_named(model: Any, tmp_path: Path) -> None:
    wider = {"blk.2.ffn_up.weight": numpy.zeros((64, 32), dtype=numpy.float32)}
    failure = refused(write_gguf(model, tmp_path / "m.gguf", tensors=wider))
    assert failure.code is LlmCode.MODEL_INVALID
    assert "mlp.up_proj.weight of layer 2 is [64, 32], not [48, 32]" in failure.message


def test_an_end_that_is_missing_is_named(model: Any, tmp_path: Path) -> None:
    failure = refused(write_gguf(model, tmp_path / "m.gguf", without=("output_norm",)))
    assert "the end model lacks model.norm.weight" in failure.message


def test_a_tensor_that_the_family_does_not_know_is_not_passed_over(
    model: Any, tmp_path: Path
) -> None:
    extra = {"blk.0.attn_sinks.weight": numpy.zeros(4, dtype=numpy.float32)}
    layer = open_source(write_gguf(model, tmp_path / "m.gguf", tensors=extra)).layer(0)
    assert "attn_sinks.weight" in layer


def test_a_type_of_quantisation_that_cant_be_read_is_named_before_anything_is_loaded(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(model, tmp_path / "m.gguf", kinds={"ffn_up": GGMLQuantizationType.Q8_0})

    def unknown(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(ours, "dequantize", unknown)
    with pytest.raises(LlmFailure, match=r"NOT_SUPPORTED: .*tensors of the type Q8_0"):
        open_source(file)


@pytest.mark.parametrize("layers", [1 << 31, 10_001])
def test_more_layers_than_any_model_has_are_refused_before_they_are_counted(
    layers: int, model: Any, tmp_path: Path
) -> None:
    failure = refused(write_gguf(model, tmp_path / "m.gguf", facts={"*.block_count": layers}))
    assert f"has {layers} as llama.block_count" in failure.message


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "claims 1099511627776 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "cut off"),
        (b"PK\x03\x04" + bytes(40), "does not begin as one"),
        (b"", "does not begin as one"),
    ],
)
def test_what_is_no_gguf_is_told_so(start: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(start)
    assert said in refused(file).message


def test_a_part_that_is_missing_is_named(model: Any, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "m.gguf", largest=20)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    second.unlink()
    with pytest.raises(LlmFailure, match=rf"MODEL_NOT_FOUND: .*{second.name} does not exist"):
        open_source(first)


def test_a_layer_that_the_model_does_not_have_is_refused(model: Any, tmp_path: Path) -> None:
    source = open_source(write_gguf(model, tmp_path / "m.gguf"))
    for n in (-1, 5):
        with pytest.raises(LlmFailure, match="has layers 0 to 4"):
            source.layer(n)


def test_every_tensor_of_the_tiny_model_is_written(model: Any) -> None:
    assert len(converted(model)) == 5 * 9 + 3
