"""Back up a data directory, whether its engine runs or not.

A backup is a folder with the layout of a data directory, and `manifest.json` with the size and
the SHA-256 of every file. It is written under a temporary name, and gets its own name when it is
complete and on disk.

It shows one moment. The records of OpenAI files and batches are read first, then a read
transaction is begun on the jobs, then on the pipeline runs; if records or runs changed meanwhile,
all of it is done again. Only then is anything copied. On a machine so busy that no such moment is
found, the order still holds: a batch is never ahead of its jobs and a job never ahead of its run.
The other way round is what a crash leaves too, and the engine makes it good when it starts. Blobs
never change, and a shared lock keeps the pruner from deleting any until all are copied.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from penstock import __version__
from penstock.adapters.files.shelf_folder import Shelved
from penstock.adapters.sqlite import database, rows
from penstock.adapters.sqlite.containers import schema as container_schema
from penstock.adapters.sqlite.database import Schema
from penstock.adapters.sqlite.pipelines import schema as pipeline_schema
from penstock.adapters.sqlite.snapshot import Snapshot
from penstock.config import Settings
from penstock.core.errors import Conflict, NotFound, StoreFailed, StoreFull
from penstock.ports.failpoint import failpoint

FORMAT = 1
MANIFEST = "manifest.json"
DATABASES: dict[str, Schema] = {
    "penstock.db": database.JOBS,
    "pipelines.db": pipeline_schema.SCHEMA,
    "containers/containers.db": container_schema.SCHEMA,
}
"""In the order in which their states are taken."""
SECRETS = ("token", "pipe.key")
CONTAINER_FOLDERS = ("artifacts", "logs")
"""What is kept of a job of the standalone container worker."""

_KNOWN = frozenset(
    ("blobs", "containers", "files", "openai", "starts", "pipes", "models", *SECRETS)
) | {"penstock.lock", "penstock.sock", "pipelines.opening"}
"""Entries of a data directory, besides the databases. `starts`, `pipes`, the lock and the socket
are of running processes only; models can be fetched again."""
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PIECE = 1 << 20
_TRIES = 20
"""How often a moment is looked for at which no record changes."""


class File(Struct, frozen=True):
    path: str
    size: int
    sha256: str


class Manifest(Struct, frozen=True):
    format: int
    penstock: str
    created_at: float
    files: tuple[File, ...] = ()


class BackupSummary(Struct, frozen=True):
    """What a backup holds, and what it does not."""

    path: str
    files: int
    bytes: int
    missing: tuple[str, ...]
    """Blobs that jobs point to, and that were not in the data directory either."""
    left_out: tuple[str, ...]
    """Entries of the data directory that Penstock does not know, or does not back up."""


def back_up(settings: Settings, to: Path) -> BackupSummary:
    """Write a backup to the new folder `to`. Raises NotFound, Conflict, StoreFailed."""
    data = settings.data_dir
    to = Path(os.path.abspath(to))
    _check_target(data, to)
    part = to.with_name(f"{to.name}.partial-{secrets.token_hex(4)}")
    try:
        with disk_errors(to):
            part.mkdir(mode=0o700)
            summary = _Backup(data, part).write(to)
            sync_folders(part)
            failpoint("backup-written")
            part.rename(to)
            sync_folder(to.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return summary


def _check_target(data: Path, to: Path) -> None:
    if not any((data / name).is_file() for name in DATABASES):
        raise NotFound(
            f"there is no database in {data}",
            hint="name the engine's data directory with --data"
            " (with durability = 'memory' there is nothing to back up)",
        )
    if to.resolve().is_relative_to(data):
        raise Conflict(f"{to} is inside the data directory", hint="choose a folder elsewhere")
    if not to.parent.is_dir():
        raise NotFound(f"no such folder: {to.parent}", hint="create it first")
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise Conflict(f"{to} already exists", hint="choose a new name for each backup")


class _Backup:
    def __init__(self, data: Path, part: Path) -> None:
        self._data, self._part = data, part
        self._files: list[File] = []
        self._left_out: list[str] = []

    def write(self, to: Path) -> BackupSummary:
        data = self._data
        with ExitStack() as stack:
            for blobs in (data / "blobs", data / "containers" / "blobs"):
                stack.enter_context(_no_sweep(blobs))
            snapshots = self._snapshots()
            try:
                records = self._one_moment([*snapshots.values()])
                taken_at = time.time()
                for name, snapshot in snapshots.items():
                    snapshot.copy(self._target(name))
                    self._files.append(_measured(self._part / name, name))
                    failpoint("backup-database")
            finally:
                _close(snapshots.values())  # soon: until then the write-ahead log grows
            self._copy_records(records)
            for folder in ("blobs", "containers/blobs"):
                self._copy_blobs(folder)
        self._copy_tree("files")
        for job in _entries(data / "containers" / "jobs"):
            for kind in CONTAINER_FOLDERS:
                self._copy_tree(f"containers/jobs/{job}/{kind}")
        for name in SECRETS:
            self._copy(name)
        manifest = Manifest(FORMAT, __version__, taken_at, tuple(self._files))
        failpoint("backup-manifest")
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        write_file(self._part / MANIFEST, [text], MANIFEST)
        return BackupSummary(
            path=str(to),
            files=len(self._files),
            bytes=sum(file.size for file in self._files),
            missing=tuple(sorted(self._missing())),
            left_out=tuple(sorted(self._strangers()) + self._left_out),
        )

    # -- one moment ---------------------------------------------------------------------

    def _one_moment(self, snapshots: Sequence[Snapshot]) -> dict[str, bytes]:
        """Begin all snapshots at one moment; returns the records of that moment."""
        for tries_left in range(_TRIES, -1, -1):
            records, changes = self._records(), [one.change for one in snapshots]
            for one in snapshots:
                one.begin()
            # If the others did not change until they were begun, all are of when the first was.
            same = changes[1:] == [one.change for one in snapshots][1:]
            if not tries_left or (same and records == self._records()):
                break
            for one in snapshots:
                one.end()
        return records

    def _records(self) -> dict[str, bytes]:
        """The records of OpenAI files and batches, by path."""
        found = {}
        for folder in ("openai/files", "openai/batches"):
            for name in _entries(self._data / folder):
                if not name.startswith("."):
                    with suppress(FileNotFoundError):
                        path = f"{folder}/{name}"
                        found[path] = (self._data / path).read_bytes()
        return found

    def _snapshots(self) -> dict[str, Snapshot]:
        taken: dict[str, Snapshot] = {}
        try:
            for name, schema in DATABASES.items():
                if (self._data / name).is_file():
                    taken[name] = Snapshot(self._data / name, schema)
        except BaseException:
            _close(taken.values())
            raise
        return taken

    def _missing(self) -> set[str]:
        """Blobs that records point to, and that the backup lacks."""
        copied = {file.path for file in self._files}
        queries = {"penstock.db": rows.load_queries, "pipelines.db": pipeline_schema.load_queries}
        missing: set[str] = set()
        for name, load in queries.items():
            if name not in copied:
                continue
            with closing(Snapshot(self._part / name, DATABASES[name])) as copy:
                for pointer in copy.read(load()["pointers"]) if copy.is_current else ():
                    digest = pointer.removeprefix("blob:sha256-")[:64]
                    if f"blobs/{digest[:2]}/{digest}" not in copied:
                        missing.add(digest)
        return missing

    # -- files --------------------------------------------------------------------------

    def _copy_records(self, records: dict[str, bytes]) -> None:
        """Each file's record with its content, unless it was deleted since."""
        for path, record in records.items():
            if path.startswith("openai/files/"):
                kept = self._copy_content(record)
                if kept is None:
                    # It was replaced, or deleted, since the record was read.
                    with suppress(FileNotFoundError):
                        kept = self._copy_content((self._data / path).read_bytes())
                if kept is None:
                    continue
                record = kept
            self._files.append(write_file(self._target(path), [record], path))

    def _copy_content(self, record: bytes) -> bytes | None:
        """Copy the content that a file's record names; returns the record, None if it is gone."""
        try:
            content = msgspec.json.decode(record, type=Shelved).content
        except msgspec.DecodeError as error:
            raise StoreFailed(f"a record in {self._data / 'openai'} is damaged: {error}") from None
        return record if self._copy(f"openai/content/{content}") else None

    def _copy_blobs(self, folder: str) -> None:
        for prefix in _entries(self._data / folder):
            for name in _entries(self._data / folder / prefix):
                if _DIGEST.fullmatch(name):
                    self._copy(f"{folder}/{prefix}/{name}")

    def _copy_tree(self, folder: str) -> None:
        """Regular files below a folder; links are left out."""
        for parent, folders, files in os.walk(self._data / folder):
            where = Path(parent).relative_to(self._data).as_posix()
            folders.sort()
            for name in sorted(files):
                self._copy(f"{where}/{name}")
            self._left_out += [
                f"{where}/{name}" for name in folders if (Path(parent) / name).is_symlink()
            ]

    def _copy(self, path: str) -> bool:
        """Copy one file; False if it is not there."""
        try:
            handle = os.open(self._data / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                self._left_out.append(path)
                return False
            raise
        with open(handle, "rb") as source:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                self._left_out.append(path)
                return False
            self._files.append(write_file(self._target(path), pieces_of(source), path))
        failpoint("backup-file")
        return True

    def _target(self, path: str) -> Path:
        target = self._part / path
        make_folders(target.parent)
        return target

    def _strangers(self) -> Iterator[str]:
        databases = {f"{name}{end}" for name in DATABASES for end in ("", "-wal", "-shm")}
        for name in _entries(self._data):
            if name not in _KNOWN and name not in databases:
                yield name
        for name in ("containers/oci", "models"):
            if _entries(self._data / name):
                yield name


# -- shared with restore ------------------------------------------------------------------


def write_file(target: Path, pieces: Iterable[bytes], path: str) -> File:
    """Write a new private file, flush it, and measure it."""
    size, digest = 0, sha256()
    with open(target, "xb", opener=_private) as file:
        for piece in pieces:
            file.write(piece)
            size += len(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return File(path, size, digest.hexdigest())


def _measured(target: Path, path: str) -> File:
    with target.open("rb") as file:
        os.fsync(file.fileno())
        digest = file_digest(file, "sha256")
        return File(path, file.tell(), digest.hexdigest())


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def make_folders(folder: Path) -> None:
    if not folder.is_dir():
        make_folders(folder.parent)
        folder.mkdir(mode=0o700)


def sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def disk_errors(target: Path) -> Generator[None]:
    """Turn errors of the file system into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"no space left for {target}", hint="free some space, or choose another disk"
            ) from error
        raise StoreFailed(
            f"can't copy {error.filename or target}: {error.strerror}",
            hint="run it as the engine's user, who owns the data directory",
        ) from error


# -- small things -------------------------------------------------------------------------


@contextmanager
def _no_sweep(blobs: Path) -> Generator[None]:
    """Keep the pruner from deleting blobs; see `penstock.adapters.files.folder`."""
    try:
        handle = os.open(blobs / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _close(snapshots: Iterable[Snapshot]) -> None:
    for snapshot in snapshots:
        snapshot.close()


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
