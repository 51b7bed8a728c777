"""What a path is taken for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tests.support.pipes.files import write_gguf
from tests.support.pipes.random_models import tiny

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.weights.gguf import GgufSource
from penstock.workloads.pipes.weights.source import open_source


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama")[0]


def test_without_torch_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else real(name)
    )
    with pytest.raises(
        LlmFailure, match=r"torch missing: pip install 'penstock\[pipes\]'"
    ) as caught:
        open_source(tmp_path)
    assert caught.value.code is LlmCode.ENGINE_MISSING


def test_a_gguf_is_known_by_how_it_begins(model: Any, tmp_path: Path) -> None:
    file = write_gguf(model, tmp_path / "m.gguf").rename(tmp_path / "blob")
    assert isinstance(open_source(file), GgufSource)


def test_a_folder_with_one_gguf_is_that_gguf(model: Any, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "m.gguf")
    assert isinstance(open_source(tmp_path), GgufSource)


def test_a_folder_with_one_gguf_in_parts_is_that_gguf(model: Any, tmp_path: Path) -> None:
    write_gguf(model, tmp_path / "m.gguf", largest=20)
    assert isinstance(open_source(tmp_path), GgufSource)


def test_of_several_ggufs_one_has_to_be_named(model: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_gguf(model, tmp_path / f"{name}.gguf")
    with pytest.raises(LlmFailure, match="has 2 GGUF files: name one of them"):
        open_source(tmp_path)


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("GG")
    with pytest.raises(LlmFailure, match="neither a GGUF file nor a folder"):
        open_source(tmp_path / "notes.txt")
