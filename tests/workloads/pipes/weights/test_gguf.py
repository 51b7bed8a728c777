"""What is in a GGUF is what transformers would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests.support.pipes.files import ARCHITECTURES, PLAIN, write_gguf
from tests.support.pipes.random_models import RandomSource, tiny
from tests.support.pipes.walking import Split
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from penstock.workloads.pipes.model.architecture import Architecture
from penstock.workloads.pipes.weights import gguf as ours
from penstock.workloads.pipes.weights.gguf_config import FAMILIES
from penstock.workloads.pipes.weights.source import open_source

PROMPT = [5, 17, 40, 3, 88, 21, 9, 60, 33, 71, 12, 50]
KNOWN_TO_TRANSFORMERS = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")


def model_of(family: str) -> tuple[Any, RandomSource]:
    return tiny(family, **PLAIN.get(family, {}))


def near(found: Any, expected: Any, family: str) -> None:
    """The same numbers; a one that was added and taken away again costs the last digits."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        close = 1e-6 if family.startswith("gemma") and "norm" in name else 0.0
        torch.testing.assert_close(tensor, expected[name], rtol=close, atol=close)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_tensor_of_a_family_comes_back_as_it_was_converted(
    family: str, tmp_path: Path
) -> None:
    model, original = model_of(family)
    source = open_source(write_gguf(model, tmp_path / "model.gguf"))
    for n in range(5):
        near(source.layer(n), original.layer(n), family)
    near(source.ends(), original.ends(), family)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_family_computes_what_it_computed_before_it_was_converted(
    family: str, tmp_path: Path
) -> None:
    model, _ = model_of(family)
    split = Split(open_source(write_gguf(model, tmp_path / "model.gguf")), (2,))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    found = split.step((split.job(), PROMPT, 0))[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", KNOWN_TO_TRANSFORMERS)
def test_quantised_tensors_equal_what_transformers_makes_of_them(
    family: str, tmp_path: Path
) -> None:
    model, _ = model_of(family)
    kinds = {"attn_q": Kind.Q8_0, "ffn_gate": Kind.Q4_0, "attn_output": Kind.F16}
    kinds = {part + ".weight": kind for part, kind in kinds.items()}
    file = write_gguf(model, tmp_path / "model.gguf", kinds=kinds)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=skeleton)["tensors"]
    source = open_source(file)
    for n in range(5):
        prefix = f"model.layers.{n}."
        mine = {f"{prefix}{name}": tensor for name, tensor in source.layer(n).items()}
        layer = {name: tensor for name, tensor in theirs.items() if name.startswith(prefix)}
        assert mine.keys() == layer.keys()
        for name, tensor in mine.items():
            assert torch.equal(tensor.to(torch.float32), layer[name]), name


def test_names_are_those_of_ggufs_table() -> None:
    for family, arch in ARCHITECTURES.items():
        number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
        table = gguf.get_tensor_name_map(number, 1)
        _, original = model_of(family)
        names = ours.NAMES.get(arch, ours.NAMES[""])
        for name in {name.rpartition(".")[0] for name in original.layer(0)}:
            theirs = str(table.get_name(f"model.layers.0.{name}")).removeprefix("blk.0.")
            assert names[theirs] == name
    assert set(ARCHITECTURES.values()) == set(FAMILIES)


def test_plain_floats_keep_their_precision(tmp_path: Path) -> None:
    model, original = model_of("llama")
    kinds = {"attn_v": Kind.F16, "ffn_up": Kind.BF16}
    layer = open_source(write_gguf(model, tmp_path / "m.gguf", kinds=kinds)).layer(1)
    for name, dtype in (("self_attn.v", torch.float16), ("mlp.up", torch.bfloat16)):
        tensor = layer[f"{name}_proj.weight"]
        assert tensor.dtype is dtype
        assert torch.equal(tensor, original.layer(1)[f"{name}_proj.weight"].to(dtype))


def test_large_tensors_are_made_piece_by_piece_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = model_of("llama")
    file = write_gguf(model, tmp_path / "m.gguf", kinds={"ffn_gate.weight": Kind.Q8_0})
    whole = open_source(file).layer(0)["mlp.gate_proj.weight"]
    monkeypatch.setattr(ours, "_PIECE", 7 * 32)  # of 48 blocks: the last is a smaller one
    assert torch.equal(open_source(file).layer(0)["mlp.gate_proj.weight"], whole)


def test_its_size_is_told_as_stored(tmp_path: Path) -> None:
    model, original = model_of("llama")
    source = open_source(write_gguf(model, tmp_path / "m.gguf", kinds={"attn_q": Kind.F16}))
    assert source.size == original.size - 5 * 2 * 32 * 32


@pytest.mark.parametrize("named", [0, 2])
def test_a_model_in_several_files_is_read_from_whichever_was_named(
    named: int, tmp_path: Path
) -> None:
    model, original = model_of("qwen2")
    write_gguf(model, tmp_path / "m.gguf", largest=20)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    source = open_source(files[named])
    near(source.layer(4), original.layer(4), "qwen2")
    near(source.ends(), original.ends(), "qwen2")


def test_ends_of_a_turn_are_told_beside_the_end_of_the_text(tmp_path: Path) -> None:
    model, _ = model_of("llama")
    facts = {"tokenizer.ggml.eot_token_id": 7}
    source = open_source(write_gguf(model, tmp_path / "m.gguf", facts=facts))
    assert source.generation["eos_token_id"] == [2, 7]


# -- positions ----------------------------------------------------------------------------


def llama3_factors(head: int, theta: float, factor: float) -> numpy.ndarray:
    """As llama.cpp's converter writes them."""
    low, high, original = 1.0, 4.0, 8192
    waves = 2 * numpy.pi * theta ** (numpy.arange(0, head, 2) / head)
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    found = numpy.where(
        waves < original / high, 1.0, numpy.where(waves > original, factor, between)
    )
    return found.astype(numpy.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_factors_are_read_as_the_rule_that_made_them(
    factor: float, tmp_path: Path
) -> None:
    model, _ = tiny(
        "llama", head_dim=64, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    tensors = {"rope_freqs.weight": llama3_factors(64, 5e5, factor)}
    source = open_source(write_gguf(model, tmp_path / "m.gguf", tensors=tensors))
    assert source.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_factors_of_another_rule_are_refused_and_not_passed_over(tmp_path: Path) -> None:
    model, _ = model_of("llama")
    tensors = {"rope_freqs.weight": numpy.array([1, 3, 2, 8], dtype=numpy.float32)}
    file = write_gguf(model, tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(Exception, match=r"NOT_SUPPORTED: .*m\.gguf scales its positions"):
        open_source(file)


def test_long_factors_of_phi_3_are_read(tmp_path: Path) -> None:
    model, _ = model_of("phi3")
    short = numpy.array([1, 1.5, 2, 2.5], dtype=numpy.float32)
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": short * 2}
    facts = {"*.rope.scaling.original_context_length": 64}
    config = open_source(
        write_gguf(model, tmp_path / "m.gguf", tensors=tensors, facts=facts)
    ).config
    assert config["rope_scaling"]["short_factor"] == [1, 1.5, 2, 2.5]
    assert config["rope_scaling"]["long_factor"] == [2, 3, 4, 5]
    assert Architecture(config).max_positions == 64


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    model, _ = model_of("gemma3_text")
    facts = {"*.rope.scaling.type": "linear", "*.rope.scaling.factor": 8.0}
    config = open_source(write_gguf(model, tmp_path / "m.gguf", facts=facts)).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    rotations = Architecture(config).config.rope_parameters
    assert rotations["full_attention"]["rope_type"] == "linear"
    assert rotations["sliding_attention"]["rope_type"] == "default"


def test_yarn_is_read(tmp_path: Path) -> None:
    model, _ = model_of("qwen3")
    facts = {
        "*.rope.scaling.type": "yarn",
        "*.rope.scaling.factor": 4.0,
        "*.rope.scaling.original_context_length": 64,
    }
    config = open_source(write_gguf(model, tmp_path / "m.gguf", facts=facts)).config
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def test_numbers_are_as_people_write_them(tmp_path: Path) -> None:
    model, _ = tiny("llama", rms_norm_eps=1e-5)
    config = open_source(write_gguf(model, tmp_path / "m.gguf")).config
    assert config["rms_norm_eps"] == 1e-05  # and not the 9.999999747e-06 of a float32
