"""What a job leaves in its output folder: only plain files are taken, and no link is followed."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from penstock.workloads.container.files import artifacts, weighing
from penstock.workloads.container.files.artifacts import Collected, collect, open_artifact
from penstock.workloads.container.files.clearing import remove_tree
from penstock.workloads.container.files.weighing import ENDLESS, weight

MANY = 1 << 30
_PR_SET_DUMPABLE = 4


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "output"
    folder.mkdir()
    yield folder
    remove_tree(folder)  # pytest could not remove the deep ones: it would run out of stack


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "artifacts"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that any user can get to."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def nobody() -> Iterator[None]:
    """Do something without root's powers; without more than they have, for other users."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    # A process that changes its user can't look at its own open files otherwise.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def paths(collected: Collected) -> list[str]:
    return [artifact.path for artifact in collected.artifacts]


def nested(folder: Path, levels: int, name: str = "d") -> None:
    """Folders in folders, deeper than a path can be."""
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=handle)
        inner = os.open(name, os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=handle))
    os.close(handle)


# What is taken


def test_files_are_listed_with_size_and_hash_and_can_be_opened(output: Path, kept: Path) -> None:
    (output / "b" / "c").mkdir(parents=True)
    (output / "b" / "c" / "été.txt").write_bytes(b"one")
    (output / "a.bin").write_bytes(bytes(3_000_000))
    (output / "empty").mkdir()
    collected = collect(output, kept, MANY)
    assert paths(collected) == ["a.bin", "b/c/été.txt"]
    assert collected.skipped == ()
    for artifact in collected.artifacts:
        with open_artifact(kept, artifact.path) as file:
            data = file.read()
        assert (artifact.size, artifact.sha256) == (len(data), sha256(data).hexdigest())


def test_what_was_kept_does_not_change_with_what_the_container_still_has_open(
    output: Path, kept: Path
) -> None:
    with open(output / "a", "wb", buffering=0) as file:
        file.write(b"before")
        collect(output, kept, MANY)
        file.write(b"after")
    with open_artifact(kept, "a") as kept_file:
        assert kept_file.read() == b"before"


def test_a_job_can_not_make_its_artifacts_executable_or_writable(output: Path, kept: Path) -> None:
    (output / "a").write_bytes(b"x")
    (output / "a").chmod(0o6777)
    collect(output, kept, MANY)
    assert (kept / "a").stat().st_mode & 0o7777 == 0o444
    assert kept.stat().st_mode & 0o077 == 0


def test_all_is_durable_when_it_returns(
    output: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (output / "d").mkdir()
    (output / "d" / "f").write_bytes(b"x")
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda handle: synced.add(os.fstat(handle).st_ino))
    collect(output, kept, MANY)
    needed = [kept.parent, kept, kept / "d", kept / "d" / "f"]
    assert synced == {path.stat().st_ino for path in needed}


def test_it_can_be_done_again_from_the_start(output: Path, kept: Path) -> None:
    (output / "a").write_bytes(b"x")
    first = collect(output, kept, MANY)
    # As if it had been interrupted.
    (kept / "half").write_bytes(b"?")
    assert collect(output, kept, MANY).artifacts == first.artifacts
    assert sorted(os.listdir(kept)) == ["a"]


def test_when_the_output_is_gone_what_was_kept_is_told_again(output: Path, kept: Path) -> None:
    (output / "a").write_bytes(b"x")
    first = collect(output, kept, MANY)
    remove_tree(output)
    assert collect(output, kept, MANY).artifacts == first.artifacts
    remove_tree(kept)
    assert collect(output, kept, MANY).artifacts == []


# What is not


def test_links_pipes_sockets_and_hard_links_are_skipped_with_a_reason(
    output: Path, kept: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    (output / "to-file").symlink_to(secret)
    (output / "to-folder").symlink_to(tmp_path)
    (output / "to-nothing").symlink_to("nothing")
    os.link(secret, output / "hard")
    os.mkfifo(output / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(output / "socket"))
        collected = collect(output, kept, MANY)
    assert collected.artifacts == []
    assert collected.skipped == (
        "hard: has more than one name (it is hard-linked)",
        "pipe: is a pipe, not a file",
        "socket: is a socket, not a file",
        "to-file: is a link, not a file",
        "to-folder: is a link, not a file",
        "to-nothing: is a link, not a file",
    )
    assert os.listdir(kept) == []


def test_names_that_nobody_can_ask_for_are_skipped_and_shown_harmless(
    output: Path, kept: Path
) -> None:
    for name in (b"new\nline", b"esc\x1b[31m", b"not\xffutf8", b"back\\slash", b"fine"):
        (output / os.fsdecode(name)).write_bytes(b"x")
    (output / "tab\t").mkdir()
    (output / "tab\t" / "inside").write_bytes(b"x")
    collected = collect(output, kept, MANY)
    assert paths(collected) == ["fine"]
    assert collected.skipped == (
        "back\\slash: its path has a backslash; parts are divided by '/'",
        "esc\\x1b[31m: its path has a control character",
        "new\\nline: its path has a control character",
        "not\\xffutf8: its path is not UTF-8",
        "tab\\t: its path has a control character",
    )


def test_what_does_not_fit_is_skipped_and_what_does_is_taken(output: Path, kept: Path) -> None:
    for name, size in {"a": 600, "b": 500, "c": 400, "d": 1}.items():
        (output / name).write_bytes(bytes(size))
    collected = collect(output, kept, 1000)
    assert paths(collected) == ["a", "c"]
    assert collected.skipped == (
        "b: is too large: of 1000 bytes in all 400 are left",
        "d: is too large: of 1000 bytes in all 0 are left",
    )


def test_a_file_with_holes_counts_as_long_as_it_is(output: Path, kept: Path) -> None:
    with open(output / "holes", "wb") as file:
        file.truncate(1 << 40)
    collected = collect(output, kept, MANY)
    assert (paths(collected), len(collected.skipped)) == ([], 1)


def test_a_file_that_grows_while_it_is_copied_is_cut_off(
    output: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "_PIECE", 10)
    (output / "a").write_bytes(bytes(10))
    (output / "b").write_bytes(bytes(10))
    judge = Collected.problem
    with open(output / "a", "ab", buffering=0) as growing:

        def grow(self: Collected, status: os.stat_result) -> str:
            growing.write(bytes(100))
            return judge(self, status)

        monkeypatch.setattr(Collected, "problem", grow)
        collected = collect(output, kept, 200)
    assert paths(collected) == ["b"]
    assert collected.skipped == ("a: is too large: a file may have 200 bytes",)
    assert os.listdir(kept) == ["b"]


def test_files_beyond_the_number_allowed_are_skipped(
    output: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MAX_FILES", 3)
    monkeypatch.setattr(artifacts, "_TOLD", 2)
    for name in "abcdefg":
        (output / name).write_bytes(b"x")
    collected = collect(output, kept, MANY)
    assert paths(collected) == ["a", "b", "c"]
    assert collected.skipped == (
        "d: is one too many: at most 3 files are kept",
        "e: is one too many: at most 3 files are kept",
        "and 2 more",
    )


def test_a_folder_of_countless_entries_is_not_read_to_its_end(
    output: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MAX_ENTRIES", 5)
    for number in range(20):
        os.mkfifo(output / f"{number}")
    collected = collect(output, kept, MANY)
    assert len(collected.skipped) == 6
    assert collected.skipped[0] == ".: has more than 5 entries in all"


def test_a_tree_deeper_than_a_path_may_be_is_skipped(output: Path, kept: Path) -> None:
    nested(output, 1000)
    collected = collect(output, kept, MANY)
    assert collected.artifacts == []
    (reason,) = collected.skipped
    assert reason.endswith("33 folders deep; at most 32 are allowed")


def test_what_a_worker_that_is_not_root_can_not_read_is_skipped(open_folder: Path) -> None:
    output = open_folder / "output"
    with nobody():
        output.mkdir()
        (output / "readable").write_bytes(b"x")
        (output / "secret").write_bytes(b"x")
        (output / "secret").chmod(0)
        (output / "closed").mkdir(mode=0)
        collected = collect(output, open_folder / "artifacts", MANY)
        assert paths(collected) == ["readable"]
        assert collected.skipped == (
            "closed: can't be read: Permission denied",
            "secret: can't be read: Permission denied",
        )
        remove_tree(output)
        remove_tree(open_folder / "artifacts")
    assert os.listdir(open_folder) == []


# Opening


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../secret",
        "/etc/passwd",
        "d",
        "d/../f",
        "link",
        "linked/f",
        "d/link",
        "pipe",
        "f/x",
        "f\0",
    ],
)
def test_nothing_but_an_artifact_can_be_opened(kept: Path, path: str) -> None:
    (kept.parent / "secret").write_text("x")
    (kept / "d").mkdir(parents=True)
    (kept / "f").write_text("x")
    (kept / "link").symlink_to(kept.parent / "secret")
    (kept / "linked").symlink_to(kept)
    (kept / "d" / "link").symlink_to("../f")
    os.mkfifo(kept / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        open_artifact(kept, path)
    assert len(os.listdir("/proc/self/fd")) == before


# Weighing


def test_the_weight_is_that_of_all_files(output: Path) -> None:
    (output / "d").mkdir()
    (output / "d" / "a").write_bytes(bytes(1000))
    (output / "b").write_bytes(bytes(7))
    assert weight(output) == 1007
    assert weight(output / "nothing") == 0


def test_a_link_weighs_nothing(output: Path, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(5000))
    (output / "file").symlink_to(tmp_path / "large")
    (output / "folder").symlink_to(tmp_path)
    assert weight(output) == 0


def test_holes_weigh_as_much_as_bytes_and_so_does_room_set_aside(output: Path) -> None:
    with open(output / "holes", "wb") as file:
        file.truncate(1 << 30)
    assert weight(output) == 1 << 30
    with open(output / "aside", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 << 20)
        file.truncate(8 << 20)
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong]
    with open(output / "hidden", "wb") as file:
        assert fallocate(file.fileno(), 1, 0, 4 << 20) == 0
    assert weight(output) == (1 << 30) + (8 << 20) + (4 << 20)


def test_entries_without_number_weigh_something(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighing, "MAX_FILES", 10)
    for number in range(30):
        (output / f"{number}").touch()
    assert weight(output) == 20 * 4096


def test_nothing_can_be_hidden_deep_down(output: Path) -> None:
    nested(output, 100)
    assert weight(output) == 0
    nested(output, 3000, "e")
    assert weight(output) == ENDLESS
    assert len(os.listdir("/proc/self/fd")) < 200


def test_a_tree_that_changes_meanwhile_is_no_problem(output: Path) -> None:
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            (output / "d" / "e").mkdir(parents=True, exist_ok=True)
            (output / "d" / "e" / "f").touch()
            remove_tree(output / "d")

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        assert {weight(output) for _ in range(500)} == {0}
    finally:
        done.set()
        churning.join()


# Removing


def test_a_tree_deeper_than_a_stack_is_removed(output: Path) -> None:
    nested(output, 3000)
    nested(output, 50, "e")
    remove_tree(output)
    assert not output.exists()


def test_a_folder_of_many_entries_is_removed(output: Path) -> None:
    for number in range(2500):
        (output / f"{number}").touch()
        (output / "d" / f"{number}").mkdir(parents=True)
    remove_tree(output)
    assert not output.exists()


def test_a_link_is_removed_and_not_what_it_leads_to(output: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (precious / "d").mkdir(parents=True)
    (output / "link").symlink_to(precious)
    (output / "d").mkdir()
    (output / "d" / "link").symlink_to(precious)
    remove_tree(output)
    assert (precious / "d").is_dir()
    (tmp_path / "output").symlink_to(precious)
    remove_tree(tmp_path / "output")
    assert (precious / "d").is_dir()
    assert not (tmp_path / "output").is_symlink()


def test_removing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "no" / "such")
    remove_tree(tmp_path / "none")


def test_folders_without_permissions_are_removed_by_their_owner(open_folder: Path) -> None:
    with nobody():
        inner = open_folder / "a" / "b" / "c"
        inner.mkdir(parents=True)
        (inner / "f").touch()
        for folder in (inner, inner.parent, inner.parent.parent):
            folder.chmod(0)
        remove_tree(open_folder / "a")
    assert os.listdir(open_folder) == []


def test_what_can_not_be_removed_is_told_after_the_rest_is_gone(open_folder: Path) -> None:
    if os.geteuid() != 0:
        return
    with nobody():
        (open_folder / "a").mkdir()
        (open_folder / "a" / "mine").touch()
    (open_folder / "a" / "foreign").mkdir()
    (open_folder / "a" / "foreign" / "f").touch()
    with nobody(), pytest.raises(PermissionError):
        remove_tree(open_folder / "a")
    assert os.listdir(open_folder / "a") == ["foreign"]
