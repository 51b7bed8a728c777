"""A folder of Hugging Face: whole, in shards, nested, tied; and what is refused."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.support.pipes.files import change_json, write_folder
from tests.support.pipes.random_models import FAMILIES, tiny
from tests.support.pipes.walking import ends_of, load_all

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.source import open_source


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    return write_folder(tiny("llama")[0], tmp_path_factory.mktemp("saved") / "m", words=False)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def refused(folder: Path) -> LlmFailure:
    with pytest.raises(LlmFailure) as caught:
        load_all(open_source(folder))
    assert str(folder) in caught.value.message
    return caught.value


def rewrite(file: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(file) | changes
    save_file({name: one for name, one in tensors.items() if one is not None}, file)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_saved_it(family: str, tmp_path: Path) -> None:
    model, original = tiny(family)
    source = open_source(write_folder(model, tmp_path / family, words=False))
    for n in range(5):
        same(source.layer(n), original.layer(n))
    same(source.ends(), original.ends())


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    model, original = tiny("qwen3")
    folder = write_folder(model, tmp_path / "m", words=False, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    source = open_source(folder)
    for n in range(5):
        same(source.layer(n), original.layer(n))
    same(source.ends(), original.ends())


def test_shards_with_other_layers_need_not_be_there(tmp_path: Path) -> None:
    model, original = tiny("llama")
    folder = write_folder(model, tmp_path / "m", words=False, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith("model.layers.2.")}
    for file in folder.glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    source = open_source(folder)
    same(source.layer(2), original.layer(2))
    with pytest.raises(LlmFailure, match=r"MODEL_NOT_FOUND: .*\.safetensors does not exist"):
        source.layer(4)


def test_its_size_is_told_as_stored(folder: Path) -> None:
    assert open_source(folder).size == pytest.approx(tiny("llama")[1].size, rel=0.1)


def test_precision_is_the_files(tmp_path: Path) -> None:
    model, _ = tiny("llama")
    source = open_source(write_folder(model.to(torch.bfloat16), tmp_path / "m", words=False))
    assert {one.dtype for one in source.layer(0).values()} == {torch.bfloat16}


def test_tensors_belong_to_the_caller(folder: Path) -> None:
    source = open_source(folder)
    before = (folder / "model.safetensors").read_bytes()
    source.layer(0)["mlp.up_proj.weight"].zero_()
    assert source.layer(0)["mlp.up_proj.weight"].any()
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_of_a_model_that_also_sees_only_the_language_model_is_read(
    prefix: str, head: str, folder: Path
) -> None:
    _, original = tiny("llama")
    renamed = {
        (head if name.startswith("lm_head") else prefix + name.removeprefix("model.")): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    seeing = {"vision_tower.layers.0.mlp.up_proj.weight": torch.zeros(3)}
    save_file(renamed | seeing, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "llava", "architectures": ["Llava"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    source = open_source(folder)
    assert source.config["model_type"] == "llama"
    same(source.layer(0), original.layer(0))
    same(source.ends(), original.ends())


def test_a_head_that_is_said_to_be_the_embedding_is_it_unless_there_is_another(
    folder: Path,
) -> None:
    """As transformers takes it."""
    change_json(folder / "config.json", tie_word_embeddings=True)
    model: Any = ends_of(open_source(folder)).model
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    rewrite(folder / "model.safetensors", **{"lm_head.weight": None})
    model = ends_of(open_source(folder)).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_how_to_generate_is_told_if_the_folder_says_it(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2]}')
    assert open_source(folder).generation == {"temperature": 0.6, "eos_token_id": [1, 2]}
    (folder / "generation_config.json").unlink()
    assert open_source(folder).generation == {}


def test_the_tokenizer_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    source = open_source(write_folder(tiny("llama")[0], tmp_path / "m"))
    assert source.tokenizer()("w5 w7")["input_ids"] == [5, 7]


# -- refused --------------------------------------------------------------------------------


def test_a_folder_without_a_tokenizer_says_so_when_it_is_asked_for_one(folder: Path) -> None:
    with pytest.raises(LlmFailure, match=r"MODEL_INVALID: .*has no tokenizer"):
        open_source(folder).tokenizer()


def test_a_tensor_that_is_missing_is_named_with_its_layer(folder: Path) -> None:
    rewrite(folder / "model.safetensors", **{"model.layers.3.mlp.up_proj.weight": None})
    assert "layer 3 lacks mlp.up_proj.weight" in refused(folder).message


def test_a_tensor_of_another_size_than_the_config_says_is_named(folder: Path) -> None:
    rewrite(
        folder / "model.safetensors",
        **{"model.layers.1.self_attn.q_proj.weight": torch.zeros(3, 3)},
    )
    failure = refused(folder)
    assert failure.code is LlmCode.MODEL_INVALID
    assert "self_attn.q_proj.weight of layer 1 is [3, 3], not [32, 32]" in failure.message


def test_a_head_that_is_missing_is_named(folder: Path) -> None:
    rewrite(folder / "model.safetensors", **{"lm_head.weight": None})
    assert "the end model lacks lm_head.weight" in refused(folder).message


def test_a_config_for_more_layers_than_there_are_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", num_hidden_layers=6)
    assert "has no tensors of a language model of 6 layers" in refused(folder).message


@pytest.mark.parametrize("changes", [{"model_type": None}, {"model_type": ""}, {"model_type": 7}])
def test_a_config_without_an_architecture_is_refused(changes: Any, folder: Path) -> None:
    change_json(folder / "config.json", **changes)
    failure = refused(folder)
    assert failure.code is LlmCode.MODEL_INVALID
    assert "does not say what architecture" in failure.message


def test_an_architecture_that_cant_be_split_is_refused_by_its_name_before_weights_are_opened(
    folder: Path,
) -> None:
    change_json(folder / "config.json", model_type="mamba", architectures=["MambaForCausalLM"])
    (folder / "model.safetensors").write_bytes(b"")
    failure = refused(folder)
    assert failure.code is LlmCode.NOT_SUPPORTED
    assert "MambaForCausalLM" in failure.message


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"num_hidden_layers": -4},
        {"num_hidden_layers": 1_000_000_000},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 0, "head_dim": None},
        {"rope_parameters": [1, 2]},
        {"layer_types": ["full_attention"]},
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: Any, folder: Path) -> None:
    change_json(folder / "config.json", **changes)
    assert refused(folder).code is LlmCode.MODEL_INVALID


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "\xff\xfe", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert refused(folder).code is LlmCode.MODEL_INVALID


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    failure = refused(folder)
    assert failure.code is LlmCode.MODEL_NOT_FOUND
    assert "config.json" in failure.message


def test_weights_that_are_quantised_another_way_are_refused_by_its_name(folder: Path) -> None:
    change_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    failure = refused(folder)
    assert failure.code is LlmCode.NOT_SUPPORTED
    assert "quantised" in failure.message


def test_weights_of_eight_bits_are_refused_by_their_type(folder: Path) -> None:
    small = torch.zeros(48, 32).to(torch.float8_e4m3fn)
    rewrite(folder / "model.safetensors", **{"model.layers.0.mlp.up_proj.weight": small})
    failure = refused(folder)
    assert failure.code is LlmCode.NOT_SUPPORTED
    assert "float8_e4m3fn" in failure.message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_unopened(name: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"not even a pickle")
    for path in (folder, folder / name):
        with pytest.raises(LlmFailure, match=r"NOT_SUPPORTED: .*pickle.* can run code"):
            open_source(path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_that_points_out_of_its_folder_is_refused(file: Any, folder: Path) -> None:
    index = {"weight_map": {"model.layers.0.mlp.up_proj.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names a file outside of its folder" in refused(folder).message


def test_an_index_that_is_wrong_about_a_file_is_refused(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    rewrite(folder / "model.safetensors", **{"model.layers.0.mlp.up_proj.weight": None})
    assert "which the index says is in it" in refused(folder).message


def test_a_path_with_no_model_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.gguf"):
        with pytest.raises(LlmFailure) as caught:
            open_source(path)
        assert caught.value.code is LlmCode.MODEL_NOT_FOUND


def test_one_safetensors_file_asks_for_its_folder(folder: Path) -> None:
    with pytest.raises(LlmFailure, match="its folder is needed"):
        open_source(folder / "model.safetensors")


@settings(max_examples=40)
@given(data=st.data())
def test_a_file_cut_off_anywhere_is_refused(
    data: st.DataObject, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path_factory.mktemp("cut") / "m"))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert refused(folder).code is LlmCode.MODEL_INVALID


@settings(max_examples=80)
@given(data=st.data())
def test_a_header_with_wrong_bytes_is_read_or_refused_but_never_crashes(
    data: st.DataObject, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path_factory.mktemp("wrong") / "m"))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    at = data.draw(st.integers(0, int.from_bytes(whole[:8], "little")))
    wrong = data.draw(st.binary(min_size=1, max_size=8))
    file.write_bytes(whole[:at] + wrong + whole[at + len(wrong) :])
    with suppress(LlmFailure):
        source = open_source(folder)
        source.layer(0)
        source.ends()
