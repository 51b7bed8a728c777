"""Put a backup in the place of a data directory.

Files are copied into a folder inside the data directory and checked there; then they are moved to
their places, the database of jobs last. Until then nothing of the data directory changes.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path, PurePosixPath

import msgspec
from msgspec import Struct

from penstock.adapters.sqlite import database, rows, upkeep
from penstock.adapters.sqlite.containers import schema as container_schema
from penstock.adapters.sqlite.database import WriterLock
from penstock.adapters.sqlite.snapshot import Snapshot
from penstock.app.backup import (
    DATABASES,
    FORMAT,
    MANIFEST,
    SECRETS,
    File,
    Manifest,
    disk_errors,
    make_folders,
    pieces_of,
    sync_folder,
    sync_folders,
    write_file,
)
from penstock.app.engine import make_private
from penstock.config import Settings
from penstock.core.errors import AlreadyRunning, Conflict, NotFound, StoreCorrupt
from penstock.ports.failpoint import failpoint
from penstock.ports.store import Durability, Verified

_JOBS = "penstock.db"
_PLACES = (
    *(name for name in DATABASES if name != _JOBS),
    "openai",
    "blobs",
    "files",
    "starts",
    "containers/blobs",
    "containers/jobs",
    *SECRETS,
    _JOBS,
)
"""What is moved as a whole, in this order."""
_HARMLESS = {"penstock.lock", "penstock.sock", "pipelines.opening", "models", "pipes"}
"""Entries that do not make a data directory count as used."""
_STARTS = "starts/restored.starts"
_OTHER_BOOT = "restored 0\n"
"""The head of a start book of another boot. Nobody knows which of the jobs that a worker held at
the backup have begun since, so all count as begun; see `penstock.adapters.files.starts`."""


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


def restore(settings: Settings, source: Path, *, replace: bool = False) -> RestoreSummary:
    """Restore a backup to the data directory, which must be unused unless `replace` is set.

    Raises NotFound, Conflict, AlreadyRunning, StoreFailed.
    """
    source = source.resolve()
    manifest = read_manifest(source)
    data = settings.data_dir
    if source.is_relative_to(data) or data.is_relative_to(source):
        raise Conflict(
            f"the backup {source} and the data directory {data} are inside each other",
            hint="move the backup elsewhere",
        )
    make_private(data)
    with ExitStack() as stack:
        for lock in _locks(settings):
            stack.callback(lock.close)
        used = sorted(_used(data))
        if used and not replace:
            raise Conflict(
                f"{data} is not empty: it has {', '.join(used[:5])}",
                hint="restore to another folder with --data, or give --replace: what is there is"
                " then moved aside",
            )
        staging = data / f"restore.partial-{secrets.token_hex(4)}"
        stack.callback(shutil.rmtree, staging, ignore_errors=True)
        with disk_errors(data):
            staging.mkdir(mode=0o700)
            for file in manifest.files:
                _copy(source, staging, file)
            verified = _check(staging)
            write_file(_target(staging, _STARTS), [_OTHER_BOOT.encode()], _STARTS)
            sync_folders(staging)
            aside = _move_aside(data) if used else None
            for path in _PLACES:
                failpoint("restore-move")
                _move(staging / path, data / path)
            for folder in (data, data / "containers"):
                if folder.is_dir():
                    sync_folder(folder)
    return RestoreSummary(
        path=str(data),
        files=len(manifest.files),
        bytes=sum(file.size for file in manifest.files),
        written_at=manifest.created_at,
        replaced=None if aside is None else str(aside),
        verified=verified,
    )


def read_manifest(source: Path) -> Manifest:
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


def _locks(settings: Settings) -> Iterator[WriterLock]:
    """Held while files are moved. Raises AlreadyRunning if an engine or a worker is there."""
    advice = "stop it first"
    yield WriterLock(settings.data_dir / "penstock.lock", advice=advice)
    containers = settings.containers_dir / "containers.db"
    if containers.exists():
        yield container_schema.lock(containers)
    # An engine that keeps its jobs in memory holds no lock.
    with closing(socket.socket(socket.AF_UNIX)) as line, suppress(OSError):
        line.connect(str(settings.socket))
        raise AlreadyRunning(f"an engine runs on {settings.data_dir}", hint=advice)


def _used(data: Path) -> Iterator[str]:
    """Entries that a restore would have to move aside, or would be mixed up with."""
    for entry in data.iterdir():
        if entry.name == "containers":
            yield from (
                path
                for path in _PLACES
                if path.startswith("containers/") and (data / path).exists()
            )
        elif entry.name not in _HARMLESS and ".partial-" not in entry.name:
            yield entry.name


def _copy(source: Path, staging: Path, file: File) -> None:
    try:
        with (source / file.path).open("rb") as original:
            copied = write_file(_target(staging, file.path), pieces_of(original), file.path)
    except FileNotFoundError:
        raise StoreCorrupt(
            f"the backup is damaged: {file.path} is missing", hint="use another backup"
        ) from None
    if copied != file:
        raise StoreCorrupt(
            f"the backup is damaged: {file.path} has changed since it was written",
            hint="use another backup",
        )


def _target(staging: Path, path: str) -> Path:
    make_folders((staging / path).parent)
    return staging / path


def _check(staging: Path) -> Verified | None:
    """Check that the databases can be used here; bring the jobs up to date and verify them."""
    for name, schema in DATABASES.items():
        if (staging / name).exists():
            Snapshot(staging / name, schema).close()
    jobs = staging / _JOBS
    if not jobs.exists():
        return None
    connection = database.open_writer(jobs, Durability.DISK)
    try:
        sql = rows.load_queries()
        codec = rows.JournalCodec(connection.execute(sql["paths"]))
        with database.transaction(connection, jobs):
            return upkeep.verify(connection.execute, sql, codec)
    finally:
        connection.close()


def _move_aside(data: Path) -> Path:
    """Move what the data directory has to a folder inside it."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = data / f"replaced-{stamp}-{secrets.token_hex(2)}"
    aside.mkdir(mode=0o700)
    for path in _PLACES:
        ends = ("", "-wal", "-shm") if path in DATABASES else ("",)
        for end in ends:
            _move(data / f"{path}{end}", aside / f"{path}{end}")
    sync_folders(aside)
    return aside


def _move(source: Path, target: Path) -> None:
    if source.exists():
        make_folders(target.parent)
        source.rename(target)
