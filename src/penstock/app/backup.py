"""Back up a data directory, whether its engine runs or not, and restore it.

A backup is a folder with the layout of a data directory, and `manifest.json` with the size and
the SHA-256 of every file. It is written under a temporary name, and gets its own name when it is
complete and on disk.

It shows one moment: that at which a read transaction is begun on the jobs. Blobs never change, and
a shared lock keeps the pruner from deleting any until all are copied.

To restore, files are copied into a folder inside the data directory and checked there; then they
are moved to their places, the database of jobs last. Until then nothing of the data directory
changes.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from penstock import __version__
from penstock.adapters.files.blobs import open_private, sync_folder
from penstock.adapters.sqlite import schema as job_schema
from penstock.adapters.sqlite.database import Schema, Snapshot, WriterLock
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.app.engine import make_private
from penstock.app.migration import OLD_FILES, OLD_RUNS, OLD_SCHEMA
from penstock.config import Settings
from penstock.control.ledger import Ledger
from penstock.core.errors import (
    AlreadyRunning,
    Conflict,
    NotFound,
    StoreCorrupt,
    StoreFailed,
    StoreFull,
)
from penstock.ports.process import failpoint
from penstock.ports.store import Verified

FORMAT = 1
MANIFEST = "manifest.json"
_JOBS = "penstock.db"
_DATABASES: dict[str, Schema] = {
    _JOBS: job_schema.JOBS,
    OLD_RUNS: OLD_SCHEMA,
}
"""In the order in which their states are taken. OLD_RUNS is there only until an engine has
migrated it, and in backups of earlier versions; so is OLD_FILES."""
_BLOBS = "blobs"
_SECRETS = ("token", "pipe.key")
_PLACES = (
    *(name for name in _DATABASES if name != _JOBS),
    _BLOBS,
    OLD_FILES,
    "files",
    "starts",
    *_SECRETS,
    _JOBS,
)
"""What is moved as a whole when a backup is restored, in this order."""
_TRANSIENT = {
    "penstock.lock",
    "penstock.sock",
    "pipelines.opening",
    "models",
    "pipes",
    "containers",
}
"""Entries of a data directory that are of running processes only, or can be fetched again."""
_STARTS = "starts/restored.starts"
_OTHER_BOOT = b"restored 0\n"
"""The head of a start log of another boot. Nobody knows which of the jobs that a worker held at
the backup have begun since, so all count as begun; see `penstock.adapters.files.start_log`."""
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PIECE = 1 << 20
_STOP = "stop it first"
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


class RestoreSummary(Struct, frozen=True):
    path: str
    """The data directory."""
    files: int
    bytes: int
    written_at: float
    """When the backup was made."""
    replaced: str | None
    """The folder with what was in the data directory before."""
    verified: Verified | None
    """None if the backup has no jobs."""


# -- back up ---------------------------------------------------------------------------------


def back_up(settings: Settings, to: Path) -> BackupSummary:
    """Write a backup to the new folder `to`. Raises NotFound, Conflict, StoreFailed."""
    data = settings.data_dir
    to = Path(os.path.abspath(to))
    _check_target(data, to)
    part = to.with_name(f"{to.name}.partial-{secrets.token_hex(4)}")
    try:
        with _disk_errors(to):
            part.mkdir(mode=0o700)
            summary = _Backup(data, part).write(to)
            _sync_folders(part)
            failpoint("backup-written")
            part.rename(to)
            sync_folder(to.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return summary


def _check_target(data: Path, to: Path) -> None:
    if not any((data / name).is_file() for name in _DATABASES):
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
        with _no_sweep(data / _BLOBS):
            with ExitStack() as stack:  # closed soon: until then the write-ahead log grows
                snapshots = {
                    name: stack.enter_context(closing(Snapshot(data / name, schema)))
                    for name, schema in _DATABASES.items()
                    if (data / name).is_file()
                }
                self._one_moment([*snapshots.values()])
                taken_at = time.time()
                for name, snapshot in snapshots.items():
                    self._copy_database(name, snapshot)
            self._copy_tree(_BLOBS, _DIGEST)
        for folder in ("files", OLD_FILES):
            self._copy_tree(folder)
        for name in _SECRETS:
            self._copy(name)
        manifest = Manifest(FORMAT, __version__, taken_at, tuple(self._files))
        failpoint("backup-manifest")
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        _write(self._part, MANIFEST, [text])
        return BackupSummary(
            path=str(to),
            files=len(self._files),
            bytes=sum(file.size for file in self._files),
            missing=tuple(sorted(self._missing())),
            left_out=(*sorted(self._strangers()), *self._left_out),
        )

    def _one_moment(self, snapshots: Sequence[Snapshot]) -> None:
        """Begin all snapshots at one moment."""
        for tries_left in range(_TRIES, -1, -1):
            changes = [one.change for one in snapshots]
            for one in snapshots:
                one.begin()
            # If the others did not change until they were begun, all are of when the first was.
            same = changes[1:] == [one.change for one in snapshots][1:]
            if not tries_left or same:
                break
            for one in snapshots:
                one.end()

    def _missing(self) -> set[str]:
        """Blobs that records point to, and that the backup lacks."""
        copied = {file.path for file in self._files}
        missing: set[str] = set()
        if _JOBS not in copied:
            return missing
        sql = job_schema.load_queries()["pointers"]
        with closing(Snapshot(self._part / _JOBS, job_schema.JOBS)) as copy:
            for pointer in copy.read(sql) if copy.is_current else ():
                digest = pointer.removeprefix("blob:sha256-")[:64]
                if f"blobs/{digest[:2]}/{digest}" not in copied:
                    missing.add(digest)
        return missing

    def _copy_database(self, name: str, snapshot: Snapshot) -> None:
        target = self._part / name
        _make_folders(target.parent)
        snapshot.copy(target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
            digest = file_digest(file, "sha256").hexdigest()
            self._files.append(File(name, file.tell(), digest))
        failpoint("backup-database")

    def _copy_tree(self, folder: str, name_like: re.Pattern[str] | None = None) -> None:
        """Regular files below a folder; links are left out."""
        for parent, folders, files in os.walk(self._data / folder):
            where = Path(parent).relative_to(self._data).as_posix()
            folders.sort()
            for name in sorted(files):
                if name_like is None or name_like.fullmatch(name):
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
            self._files.append(_write(self._part, path, iter(partial(source.read, _PIECE), b"")))
        failpoint("backup-file")
        return True

    def _strangers(self) -> Iterator[str]:
        known = _TRANSIENT | {PurePosixPath(path).parts[0] for path in _PLACES}
        known |= {f"{name}{end}" for name in _DATABASES for end in ("-wal", "-shm")}
        yield from (name for name in _entries(self._data) if name not in known)
        yield from (name for name in ("containers/oci", "models") if _entries(self._data / name))


@contextmanager
def _no_sweep(blobs: Path) -> Generator[None]:
    """Keep the pruner from deleting blobs; see `penstock.adapters.files.blobs`."""
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


# -- restore ---------------------------------------------------------------------------------


def restore(settings: Settings, source: Path, *, replace: bool = False) -> RestoreSummary:
    """Restore a backup to the data directory, which must be unused unless `replace` is set.

    Raises NotFound, Conflict, AlreadyRunning, StoreFailed.
    """
    source = source.resolve()
    manifest = _read_manifest(source)
    data = settings.data_dir
    if source.is_relative_to(data) or data.is_relative_to(source):
        raise Conflict(
            f"the backup {source} and the data directory {data} are inside each other",
            hint="move the backup elsewhere",
        )
    make_private(data)
    with closing(WriterLock(settings.lock_file, advice=_STOP)), ExitStack() as stack:
        _check_not_running(settings)
        used = sorted(_used(data))
        if used and not replace:
            raise Conflict(
                f"{data} is not empty: it has {', '.join(used[:5])}",
                hint="restore to another folder with --data, or give --replace: what is there is"
                " then moved aside",
            )
        staging = data / f"restore.partial-{secrets.token_hex(4)}"
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        with _disk_errors(data):
            staging.mkdir(mode=0o700)
            for file in manifest.files:
                _copy(source, staging, file)
            verified = _check(staging)
            _write(staging, _STARTS, [_OTHER_BOOT])
            _sync_folders(staging)
            aside = _move_aside(data) if used else None
            for path in _PLACES:
                failpoint("restore-move")
                _move(staging / path, data / path)
            sync_folder(data)
    return RestoreSummary(
        path=str(data),
        files=len(manifest.files),
        bytes=sum(file.size for file in manifest.files),
        written_at=manifest.created_at,
        replaced=None if aside is None else str(aside),
        verified=verified,
    )


def _read_manifest(source: Path) -> Manifest:
    if not source.is_dir():
        raise NotFound(f"no such folder: {source}")
    try:
        text = (source / MANIFEST).read_bytes()
        version = msgspec.json.decode(text, type=_Version)
        manifest = msgspec.json.decode(text, type=Manifest) if version.format == FORMAT else None
    except FileNotFoundError:
        raise NotFound(
            f"{source} is not a backup: it has no {MANIFEST}",
            hint="a folder whose name has .partial in it is of a backup that was not finished",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreCorrupt(
            f"{source / MANIFEST} is damaged: {error}", hint="use another backup"
        ) from error
    if manifest is None:
        raise StoreCorrupt(
            f"{source} was written by Penstock {version.penstock} in a format that this one does"
            f" not know ({version.format}; it knows {FORMAT})",
            hint="restore it with the version that wrote it, or a newer one",
        )
    for file in manifest.files:
        path = PurePosixPath(file.path)
        if not _is_expected(path):
            raise StoreCorrupt(f"{source / MANIFEST} is damaged: wrong path {file.path!r}")
    return manifest


class _Version(Struct, frozen=True):
    format: int
    penstock: str = "(unknown version)"


def _is_expected(path: PurePosixPath) -> bool:
    parts = path.parts
    if path.is_absolute() or ".." in parts:
        return False
    return any(PurePosixPath(place) in (path, *path.parents) for place in _PLACES)


def _check_not_running(settings: Settings) -> None:
    """An engine that keeps its jobs in memory holds no lock. Raises AlreadyRunning."""
    with closing(socket.socket(socket.AF_UNIX)) as line, suppress(OSError):
        line.connect(str(settings.socket))
        raise AlreadyRunning(f"an engine runs on {settings.data_dir}", hint=_STOP)


def _used(data: Path) -> Iterator[str]:
    """Entries that a restore would have to move aside, or would be mixed up with."""
    for entry in data.iterdir():
        if entry.name not in _TRANSIENT and ".partial-" not in entry.name:
            yield entry.name


def _copy(source: Path, staging: Path, file: File) -> None:
    try:
        with (source / file.path).open("rb") as original:
            copied = _write(staging, file.path, iter(partial(original.read, _PIECE), b""))
    except FileNotFoundError:
        raise StoreCorrupt(
            f"the backup is damaged: {file.path} is missing", hint="use another backup"
        ) from None
    if copied != file:
        raise StoreCorrupt(
            f"the backup is damaged: {file.path} has changed since it was written",
            hint="use another backup",
        )


def _check(staging: Path) -> Verified | None:
    """Check that the databases can be used here; bring the jobs up to date and verify them."""
    for name, schema in _DATABASES.items():
        if (staging / name).exists():
            Snapshot(staging / name, schema).close()
    jobs = staging / _JOBS
    if not jobs.exists():
        return None
    return asyncio.run(_verify(jobs))


async def _verify(jobs: Path) -> Verified:
    ledger = Ledger(SqliteBackend(jobs))
    try:
        return await ledger.verify()
    finally:
        await ledger.close()


def _move_aside(data: Path) -> Path:
    """Move what the data directory has to a folder inside it."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = data / f"replaced-{stamp}-{secrets.token_hex(2)}"
    aside.mkdir(mode=0o700)
    for path in _PLACES:
        ends = ("", "-wal", "-shm") if path in _DATABASES else ("",)
        for end in ends:
            _move(data / f"{path}{end}", aside / f"{path}{end}")
    _sync_folders(aside)
    return aside


def _move(source: Path, target: Path) -> None:
    if source.exists():
        _make_folders(target.parent)
        source.rename(target)


# -- files -----------------------------------------------------------------------------------


def _write(root: Path, path: str, pieces: Iterable[bytes]) -> File:
    """Write a new private file below a folder, flush it, and measure it."""
    _make_folders((root / path).parent)
    size, digest = 0, sha256()
    with open(root / path, "xb", opener=open_private) as file:
        for piece in pieces:
            file.write(piece)
            size += len(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return File(path, size, digest.hexdigest())


def _make_folders(folder: Path) -> None:
    if not folder.is_dir():
        _make_folders(folder.parent)
        folder.mkdir(mode=0o700)


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_folder(Path(folder))


@contextmanager
def _disk_errors(target: Path) -> Generator[None]:
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


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
