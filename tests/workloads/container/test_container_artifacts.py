"""What a job leaves in its output folder: only plain files are taken, and no link is followed."""

from __future__ import annotations

import asyncio
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

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.core.errors import Unavailable
from penstock.ports.blobs import Blobs
from penstock.testing.aio import run_async
from penstock.workloads.container.files import artifacts, tree
from penstock.workloads.container.files.artifacts import (
    ArtifactCollector,
    LogUploads,
)
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.tree import ENDLESS, remove_tree, weight
from penstock.workloads.container.job import Stream

MANY = 1 << 30
_PR_SET_DUMPABLE = 4


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "output"
    folder.mkdir()
    yield folder
    remove_tree(folder)  # pytest could not remove the deep ones: it would run out of stack


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


def collect(output: Path, limit: int, blobs: Blobs | None = None) -> ArtifactCollector:
    collector = ArtifactCollector(blobs or MemoryBlobs(), limit)
    asyncio.run(collector.add_folder(output))
    return collector


@run_async
async def test_a_log_that_could_not_be_stored_while_it_grew_is_stored_at_the_end(
    tmp_path: Path,
) -> None:
    class Away(MemoryBlobs):
        tries = 0

        async def write_part(self, upload: str, start: int, data: bytes) -> None:
            self.tries += 1
            if self.tries == 1:
                raise Unavailable("the store is away")
            await super().write_part(upload, start, data)

    blobs, output, data = Away(), Output(tmp_path / "logs", 1000), bytes(range(250)) * 4
    uploads, collector = LogUploads(blobs, output, 100), ArtifactCollector(blobs, MANY)
    output.write(Stream.STDOUT, data)
    output.end()
    task = uploads.tasks[Stream.STDOUT]
    await collector.add_log(Stream.STDOUT, "short", output, task)
    assert isinstance(task.exception(), Unavailable)
    (log,) = collector.artifacts
    assert await blobs.get(log.pointer) == data
    output.close()


def paths(collected: ArtifactCollector) -> list[str]:
    return [artifact.name for artifact in collected.artifacts]


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


def test_files_are_stored_with_size_and_hash(output: Path) -> None:
    (output / "b" / "c").mkdir(parents=True)
    (output / "b" / "c" / "été.txt").write_bytes(b"one")
    (output / "a.bin").write_bytes(bytes(3_000_000))
    (output / "empty").mkdir()
    blobs = MemoryBlobs()
    collected = collect(output, MANY, blobs)
    assert paths(collected) == ["a.bin", "b/c/été.txt"]
    assert collected.skipped == ()
    for artifact in collected.artifacts:
        data = asyncio.run(blobs.get(artifact.pointer))
        assert (artifact.size, artifact.sha256) == (len(data), sha256(data).hexdigest())
        assert data == (output / artifact.name).read_bytes()


def test_what_was_kept_does_not_change_with_what_the_container_still_has_open(
    output: Path,
) -> None:
    blobs = MemoryBlobs()
    with open(output / "a", "wb", buffering=0) as file:
        file.write(b"before")
        (artifact,) = collect(output, MANY, blobs).artifacts
        file.write(b"after")
    assert asyncio.run(blobs.get(artifact.pointer)) == b"before"


def test_it_can_be_done_again_from_the_start(output: Path) -> None:
    (output / "a").write_bytes(b"x")
    blobs = MemoryBlobs()
    first = collect(output, MANY, blobs)
    assert collect(output, MANY, blobs).artifacts == first.artifacts
    remove_tree(output)
    assert collect(output, MANY, blobs).artifacts == []


def test_without_a_store_all_is_skipped(output: Path) -> None:
    (output / "a").write_bytes(b"x")
    collector = ArtifactCollector(None, MANY)
    asyncio.run(collector.add_folder(output))
    assert (collector.artifacts, collector.skipped) == ([], ("a: there is nowhere to keep it",))


def test_every_file_is_closed(output: Path) -> None:
    for name in "abc":
        (output / name).write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    collect(output, MANY)
    files = artifacts.output_files(output, MANY, lambda path, reason: None)
    next(files)
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


# What is not


def test_links_pipes_sockets_and_hard_links_are_skipped_with_a_reason(
    output: Path, tmp_path: Path
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
        collected = collect(output, MANY)
    assert collected.artifacts == []
    assert collected.skipped == (
        "hard: has more than one name (it is hard-linked)",
        "pipe: is a pipe, not a file",
        "socket: is a socket, not a file",
        "to-file: is a link, not a file",
        "to-folder: is a link, not a file",
        "to-nothing: is a link, not a file",
    )


def test_names_that_nobody_can_ask_for_are_skipped_and_shown_harmless(output: Path) -> None:
    for name in (b"new\nline", b"esc\x1b[31m", b"not\xffutf8", b"back\\slash", b"fine"):
        (output / os.fsdecode(name)).write_bytes(b"x")
    (output / "tab\t").mkdir()
    (output / "tab\t" / "inside").write_bytes(b"x")
    collected = collect(output, MANY)
    assert paths(collected) == ["fine"]
    assert collected.skipped == (
        "back\\slash: its path has a backslash; parts are divided by '/'",
        "esc\\x1b[31m: its path has a control character",
        "new\\nline: its path has a control character",
        "not\\xffutf8: its path is not UTF-8",
        "tab\\t: its path has a control character",
    )


def test_what_does_not_fit_is_skipped_and_what_does_is_taken(output: Path) -> None:
    for name, size in {"a": 600, "b": 500, "c": 400, "d": 1}.items():
        (output / name).write_bytes(bytes(size))
    collected = collect(output, 1000)
    assert paths(collected) == ["a", "c"]
    assert collected.skipped == (
        "b: is too large: of 1000 bytes in all 400 are left",
        "d: is too large: of 1000 bytes in all 0 are left",
    )


def test_a_file_with_holes_counts_as_long_as_it_is(output: Path) -> None:
    with open(output / "holes", "wb") as file:
        file.truncate(1 << 40)
    collected = collect(output, MANY)
    assert (paths(collected), len(collected.skipped)) == ([], 1)


def test_a_file_that_grows_while_it_is_copied_is_skipped(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (output / "a").write_bytes(bytes(10))
    (output / "b").write_bytes(bytes(10))
    judge = artifacts._problem
    with open(output / "a", "ab", buffering=0) as growing:

        def grow(status: os.stat_result, limit: int, left: int) -> str:
            growing.write(bytes(100))
            return judge(status, limit, left)

        monkeypatch.setattr(artifacts, "_problem", grow)
        collected = collect(output, 200)
    assert paths(collected) == ["b"]
    assert collected.skipped == ("a: grew while it was collected",)


def test_files_beyond_the_number_allowed_are_skipped(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MAX_ARTIFACTS", 3)
    monkeypatch.setattr(artifacts, "_TOLD", 2)
    for name in "abcdefg":
        (output / name).write_bytes(b"x")
    collected = collect(output, MANY)
    assert paths(collected) == ["a", "b", "c"]
    assert collected.skipped == (
        "d: a job may leave 3 files",
        "e: a job may leave 3 files",
        "and 2 more",
    )


def test_a_folder_of_countless_entries_is_not_read_to_its_end(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "MAX_ENTRIES", 5)
    for number in range(20):
        os.mkfifo(output / f"{number}")
    collected = collect(output, MANY)
    assert len(collected.skipped) == 6
    assert collected.skipped[0] == ".: can't be read: too many entries"


def test_a_tree_deeper_than_a_path_may_be_is_skipped(output: Path) -> None:
    nested(output, 1000)
    collected = collect(output, MANY)
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
        collected = collect(output, MANY)
        assert paths(collected) == ["readable"]
        assert collected.skipped == (
            "closed: can't be read: Permission denied",
            "secret: can't be read: Permission denied",
        )
        remove_tree(output)
    assert os.listdir(open_folder) == []


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
    monkeypatch.setattr(tree, "FREE_ENTRIES", 10)
    for number in range(30):
        (output / f"{number}").touch()
    assert weight(output) == 20 * 4096


def test_nothing_can_be_hidden_deep_down(output: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    nested(output, 100)
    assert weight(output) == 0
    nested(output, 3000, "e")
    assert weight(output) == ENDLESS
    assert len(os.listdir("/proc/self/fd")) < before + 200


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
