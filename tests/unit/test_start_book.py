"""What a worker wrote down before it began is known after its death."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.adapters.files import starts
from penstock.adapters.files.starts import FileStartBook, FileStarts


def test_what_is_in_a_book_has_begun_and_nothing_else(tmp_path: Path) -> None:
    book = FileStartBook(str(tmp_path), "w")
    book.begin("a", 1)
    known = FileStarts(tmp_path)
    assert known.began("a", 1)
    assert not known.began("a", 2)
    assert not known.began("b", 1)


def test_the_books_of_all_workers_are_read(tmp_path: Path) -> None:
    FileStartBook(str(tmp_path), "one").begin("a", 1)
    FileStartBook(str(tmp_path), "two").begin("b", 3)
    known = FileStarts(tmp_path)
    assert known.began("a", 1)
    assert known.began("b", 3)


def test_without_any_book_nothing_has_begun(tmp_path: Path) -> None:
    assert not FileStarts(tmp_path / "none").began("a", 1)


def test_after_a_boot_nobody_can_tell_so_everything_counts_as_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FileStartBook(str(tmp_path), "w")
    boot = tmp_path / "boot_id"
    boot.write_text("another boot\n")
    monkeypatch.setattr(starts, "_BOOT", boot)
    assert FileStarts(tmp_path).began("never-heard-of", 1)


def test_a_long_book_is_written_anew_with_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "_LONG", 100)
    book = FileStartBook(str(tmp_path), "w")
    for n in range(50):
        book.begin(f"job-{n}", 1)
    book.trim([("job-49", 1)])
    book.begin("job-50", 1)
    known = FileStarts(tmp_path)
    assert not known.began("job-0", 1)
    assert known.began("job-49", 1)
    assert known.began("job-50", 1)


def test_a_worker_that_ends_well_takes_its_book_with_it(tmp_path: Path) -> None:
    book = FileStartBook(str(tmp_path), "w")
    book.begin("a", 1)
    book.close()
    assert list(tmp_path.iterdir()) == []


def test_the_books_of_the_dead_are_thrown_away_and_what_they_say_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("an earlier boot\n")
    monkeypatch.setattr(starts, "_BOOT", boot)
    FileStartBook(str(tmp_path), "dead").begin("a", 1)
    boot.write_text("this boot\n")
    alive = FileStartBook(str(tmp_path), "alive")
    alive.begin("b", 1)
    known = FileStarts(tmp_path)
    known.take_over([("a", 1), ("b", 1)])
    assert [path.name for path in tmp_path.glob("*.starts")] == ["alive.starts"]
    assert known.began("a", 1)
    assert known.began("b", 1)
    assert not known.began("c", 1)
