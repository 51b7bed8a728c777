"""Which file of a repository is meant."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidRequest, NotFound
from penstock.models.download import Remote
from penstock.models.pull import choose, projector_among


def remotes(*paths: str) -> list[Remote]:
    return [Remote(path=path, size=1) for path in paths]


def chosen(repository: str, wanted: str, files: list[Remote]) -> list[str]:
    return [one.path for one in choose(repository, wanted, files)]


SEVERAL = remotes("README.md", "m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-f16.gguf")


def test_the_only_model_is_meant() -> None:
    assert chosen("a/b", "", remotes("x.txt", "m.gguf", "mmproj-m.gguf")) == ["m.gguf"]


@pytest.mark.parametrize(
    ("wanted", "path"),
    [("Q4_K_M", "m-Q4_K_M.gguf"), ("q8_0", "m-Q8_0.gguf"), ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf")],
)
def test_it_is_chosen_by_how_it_is_stored_or_by_its_name(wanted: str, path: str) -> None:
    assert chosen("a/b", wanted, SEVERAL) == [path]


def test_a_file_in_a_folder_is_chosen_by_its_last_name() -> None:
    files = remotes("q4/m.gguf", "q8/n.gguf")
    assert chosen("a/b", "n.gguf", files) == ["q8/n.gguf"]
    assert chosen("a/b", "q4/m.gguf", files) == ["q4/m.gguf"]


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


def test_all_parts_of_a_split_model_are_chosen_in_order() -> None:
    parts = remotes("q8/m-00002-of-00002.gguf", "q8/m-00001-of-00002.gguf")
    whole = ["q8/m-00001-of-00002.gguf", "q8/m-00002-of-00002.gguf"]
    assert chosen("a/b", "", parts) == whole
    assert chosen("a/b", "m-00002-of-00002.gguf", [*parts, *remotes("n.gguf")]) == whole
    with pytest.raises(InvalidRequest, match="has 2 that may be meant"):
        choose("a/b", "", [*parts, *remotes("n.gguf")])


def test_a_split_model_that_lacks_a_part_is_not_found() -> None:
    with pytest.raises(NotFound, match=r"a/b lacks m-00002-of-00003\.gguf"):
        choose("a/b", "", remotes("m-00001-of-00003.gguf", "m-00003-of-00003.gguf"))


def test_the_middle_precision_of_projectors_is_taken() -> None:
    files = remotes("mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "m.gguf")
    found = projector_among(files)
    assert found is not None
    assert found.path == "mmproj-F16.gguf"
    assert projector_among(remotes("m.gguf")) is None
    other = projector_among(remotes("mmproj-x.gguf"))
    assert other is not None
    assert other.path == "mmproj-x.gguf"
