"""Where the OCI engine keeps what ends with the machine: in memory, and in nobody else's hands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workloads.container.engines.oci import folder
from penstock.workloads.container.engines.oci.folder import live_folder
from penstock.workloads.container.files.tree import remove_tree

SHARED = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="there is no /dev/shm")


@pytest.fixture(autouse=True)
def _cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(folder, "_MEMORY", (str(SHARED),))
    yield
    for path in SHARED.glob("penstock-oci-*"):
        if str(tmp_path) in os.readlink(path / "root"):
            remove_tree(path)


def test_it_is_a_link_to_a_private_folder_in_memory(tmp_path: Path) -> None:
    live = live_folder(tmp_path / "oci")
    target = live.resolve()
    assert (target.parent, target.stat().st_mode & 0o777) == (SHARED, 0o700)
    (live / "run").mkdir()
    assert (live_folder(tmp_path / "oci") / "run").is_dir()


def test_without_a_place_in_memory_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_MEMORY", (str(tmp_path),))
    live = live_folder(tmp_path / "oci")
    assert live.is_dir()
    assert not live.is_symlink()


def test_a_link_of_an_earlier_boot_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "live").symlink_to(SHARED / "penstock-oci-of-another-boot")
    assert live_folder(tmp_path).is_dir()


def test_a_folder_that_others_could_have_filled_is_not_used(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o777)
    theirs.chmod(0o777)
    (tmp_path / "live").symlink_to(theirs)
    assert live_folder(tmp_path).resolve().parent == SHARED


def test_what_a_deleted_root_left_in_memory_is_removed_later(tmp_path: Path) -> None:
    old, fresh = (live_folder(tmp_path / name).resolve() for name in ("old", "fresh"))
    long_ago = time.time() - 3600
    os.utime(old, (long_ago, long_ago))
    for name in ("old", "fresh"):
        remove_tree(tmp_path / name)
    kept = live_folder(tmp_path / "kept").resolve()
    os.utime(kept, (long_ago, long_ago))
    live_folder(tmp_path / "new")
    assert (old.exists(), fresh.exists(), kept.exists()) == (False, True, True)
