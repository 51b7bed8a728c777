"""Models in a folder: found, added, removed."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest
from tests.models import gguf

from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    NotFound,
    StoreFailed,
    StoreFull,
)
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.models.served import served
from penstock.workloads.llm.models.shelf import ModelShelf
from penstock.workloads.llm.models.staging import staging
from penstock.workloads.llm.values import LlmCode, LlmFailure


@pytest.fixture
def shelf(tmp_path: Path) -> ModelShelf:
    return ModelShelf(tmp_path / "shelf")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "Source-1B-Q4_0.gguf")


def made(file: Path, **metadata: int | str) -> Path:
    file.write_bytes(gguf(metadata))
    return file


def names(shelf: ModelShelf) -> list[str]:
    return [one.name for one in shelf.list()]


def files(shelf: ModelShelf) -> set[str]:
    return set(os.listdir(shelf.folder)) - {".lock"}


def test_a_shelf_that_is_not_there_is_empty(shelf: ModelShelf) -> None:
    assert shelf.list() == []
    assert shelf.unfit() == []
    assert not shelf.folder.exists()


def test_what_was_added_is_listed_with_where_it_came_from(shelf: ModelShelf, source: Path) -> None:
    facts = shelf.add(source)

    assert facts.name == "Source-1B-Q4_0"
    assert names(shelf) == ["Source-1B-Q4_0"]
    record = shelf.record("Source-1B-Q4_0")
    assert record is not None
    assert record.source == str(source)
    assert record.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert record.size == source.stat().st_size
    assert files(shelf) == {"Source-1B-Q4_0.gguf", "Source-1B-Q4_0.json"}


def test_a_file_of_the_same_disk_is_linked(shelf: ModelShelf, source: Path) -> None:
    assert os.path.samefile(shelf.add(source).path, source)
    source.unlink()
    assert names(shelf) == ["Source-1B-Q4_0"]


def test_a_link_is_followed(shelf: ModelShelf, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(source)
    added = Path(shelf.add(tmp_path / "link.gguf").path)
    assert added.name == "link.gguf"
    assert not added.is_symlink()


def test_a_file_that_can_t_be_linked_is_copied(
    shelf: ModelShelf, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _refuse)
    told: list[tuple[str, int, int]] = []
    added = Path(shelf.add(source, told=lambda *said: told.append(said)).path)

    assert not os.path.samefile(added, source)
    assert added.read_bytes() == source.read_bytes()
    size = source.stat().st_size
    assert told == [("copying", size, size), ("checking", size, size)]


def _refuse(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_the_same_file_may_be_added_again(shelf: ModelShelf, source: Path) -> None:
    assert shelf.add(source) == shelf.add(source)
    assert len(shelf.list()) == 1


def test_a_name_that_another_file_has_is_taken(
    shelf: ModelShelf, source: Path, tmp_path: Path
) -> None:
    shelf.add(source, "mine")
    with pytest.raises(Conflict, match="another model 'mine'") as taken:
        shelf.add(made(tmp_path / "other.gguf", extra=1), "mine")
    assert "rm mine" in taken.value.hint
    assert files(shelf) == {"mine.gguf", "mine.json"}


@pytest.mark.parametrize(
    "name", ["a b", "../up", "a/b", ".hidden", "a..b", "x" * 121, "mmproj-a", "a\0"], ids=range(8)
)
def test_a_name_that_is_none_is_refused(name: str, shelf: ModelShelf, source: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be called"):
        shelf.add(source, name)
    assert not shelf.folder.exists()


def test_what_is_no_whole_model_is_not_added(shelf: ModelShelf, source: Path) -> None:
    source.write_bytes(gguf()[:-1])
    with pytest.raises(LlmFailure) as refused:
        shelf.add(source)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert not shelf.folder.exists()


def test_a_source_that_shrinks_while_it_is_copied_is_not_added(
    shelf: ModelShelf, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(*_: object) -> None:
        source.write_bytes(gguf()[:-1])
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", shrink)
    with pytest.raises(LlmFailure, match="cut off"):
        shelf.add(source)
    assert files(shelf) == set()


def test_a_projector_belongs_to_its_model(shelf: ModelShelf, source: Path, tmp_path: Path) -> None:
    eyes = made(tmp_path / "eyes.gguf", **{"general.architecture": "clip"})

    assert shelf.add(source, "seer", projector=eyes).vision
    assert files(shelf) == {"seer.gguf", "seer.json", "mmproj-seer.gguf"}
    assert names(shelf) == ["seer"]
    shelf.remove("seer")
    assert files(shelf) == set()


def test_a_projector_may_come_later(shelf: ModelShelf, source: Path, tmp_path: Path) -> None:
    eyes = made(tmp_path / "eyes.gguf", **{"general.architecture": "clip"})
    assert not shelf.add(source, "seer").vision
    assert shelf.add(source, "seer", projector=eyes).vision
    assert shelf.find("seer").vision


def test_a_projector_is_not_added_as_a_model(shelf: ModelShelf, source: Path) -> None:
    eyes = made(source, **{"general.architecture": "clip"})
    with pytest.raises(InvalidRequest, match="is a projector"):
        shelf.add(eyes)


def test_a_model_is_no_projector(shelf: ModelShelf, source: Path) -> None:
    with pytest.raises(InvalidRequest, match="is no projector"):
        shelf.add(source, projector=source)


def test_files_put_there_by_hand_count_if_they_are_whole(shelf: ModelShelf) -> None:
    shelf.folder.mkdir()
    made(shelf.folder / "by-hand.gguf")
    made(shelf.folder / "two words.gguf")
    made(shelf.folder / "eyes.gguf", **{"general.architecture": "clip"})
    (shelf.folder / "half.gguf").write_bytes(gguf()[:-9])
    (shelf.folder / ".hidden.gguf").write_bytes(gguf())
    (shelf.folder / "notes.txt").write_text("hello")

    assert names(shelf) == ["by-hand"]
    assert shelf.record("by-hand") is None
    assert [one.file for one in shelf.unfit()] == ["eyes.gguf", "half.gguf", "two words.gguf"]
    assert "cut off" in shelf.unfit()[1].problem


def test_a_record_that_is_damaged_counts_as_none(shelf: ModelShelf, source: Path) -> None:
    shelf.add(source, "mine")
    (shelf.folder / "mine.json").write_text("{")
    assert shelf.record("mine") is None
    assert names(shelf) == ["mine"]
    shelf.add(source, "mine")


class TestFind:
    @pytest.fixture(autouse=True)
    def _models(self, shelf: ModelShelf, tmp_path: Path) -> None:
        for number, name in enumerate(("Qwen-7B", "Qwen-70B", "SmolLM2")):
            shelf.add(made(tmp_path / "x.gguf", number=number), name)
            (tmp_path / "x.gguf").unlink()

    def test_by_its_exact_name_before_all(self, shelf: ModelShelf) -> None:
        assert shelf.find("Qwen-7B").name == "Qwen-7B"

    def test_by_a_part_of_its_name_ignoring_case(self, shelf: ModelShelf) -> None:
        assert shelf.find("smol").name == "SmolLM2"
        assert shelf.find("70b").name == "Qwen-70B"
        assert shelf.find("SmolLM2.gguf").name == "SmolLM2"

    def test_by_its_path(self, shelf: ModelShelf, source: Path) -> None:
        assert shelf.find(str(source)).path == str(source)

    def test_not_when_several_have_it(self, shelf: ModelShelf) -> None:
        with pytest.raises(InvalidRequest, match="may be Qwen-70B or Qwen-7B"):
            shelf.find("qwen")

    def test_not_when_none_has_it_but_near_ones_are_named(self, shelf: ModelShelf) -> None:
        with pytest.raises(NotFound) as missing:
            shelf.find("SmallLM2")
        assert "SmolLM2" in missing.value.hint

    @pytest.mark.parametrize(
        "name", ["", "/", "..", "a\0b", "x" * 5000, "none/at/all.gguf"], ids=range(6)
    )
    def test_not_what_no_model_can_be_called(self, name: str, shelf: ModelShelf) -> None:
        with pytest.raises(NotFound):
            shelf.find(name)

    def test_a_damaged_one_is_said_to_be(self, shelf: ModelShelf) -> None:
        (shelf.folder / "SmolLM2.gguf").unlink()
        (shelf.folder / "SmolLM2.gguf").write_bytes(b"GGUF")
        with pytest.raises(LlmFailure) as damaged:
            shelf.find("SmolLM2")
        assert damaged.value.code is LlmCode.MODEL_INVALID


def test_only_a_whole_name_is_removed(shelf: ModelShelf, source: Path) -> None:
    shelf.add(source, "mine")
    for name in ("min", "MINE", "../mine", str(shelf.folder / "mine.gguf"), "mine.gguf"):
        with pytest.raises(NotFound):
            shelf.remove(name)
    shelf.remove("mine")
    assert files(shelf) == set()


def test_a_shelf_that_can_t_be_written_to_is_told(shelf: ModelShelf, source: Path) -> None:
    shelf.folder.write_text("I am a file")
    with pytest.raises(StoreFailed, match="can't write to"):
        shelf.add(source)


def test_a_full_disk_is_told_and_leaves_nothing(
    shelf: ModelShelf, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="no space left"):
        shelf.add(source)
    assert files(shelf) == set()


def test_what_a_dead_program_left_is_removed_and_what_a_live_one_makes_is_not(
    shelf: ModelShelf, source: Path
) -> None:
    shelf.folder.mkdir()
    (shelf.folder / ".new-dead").mkdir()
    (shelf.folder / ".new-dead" / "x.gguf").write_bytes(gguf())
    with staging(shelf.folder) as live:
        shelf.add(source)
        assert live.is_dir()
    assert files(shelf) == {"Source-1B-Q4_0.gguf", "Source-1B-Q4_0.json"}


def test_unfinished_downloads_are_forgotten(shelf: ModelShelf) -> None:
    shelf.unfinished.mkdir(parents=True)
    (shelf.unfinished / "abc.part").write_bytes(bytes(100))
    assert shelf.forget_unfinished() == 100
    assert shelf.forget_unfinished() == 0


def test_many_who_add_the_same_name_at_once_agree(shelf: ModelShelf, tmp_path: Path) -> None:
    sources = [made(tmp_path / f"{n}.gguf", number=n) for n in range(8)]
    conflicts: list[Conflict] = []

    def add(source: Path) -> None:
        try:
            shelf.add(source, "one")
        except Conflict as conflict:
            conflicts.append(conflict)

    threads = [threading.Thread(target=add, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conflicts) == 7
    record = shelf.record("one")
    assert record is not None
    whole = (shelf.folder / "one.gguf").read_bytes()
    assert record.sha256 == hashlib.sha256(whole).hexdigest()
    assert files(shelf) == {"one.gguf", "one.json"}


def test_two_files_of_one_name_are_not_served_together(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        made(tmp_path / folder / "same.gguf")
    one, other = str(tmp_path / "a" / "same.gguf"), str(tmp_path / "b" / "same.gguf")
    (tmp_path / "again").symlink_to(tmp_path / "a")
    again = str(tmp_path / "again" / "same.gguf")
    assert [model.path for model in served(ModelConfig(models=(one, again)))] == [one]
    with pytest.raises(Misconfigured, match=r"a/same.gguf and .*b/same.gguf"):
        served(ModelConfig(models=(one, other)))
