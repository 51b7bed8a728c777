"""Which file of a repository is meant."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidRequest, NotFound
from penstock.workloads.llm.models.choosing import Remote, choose, projector_among


def remotes(*paths: str) -> list[Remote]:
    return [Remote(path=path, size=1) for path in paths]


SEVERAL = remotes("README.md", "m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-f16.gguf")


def test_the_only_model_is_meant() -> None:
    assert choose("a/b", "", remotes("x.txt", "m.gguf", "mmproj-m.gguf")).path == "m.gguf"


@pytest.mark.parametrize(
    ("wanted", "path"),
    [("Q4_K_M", "m-Q4_K_M.gguf"), ("q8_0", "m-Q8_0.gguf"), ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf")],
)
def test_it_is_chosen_by_how_it_is_stored_or_by_its_name(wanted: str, path: str) -> None:
    assert choose("a/b", wanted, SEVERAL).path == path


def test_a_file_in_a_folder_is_chosen_by_its_last_name() -> None:
    files = remotes("q4/m.gguf", "q8/n.gguf")
    assert choose("a/b", "n.gguf", files).path == "q8/n.gguf"
    assert choose("a/b", "q4/m.gguf", files).path == "q4/m.gguf"


def test_of_several_one_has_to_be_said() -> None:
    with pytest.raises(InvalidRequest, match="has 3 that may be meant") as unclear:
        choose("a/b", "", SEVERAL)
    assert "m-Q4_K_M.gguf, m-Q4_K_S.gguf, m-Q8_0.gguf" in unclear.value.hint


@pytest.mark.parametrize("wanted", ["Q4_K", "Q2_K", "none.gguf", "K_M"])
def test_what_there_is_not_is_not_found_and_what_there_is_is_named(wanted: str) -> None:
    with pytest.raises(NotFound, match=f"a/b has no {wanted}") as missing:
        choose("a/b", wanted, SEVERAL)
    assert "m-Q8_0.gguf" in missing.value.hint


def test_a_repository_without_models_is_told() -> None:
    with pytest.raises(NotFound, match="a/b has no GGUF file"):
        choose("a/b", "", remotes("model.safetensors", "mmproj.gguf"))


def test_a_model_in_parts_is_told() -> None:
    parts = remotes("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    with pytest.raises(InvalidRequest, match="in several parts"):
        choose("a/b", "", parts)
    with pytest.raises(InvalidRequest, match="in several parts"):
        choose("a/b", "m-00001-of-00002.gguf", parts)
    assert choose("a/b", "", [*parts, *remotes("n.gguf")]).path == "n.gguf"


def test_the_middle_precision_of_projectors_is_taken() -> None:
    files = remotes("mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "m.gguf")
    found = projector_among(files)
    assert found is not None
    assert found.path == "mmproj-F16.gguf"
    assert projector_among(remotes("m.gguf")) is None
    other = projector_among(remotes("mmproj-x.gguf"))
    assert other is not None
    assert other.path == "mmproj-x.gguf"
