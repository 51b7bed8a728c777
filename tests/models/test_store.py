"""Models in a folder: found, added, removed."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest
from tests.support.models import gguf

from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    Misconfigured,
    NotFound,
    StoreFailed,
    StoreFull,
)
from penstock.models.store import ModelStore, staging
from penstock.workloads.llm.values import LlmCode, LlmFailure


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return made(tmp_path / "Source-1B-Q4_0.gguf")


def made(file: Path, **metadata: int | str) -> Path:
    file.write_bytes(gguf(metadata))
    return file


def names(store: ModelStore) -> list[str]:
    return [one.name for one in store.list()]


def files(store: ModelStore) -> set[str]:
    return set(os.listdir(store.folder)) - {".lock"}


def test_a_store_that_is_not_there_is_empty(store: ModelStore) -> None:
    assert store.list() == []
    assert store.unusable() == []
    assert not store.folder.exists()


def test_what_was_added_is_listed_with_where_it_came_from(store: ModelStore, source: Path) -> None:
    facts = store.add(source)

    assert facts.name == "Source-1B-Q4_0"
    assert names(store) == ["Source-1B-Q4_0"]
    record = store.record("Source-1B-Q4_0")
    assert record is not None
    assert record.source == str(source)
    assert record.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert record.size == source.stat().st_size
    assert files(store) == {"Source-1B-Q4_0.gguf", "Source-1B-Q4_0.json"}


def test_a_file_of_the_same_disk_is_linked(store: ModelStore, source: Path) -> None:
    assert os.path.samefile(store.add(source).path, source)
    source.unlink()
    assert names(store) == ["Source-1B-Q4_0"]


def test_a_link_is_followed(store: ModelStore, source: Path, tmp_path: Path) -> None:
    (tmp_path / "link.gguf").symlink_to(source)
    added = Path(store.add(tmp_path / "link.gguf").path)
    assert added.name == "link.gguf"
    assert not added.is_symlink()


def test_a_file_that_can_t_be_linked_is_copied(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _refuse)
    told: list[tuple[str, int, int]] = []
    added = Path(store.add(source, progress=lambda *said: told.append(said)).path)

    assert not os.path.samefile(added, source)
    assert added.read_bytes() == source.read_bytes()
    size = source.stat().st_size
    assert told == [("copying", size, size), ("checking", size, size)]


def _refuse(*_: object) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def test_the_same_file_may_be_added_again(store: ModelStore, source: Path) -> None:
    assert store.add(source) == store.add(source)
    assert len(store.list()) == 1


def test_a_name_that_another_file_has_is_taken(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    store.add(source, "mine")
    with pytest.raises(Conflict, match="another model 'mine'") as taken:
        store.add(made(tmp_path / "other.gguf", extra=1), "mine")
    assert "model delete mine" in taken.value.hint
    assert files(store) == {"mine.gguf", "mine.json"}


@pytest.mark.parametrize(
    "name", ["a b", "../up", "a/b", ".hidden", "a..b", "x" * 121, "mmproj-a", "a\0"], ids=range(8)
)
def test_a_name_that_is_none_is_refused(name: str, store: ModelStore, source: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be called"):
        store.add(source, name)
    assert not store.folder.exists()


def test_what_is_no_whole_model_is_not_added(store: ModelStore, source: Path) -> None:
    source.write_bytes(gguf()[:-1])
    with pytest.raises(LlmFailure) as refused:
        store.add(source)
    assert refused.value.code is LlmCode.MODEL_INVALID
    assert not store.folder.exists()


def test_a_source_that_shrinks_while_it_is_copied_is_not_added(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(*_: object) -> None:
        source.write_bytes(gguf()[:-1])
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", shrink)
    with pytest.raises(LlmFailure, match="cut off"):
        store.add(source)
    assert files(store) == set()


def test_a_projector_belongs_to_its_model(store: ModelStore, source: Path, tmp_path: Path) -> None:
    eyes = made(tmp_path / "eyes.gguf", **{"general.architecture": "clip"})

    assert store.add(source, "seer", projector=eyes).vision
    assert files(store) == {"seer.gguf", "seer.json", "mmproj-seer.gguf"}
    assert names(store) == ["seer"]
    store.remove("seer")
    assert files(store) == set()


def test_a_projector_may_come_later(store: ModelStore, source: Path, tmp_path: Path) -> None:
    eyes = made(tmp_path / "eyes.gguf", **{"general.architecture": "clip"})
    assert not store.add(source, "seer").vision
    assert store.add(source, "seer", projector=eyes).vision
    assert store.find("seer").vision


def test_a_projector_is_not_added_as_a_model(store: ModelStore, source: Path) -> None:
    eyes = made(source, **{"general.architecture": "clip"})
    with pytest.raises(InvalidRequest, match="is a projector"):
        store.add(eyes)


def test_a_model_is_no_projector(store: ModelStore, source: Path) -> None:
    with pytest.raises(InvalidRequest, match="is not a projector"):
        store.add(source, projector=source)


def test_files_put_there_by_hand_count_if_they_are_whole(store: ModelStore) -> None:
    store.folder.mkdir()
    made(store.folder / "by-hand.gguf")
    made(store.folder / "two words.gguf")
    made(store.folder / "eyes.gguf", **{"general.architecture": "clip"})
    (store.folder / "half.gguf").write_bytes(gguf()[:-9])
    (store.folder / ".hidden.gguf").write_bytes(gguf())
    (store.folder / "notes.txt").write_text("hello")

    assert names(store) == ["by-hand"]
    assert store.record("by-hand") is None
    assert [one.file for one in store.unusable()] == ["eyes.gguf", "half.gguf", "two words.gguf"]
    assert "cut off" in store.unusable()[1].problem


def test_a_record_that_is_damaged_counts_as_none(store: ModelStore, source: Path) -> None:
    store.add(source, "mine")
    (store.folder / "mine.json").write_text("{")
    assert store.record("mine") is None
    assert names(store) == ["mine"]
    store.add(source, "mine")


class TestFind:
    @pytest.fixture(autouse=True)
    def _models(self, store: ModelStore, tmp_path: Path) -> None:
        for number, name in enumerate(("Qwen-7B", "Qwen-70B", "SmolLM2")):
            store.add(made(tmp_path / "x.gguf", number=number), name)
            (tmp_path / "x.gguf").unlink()

    def test_by_its_exact_name_before_all(self, store: ModelStore) -> None:
        assert store.find("Qwen-7B").name == "Qwen-7B"

    def test_by_a_part_of_its_name_ignoring_case(self, store: ModelStore) -> None:
        assert store.find("smol").name == "SmolLM2"
        assert store.find("70b").name == "Qwen-70B"
        assert store.find("SmolLM2.gguf").name == "SmolLM2"

    def test_by_its_path(self, store: ModelStore, source: Path) -> None:
        assert store.find(str(source)).path == str(source)

    def test_not_when_several_have_it(self, store: ModelStore) -> None:
        with pytest.raises(InvalidRequest, match="may be Qwen-70B or Qwen-7B"):
            store.find("qwen")

    def test_not_when_none_has_it_but_near_ones_are_named(self, store: ModelStore) -> None:
        with pytest.raises(NotFound) as missing:
            store.find("SmallLM2")
        assert "SmolLM2" in missing.value.hint

    @pytest.mark.parametrize(
        "name", ["", "/", "..", "a\0b", "x" * 5000, "none/at/all.gguf"], ids=range(6)
    )
    def test_not_what_no_model_can_be_called(self, name: str, store: ModelStore) -> None:
        with pytest.raises(NotFound):
            store.find(name)

    def test_a_damaged_one_is_said_to_be(self, store: ModelStore) -> None:
        (store.folder / "SmolLM2.gguf").unlink()
        (store.folder / "SmolLM2.gguf").write_bytes(b"GGUF")
        with pytest.raises(LlmFailure) as damaged:
            store.find("SmolLM2")
        assert damaged.value.code is LlmCode.MODEL_INVALID


def test_only_a_whole_name_is_removed(store: ModelStore, source: Path) -> None:
    store.add(source, "mine")
    for name in ("min", "MINE", "../mine", str(store.folder / "mine.gguf"), "mine.gguf"):
        with pytest.raises(NotFound):
            store.remove(name)
    store.remove("mine")
    assert files(store) == set()


def test_a_store_that_can_t_be_written_to_is_told(store: ModelStore, source: Path) -> None:
    store.folder.write_text("I am a file")
    with pytest.raises(StoreFailed, match="can't write to"):
        store.add(source)


def test_a_full_disk_is_told_and_leaves_nothing(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreFull, match="no space left"):
        store.add(source)
    assert files(store) == set()


def test_what_a_dead_program_left_is_removed_and_what_a_live_one_makes_is_not(
    store: ModelStore, source: Path
) -> None:
    store.folder.mkdir()
    (store.folder / ".new-dead").mkdir()
    (store.folder / ".new-dead" / "x.gguf").write_bytes(gguf())
    with staging(store.folder) as live:
        store.add(source)
        assert live.is_dir()
    assert files(store) == {"Source-1B-Q4_0.gguf", "Source-1B-Q4_0.json"}


def test_unfinished_downloads_are_forgotten(store: ModelStore) -> None:
    store.partial.mkdir(parents=True)
    (store.partial / "abc.part").write_bytes(bytes(100))
    assert store.remove_partial() == 100
    assert store.remove_partial() == 0


def test_many_who_add_the_same_name_at_once_agree(store: ModelStore, tmp_path: Path) -> None:
    sources = [made(tmp_path / f"{n}.gguf", number=n) for n in range(8)]
    conflicts: list[Conflict] = []

    def add(source: Path) -> None:
        try:
            store.add(source, "one")
        except Conflict as conflict:
            conflicts.append(conflict)

    threads = [threading.Thread(target=add, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conflicts) == 7
    record = store.record("one")
    assert record is not None
    whole = (store.folder / "one.gguf").read_bytes()
    assert record.sha256 == hashlib.sha256(whole).hexdigest()
    assert files(store) == {"one.gguf", "one.json"}


def test_two_files_of_one_name_are_not_served_together(store: ModelStore, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        made(tmp_path / folder / "same.gguf")
    one, other = str(tmp_path / "a" / "same.gguf"), str(tmp_path / "b" / "same.gguf")
    (tmp_path / "again").symlink_to(tmp_path / "a")
    again = str(tmp_path / "again" / "same.gguf")
    assert [model.path for model in store.served((one, again))] == [one]
    with pytest.raises(Misconfigured, match=r"a/same.gguf and .*b/same.gguf"):
        store.served((one, other))


def split(folder: Path, stem: str, count: int = 3) -> Path:
    """The first of its parts. As llama.cpp writes them, only that has the metadata."""
    for number in range(count):
        metadata = {"split.no": number, "split.count": count}
        file = folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf"
        file.write_bytes(gguf({**metadata, **({} if number else {"llama.context_length": 77})}))
    return folder / f"{stem}-00001-of-{count:05}.gguf"


def test_a_split_model_is_added_as_one_with_all_its_parts(
    store: ModelStore, tmp_path: Path
) -> None:
    first = split(tmp_path, "big")
    facts = store.add(tmp_path / "big-00002-of-00003.gguf", "mine")
    assert (facts.name, facts.parts, facts.train_context) == ("mine", 3, 77)
    assert facts.size == 3 * first.stat().st_size - _shorter(tmp_path)
    assert facts.parameters == 3 * (64 * 32 + 32)
    assert names(store) == ["mine"]
    assert store.unusable() == []
    assert files(store) == {"mine.json", *(f"mine-0000{n}-of-00003.gguf" for n in (1, 2, 3))}
    assert store.find("mine").path.endswith("mine-00001-of-00003.gguf")
    assert store.add(first, "mine") == facts
    store.remove("mine")
    assert files(store) == set()


def _shorter(folder: Path) -> int:
    """How much shorter the later parts are than the first, together."""
    sizes = [file.stat().st_size for file in sorted(folder.glob("big-*"))]
    return 3 * sizes[0] - sum(sizes)


def test_a_split_model_that_lacks_a_part_is_refused_and_the_part_named(
    store: ModelStore, tmp_path: Path
) -> None:
    first = split(tmp_path, "big")
    (tmp_path / "big-00002-of-00003.gguf").unlink()
    with pytest.raises(LlmFailure, match=r"big-00002-of-00003\.gguf") as missing:
        store.add(first)
    assert missing.value.code is LlmCode.MODEL_NOT_FOUND
    assert not store.folder.exists()


def test_of_a_whole_and_a_split_file_of_one_name_the_whole_is_used_and_the_other_named(
    store: ModelStore,
) -> None:
    store.folder.mkdir()
    made(store.folder / "big.gguf")
    split(store.folder, "big")
    assert [one.path for one in store.list()] == [str(store.folder / "big.gguf")]
    [other] = store.unusable()
    assert other.file == "big-00001-of-00003.gguf"
    assert "big.gguf is the model 'big'" in other.problem


@pytest.mark.parametrize("name", ["SMOLLM2", "smollm2:latest"])
def test_a_whole_name_is_found_in_any_case_and_with_the_tag_of_ollama(
    name: str, store: ModelStore, source: Path
) -> None:
    store.add(source, "SmolLM2")
    store.add(made(source, extra=1), "SmolLM2-large")
    assert store.find(name).name == "SmolLM2"
