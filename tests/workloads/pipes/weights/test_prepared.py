"""A prepared folder has the same model in files of their own, or is not there at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.pipes.files import change_json, small_tokenizer
from tests.support.pipes.random_models import FAMILIES, RandomSource, tiny
from tests.support.pipes.walking import load_all

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.prepared import prepare
from penstock.workloads.pipes.weights.safetensors import INDEX
from penstock.workloads.pipes.weights.source import Source, fingerprint, open_source


class Worded(RandomSource):
    """A random model with words."""

    def tokenizer(self) -> Any:
        return small_tokenizer()


def source_of(family: str = "llama") -> Source:
    source = Worded(tiny(family)[0])
    source.generation = {"temperature": 0.5, "eos_token_id": [2]}
    return source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(source_of(), tmp_path / "Tiny")
    return tmp_path / "Tiny"


def refused(folder: Path) -> LlmFailure:
    with pytest.raises(LlmFailure) as caught:
        load_all(open_source(folder))
    assert str(folder) in caught.value.message
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same_after_it_was_prepared(family: str, tmp_path: Path) -> None:
    original = source_of(family)
    prepare(original, tmp_path / "m")
    found = open_source(tmp_path / "m")
    assert found.config == json.loads(json.dumps(original.config))
    for n in range(5):
        assert fingerprint(found.layer(n)) == fingerprint(original.layer(n))
    assert fingerprint(found.ends()) == fingerprint(original.ends())
    assert found.size == original.size
    assert found.generation == original.generation
    assert found.tokenizer()("w3 w4")["input_ids"] == [3, 4]


def test_the_index_has_the_file_of_every_tensor_and_the_fingerprint_of_every_layer(
    folder: Path,
) -> None:
    index = json.loads((folder / INDEX).read_text())
    original = source_of()
    for n in range(5):
        assert {file for name, file in index["weight_map"].items() if f".{n}." in name} == {
            f"layer-{n:03}.safetensors"
        }
    prints = tuple(fingerprint(original.layer(n)) for n in range(5))
    assert open_source(folder).fingerprints == prints


def test_precision_stays_as_it_is(tmp_path: Path) -> None:
    model = tiny("llama")[0].to(torch.bfloat16)
    prepare(Worded(model), tmp_path / "m")
    assert open_source(tmp_path / "m").layer(0)["mlp.up_proj.weight"].dtype is torch.bfloat16


def test_progress_is_told_for_each_part(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    prepare(source_of(), tmp_path / "m", lambda done, of: told.append((done, of)))
    assert told == [(n, 6) for n in range(7)]


def test_layers_are_read_without_the_ends_and_without_other_layers(folder: Path) -> None:
    wanted = {"config.json", INDEX, "layer-002.safetensors"}
    for file in [one for one in folder.iterdir() if one.name not in wanted]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    source = open_source(folder)
    assert fingerprint(source.layer(2)) == fingerprint(source_of().layer(2))
    for missing in (source.ends, lambda: source.layer(3)):
        with pytest.raises(LlmFailure, match=r"MODEL_NOT_FOUND: .*copy it from where"):
            missing()


def test_what_a_layer_node_needs_has_nothing_of_the_text(folder: Path) -> None:
    for file in (folder / "config.json", folder / INDEX, *folder.glob("layer-*.safetensors")):
        assert b"w95" not in file.read_bytes()
    for n in range(5):
        found = load_file(folder / f"layer-{n:03}.safetensors")
        assert found.keys() == {f"model.layers.{n}.{name}" for name in source_of().layer(n)}


class Failing(Worded):
    def layer(self, n: int) -> Any:
        if n == 3:
            raise OSError(28, "No space left on device")
        return super().layer(n)


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(LlmFailure, match=r"m can't be written: .*No space left"):
        prepare(Failing(tiny("llama")[0]), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupted(done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source_of(), tmp_path / "m", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_already_is_not_written_over(folder: Path) -> None:
    before = (folder / INDEX).read_bytes()
    with pytest.raises(LlmFailure, match="is there already"):
        prepare(source_of("qwen3"), folder)
    assert (folder / INDEX).read_bytes() == before


# -- refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 1}'])
def test_an_index_that_cant_be_read_is_refused(text: str, folder: Path) -> None:
    (folder / INDEX).write_text(text)
    assert refused(folder).code is LlmCode.MODEL_INVALID


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "ends/ends.safetensors"])
def test_an_index_cant_point_elsewhere(file: str, folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.layers.0.mlp.up_proj.weight"] = file
    (folder / INDEX).write_text(json.dumps(index))
    assert "outside of its folder" in refused(folder).message


def test_a_layer_of_the_wrong_size_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", intermediate_size=64)
    assert "mlp.down_proj.weight of layer 0 is [32, 48], not [32, 64]" in refused(folder).message


def test_a_layer_that_is_cut_off_is_refused(folder: Path) -> None:
    file = folder / "layer-000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    failure = refused(folder)
    assert failure.code is LlmCode.MODEL_INVALID
    assert "cut off" in failure.message
