"""What a worker wrote down before it began is known after its death, and can be forestalled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.adapters.files import starts
from penstock.adapters.files.starts import FileStartBook, FileStarts


@pytest.fixture
def books(tmp_path: Path) -> Iterator[list[FileStartBook]]:
    made: list[FileStartBook] = []
    yield made
    for book in made:
        book.close(keep=False)


def test_what_is_in_a_book_has_begun_and_nothing_else(
    tmp_path: Path, books: list[FileStartBook]
) -> None:
    books.append(FileStartBook(str(tmp_path), "w"))
    assert books[0].begin("a", 1)
    known = FileStarts(tmp_path)
    assert not known.revoke("a", 1)
    assert known.revoke("a", 2)
    assert known.revoke("b", 1)


def test_what_was_revoked_can_not_begin_any_more(
    tmp_path: Path, books: list[FileStartBook]
) -> None:
    books.append(FileStartBook(str(tmp_path), "w"))
    known = FileStarts(tmp_path)
    assert known.revoke("a", 1)
    assert known.revoke("b", 1)
    assert not books[0].begin("a", 1)
    assert books[0].begin("c", 1)
    assert not books[0].begin("b", 1)
    assert not books[0].begin("a", 1)
    assert books[0].begin("a", 2)


def test_what_was_revoked_stays_so_when_it_is_asked_again(
    tmp_path: Path, books: list[FileStartBook]
) -> None:
    books.append(FileStartBook(str(tmp_path), "w"))
    known = FileStarts(tmp_path)
    assert known.revoke("a", 1)
    assert not books[0].begin("a", 1)
    assert known.revoke("a", 1)


def test_the_books_of_all_workers_are_read(tmp_path: Path, books: list[FileStartBook]) -> None:
    for name, job_id in (("one", "a"), ("two", "b")):
        books.append(FileStartBook(str(tmp_path), name))
        books[-1].begin(job_id, 1)
    known = FileStarts(tmp_path)
    assert not known.revoke("a", 1)
    assert not known.revoke("b", 1)
    assert known.revoke("c", 1)


def test_without_any_book_nothing_has_begun(tmp_path: Path) -> None:
    assert FileStarts(tmp_path / "none").revoke("a", 1)


def test_of_a_start_and_its_revocation_at_the_same_time_one_wins(
    tmp_path: Path, books: list[FileStartBook]
) -> None:
    books.append(FileStartBook(str(tmp_path), "w"))
    known = FileStarts(tmp_path)
    begun: dict[int, bool] = {}
    revoked: dict[int, bool] = {}
    together = threading.Barrier(2)

    def work() -> None:
        for n in range(500):
            together.wait()
            begun[n] = books[0].begin("a", n)

    worker = threading.Thread(target=work)
    worker.start()
    for n in range(500):
        together.wait()
        revoked[n] = known.revoke("a", n)
    worker.join()
    assert all(begun[n] is not revoked[n] for n in range(500))
    assert {True, False} >= set(begun.values())


def test_a_book_that_is_written_anew_while_it_is_revoked_lets_nothing_through(
    tmp_path: Path, books: list[FileStartBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "_LONG", 1)
    books.append(FileStartBook(str(tmp_path), "w"))
    known = FileStarts(tmp_path)
    begun: dict[int, bool] = {}
    revoked: dict[int, bool] = {}
    together = threading.Barrier(2)

    def work() -> None:
        for n in range(300):
            together.wait()
            books[0].trim([])
            begun[n] = books[0].begin("a", n)
            together.wait()  # its start is not trimmed away before it is asked for

    worker = threading.Thread(target=work)
    worker.start()
    for n in range(300):
        together.wait()
        revoked[n] = known.revoke("a", n)
        together.wait()
    worker.join()
    assert not any(begun[n] and revoked[n] for n in range(300))


def test_after_a_boot_nobody_can_tell_so_everything_counts_as_begun(
    tmp_path: Path, books: list[FileStartBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    books.append(FileStartBook(str(tmp_path), "w"))
    boot = tmp_path / "boot_id"
    boot.write_text("another boot\n")
    monkeypatch.setattr(starts, "_BOOT", boot)
    assert not FileStarts(tmp_path).revoke("never-heard-of", 1)


def test_a_long_book_is_written_anew_with_what_runs(
    tmp_path: Path, books: list[FileStartBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starts, "_LONG", 100)
    books.append(book := FileStartBook(str(tmp_path), "w"))
    known = FileStarts(tmp_path)
    known.revoke("given-up", 1)
    for n in range(50):
        book.begin(f"job-{n}", 1)
    book.trim([("job-49", 1)])
    book.begin("job-50", 1)
    assert known.revoke("job-0", 1)
    assert not known.revoke("job-49", 1)
    assert not known.revoke("job-50", 1)
    assert not book.begin("given-up", 1)


def test_a_book_that_can_not_be_written_says_so(
    tmp_path: Path, books: list[FileStartBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    books.append(FileStartBook(str(tmp_path), "w"))
    monkeypatch.setattr(starts.os, "write", lambda handle, data: 0)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="could not be written"):
        books[0].begin("a", 1)


def test_a_worker_that_ends_well_takes_its_book_with_it(tmp_path: Path) -> None:
    book = FileStartBook(str(tmp_path), "w")
    book.begin("a", 1)
    book.close(keep=False)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_with_something_untold_leaves_its_book(tmp_path: Path) -> None:
    book = FileStartBook(str(tmp_path), "w")
    book.begin("a", 1)
    book.close(keep=True)
    assert not FileStarts(tmp_path).revoke("a", 1)


def test_the_books_of_the_dead_are_thrown_away_and_what_they_say_is_kept(
    tmp_path: Path, books: list[FileStartBook], monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("an earlier boot\n")
    monkeypatch.setattr(starts, "_BOOT", boot)
    books.append(FileStartBook(str(tmp_path), "dead"))
    books[0].begin("a", 1)
    boot.write_text("this boot\n")
    books.append(FileStartBook(str(tmp_path), "alive"))
    books[1].begin("b", 1)
    known = FileStarts(tmp_path)
    known.take_over([("a", 1), ("b", 1)])
    assert [path.name for path in tmp_path.glob("*.starts")] == ["alive.starts"]
    assert not known.revoke("a", 1)
    assert not known.revoke("b", 1)
    assert known.revoke("c", 1)
