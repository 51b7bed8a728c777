"""The folder of a container that was removed goes, whatever happens to it meanwhile."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.workloads.container.engines.oci.folder import Trash


def a_folder(root: Path, name: str = "penstock-a") -> Path:
    folder = root / "run" / name
    folder.mkdir(parents=True)
    for file in ("plan.json", "config.json", "status"):
        (folder / file).write_text("x")
    return folder


def all_below(root: Path) -> list[str]:
    found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    return [path for path in found if path not in ("run", "gone")]


@pytest.fixture
def trash(tmp_path: Path) -> Trash:
    return Trash(tmp_path / "gone")


def test_what_is_not_there_is_discarded_already(trash: Trash, tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    trash.discard(folder)
    trash.discard(folder)
    assert all_below(tmp_path) == []


def test_a_folder_is_out_of_its_place_before_anything_of_it_is_deleted(
    trash: Trash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_folder(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", _fails)
        with pytest.raises(OSError, match="busy"):
            trash.discard(folder)
    assert not folder.exists()
    assert len(all_below(tmp_path)) == 4
    # The name is free, and its second folder does not meet the first.
    trash.discard(a_folder(tmp_path))
    assert len(all_below(tmp_path)) == 4
    trash.clear()
    assert all_below(tmp_path) == []


def test_what_somebody_else_deletes_meanwhile_is_no_obstacle(
    trash: Trash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def slow(path: Any, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", slow)
    trash.discard(a_folder(tmp_path))
    assert all_below(tmp_path) == []


def test_one_that_can_not_be_deleted_keeps_no_other_from_it(
    trash: Trash, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        os.rename(a_folder(tmp_path, name), tmp_path / "gone" / name)
    rmdir = os.rmdir

    def stuck(path: Any, *, dir_fd: int | None = None) -> None:
        if path == "a":
            _fails()
        rmdir(path, dir_fd=dir_fd)

    with monkeypatch.context() as broken:
        broken.setattr(os, "rmdir", stuck)
        with pytest.raises(OSError, match="busy"):
            trash.clear()
    assert all_below(tmp_path) == ["gone/a"]
    trash.clear()
    assert all_below(tmp_path) == []


def _fails(*_: Any, **__: Any) -> None:
    raise OSError(errno.EBUSY, "busy")
