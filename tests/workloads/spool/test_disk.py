"""Files and folders that are whole, on the disk, and read through nothing but themselves."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.core.errors import StoreFailed, StoreFull
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import files
from penstock.workloads.spool.disk.files import (
    Unfit,
    flush_all,
    fsync_dir,
    make_folder,
    move,
    read_file,
    read_text,
    remove_tree,
    replace_file,
    write_files,
)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


IMPOSTORS: dict[str, Callable[[Path], object]] = {
    "a symbolic link": lambda path: path.symlink_to("/etc/hostname"),
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a socket": _socket,
}


def test_a_file_is_new_or_it_is_an_error(tmp_path: Path) -> None:
    write_files(tmp_path, {"a": b"one"}, Sync.FULL)
    with pytest.raises(FileExistsError):
        write_files(tmp_path, {"a": b"two"}, Sync.FULL)
    assert (tmp_path / "a").read_bytes() == b"one"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "a").symlink_to(outside)
    with pytest.raises(FileExistsError):
        write_files(tmp_path, {"a": b"x"}, Sync.NONE)
    (tmp_path / "b.tmp").symlink_to(outside)
    (tmp_path / "b").symlink_to(outside)
    replace_file(tmp_path, "b", b"x", Sync.NONE)
    assert not outside.exists()
    assert (tmp_path / "b").read_bytes() == b"x"


@pytest.mark.parametrize("place", IMPOSTORS.values(), ids=IMPOSTORS)
def test_a_file_replaces_whatever_has_its_name(
    tmp_path: Path, place: Callable[[Path], object]
) -> None:
    place(tmp_path / "a")
    place(tmp_path / "a.tmp")
    replace_file(tmp_path, "a", b"new", Sync.FULL)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new"}


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_only_a_plain_file_is_read(tmp_path: Path, kind: str) -> None:
    IMPOSTORS[kind](tmp_path / "prompt.txt")
    with pytest.raises(Unfit, match=rf"prompt\.txt: is {kind}, not a file"):
        read_file(tmp_path, "prompt.txt", 100)


def test_a_device_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(Unfit, match="zero: is a device, not a file"):
        read_file(Path("/dev"), "zero", 100)


@pytest.mark.parametrize("kind", [kind for kind in IMPOSTORS if kind != "a folder"])
def test_a_file_is_read_only_in_a_real_folder(tmp_path: Path, kind: str) -> None:
    IMPOSTORS[kind](tmp_path / "1_2_3")
    with pytest.raises(Unfit, match=rf"1_2_3: is {kind}, not a folder"):
        read_file(tmp_path / "1_2_3", "hostname", 100)


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path, "none", 100)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", "none", 100)


def test_a_file_has_as_many_bytes_as_it_may_or_is_unfit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_file(tmp_path, "a", 5) == b"12345"
    with pytest.raises(Unfit, match="larger than 4 bytes"):
        read_file(tmp_path, "a", 4)


def test_text_that_is_not_utf_8_says_where(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    with pytest.raises(Unfit, match=r"prompt\.txt: is not UTF-8: byte 3 is 0xe9"):
        read_text(tmp_path, "prompt.txt", 100)


# -- moving -------------------------------------------------------------------------


@pytest.fixture(params=["kernel", "fallback"])
def either_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fallback":
        monkeypatch.setattr(files, "_library", lambda name: None)


@pytest.mark.usefixtures("either_rename")
def test_a_move_never_replaces(tmp_path: Path) -> None:
    for name in ("a", "empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for target in ("empty", "full", "file", "link"):
        with pytest.raises(FileExistsError):
            move(tmp_path / "a", tmp_path / target, sync=Sync.NONE)
    move(tmp_path / "a", tmp_path / "b", sync=Sync.FULL)
    assert (tmp_path / "b").is_dir()


@pytest.mark.usefixtures("either_rename")
def test_of_two_who_move_one_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    move(tmp_path / "a", tmp_path / "b", sync=Sync.NONE)
    with pytest.raises(FileNotFoundError):
        move(tmp_path / "a", tmp_path / "c", sync=Sync.NONE)


def test_a_folder_filled_between_look_and_rename_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_library", lambda name: None)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    with pytest.raises(FileExistsError):
        move(tmp_path / "a", tmp_path / "b", sync=Sync.NONE)


@pytest.mark.parametrize(
    ("kind", "flushed"), [("ext4", ["to"]), ("vfat", ["to", "from"]), ("", ["to", "from"])]
)
def test_both_folders_are_flushed_where_a_rename_may_be_written_in_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, flushed: list[str]
) -> None:
    (tmp_path / "from" / "job").mkdir(parents=True)
    (tmp_path / "to").mkdir()
    seen: list[str] = []
    monkeypatch.setattr(files, "_file_system", lambda device: kind)
    monkeypatch.setattr(
        os, "fsync", lambda fd: seen.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    )
    move(tmp_path / "from" / "job", tmp_path / "to" / "job", sync=Sync.FULL)
    assert seen == flushed


def test_the_file_system_of_a_folder_is_known() -> None:
    assert files._file_system(os.stat("/proc").st_dev) == "proc"
    assert not files.logs_renames(Path("/proc"))
    assert files._file_system(os.makedev(4095, 77)) == ""


# -- removing -----------------------------------------------------------------------


def test_a_tree_deeper_than_a_path_can_be_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "job"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove_tree(top)
    assert not list(tmp_path.iterdir())


def test_removing_follows_no_link_and_takes_everything(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "precious").touch()
    job = tmp_path / "job"
    (job / "a" / "b").mkdir(parents=True)
    (job / "a" / "link").symlink_to(keep)
    os.mkfifo(job / "a" / "pipe")
    (job / "a").chmod(0o500)
    remove_tree(job)
    remove_tree(job)
    assert [path.name for path in tmp_path.rglob("*")] == ["keep", "precious"]


@pytest.mark.parametrize("inside", [False, True], ids=["itself", "inside"])
def test_removing_follows_no_link_that_is_put_there_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    """Another process may swap a folder for a link between any two steps."""
    keep, job = tmp_path / "keep", tmp_path / "job"
    for folder in (keep, job, job / "a"):
        folder.mkdir()
        (folder / "precious").touch()
    swapped = job / "a" if inside else job
    steps = {name: getattr(os, name) for name in ("listdir", "scandir", "chmod", "rename")}

    def after_a_swap(step: str) -> object:
        def swap_and_go_on(*args: object, **more: object) -> object:
            if swapped.is_dir() and not swapped.is_symlink():
                os.replace(swapped, tmp_path / "away")
                swapped.symlink_to(keep)
            return steps[step](*args, **more)

        return swap_and_go_on

    for step in steps:
        monkeypatch.setattr(os, step, after_a_swap(step))
    with suppress(OSError):
        remove_tree(job)
    assert (keep / "precious").exists()


# -- what the disk refuses ----------------------------------------------------------

_CODES = {
    "full": (errno.ENOSPC, StoreFull, "no space left"),
    "over quota": (errno.EDQUOT, StoreFull, "no space left"),
    "read-only": (errno.EROFS, StoreFailed, "read-only"),
    "not allowed": (errno.EACCES, StoreFailed, "permission denied"),
    "broken": (errno.EIO, StoreFailed, "the disk reports an error"),
    "elsewhere": (errno.EXDEV, StoreFailed, "one file system"),
}
_CALLS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "open": ("open", lambda path: write_files(path, {"a": b"x"}, Sync.FULL)),
    "write": ("write", lambda path: write_files(path, {"a": b"x"}, Sync.FULL)),
    "fsync": ("fsync", lambda path: write_files(path, {"a": b"x"}, Sync.FULL)),
    "fsync of a folder": ("fsync", fsync_dir),
    "replace": ("replace", lambda path: replace_file(path, "a", b"x", Sync.FULL)),
    "mkdir": ("mkdir", lambda path: make_folder(path / "b")),
}


@pytest.mark.parametrize(("code", "error", "words"), _CODES.values(), ids=_CODES)
@pytest.mark.parametrize(("name", "act"), _CALLS.values(), ids=_CALLS)
def test_what_the_disk_refuses_is_said_in_plain_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    act: Callable[[Path], object],
    code: int,
    error: type[StoreFailed],
    words: str,
) -> None:
    tries = 0

    def refuse(*args: object, **more: object) -> None:
        nonlocal tries
        tries += 1
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, name, refuse)
        with pytest.raises(error, match=words):
            act(tmp_path)
    assert tries == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_a_group_that_can_t_be_flushed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush_all(tmp_path)
    monkeypatch.setattr(files, "_library", lambda name: lambda handle: -1)
    monkeypatch.setattr(files.ctypes, "get_errno", lambda: errno.EIO)  # type: ignore[attr-defined]
    with pytest.raises(StoreFailed, match="the disk reports an error"):
        flush_all(tmp_path)


def test_without_flushing_nothing_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("flushed"))
    write_files(tmp_path, {"a": b"x"}, Sync.NONE)
    replace_file(tmp_path, "a", b"y", Sync.NONE)
    (tmp_path / "b").mkdir()
    move(tmp_path / "b", tmp_path / "c", sync=Sync.NONE)
    fsync_dir(tmp_path, Sync.NONE)
