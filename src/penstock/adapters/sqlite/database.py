"""Opening a database file: one writer, the right durability, the newest schema; and readers.

The writer takes a lock file beside the database, so a second engine on the same folder is
refused rather than left to fight over pages. Readers open the file read-only. SQL lies in files
of a package, with what stands in braces filled in.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, TypeVar

import apsw

from penstock.core.errors import AlreadyRunning, StoreCorrupt, StoreFailed, StoreFull
from penstock.ports.process import close_in_children
from penstock.ports.store import Durability

T = TypeVar("T")

_ELSEWHERE = "choose another folder with --data (of a container worker: with jobs_dir)"
_MOST_IDLE = 2
"""Connections kept open for the next long reading: opening one takes a while."""
_SYNCHRONOUS = {Durability.DISK: "FULL", Durability.OS: "NORMAL", Durability.MEMORY: "OFF"}


class Schema(NamedTuple):
    """What a file of one kind must be: its mark, and the steps to its newest tables."""

    application_id: int
    migrations: Callable[[], list[str]]
    after: Mapping[int, Callable[[apsw.Connection], None]] = {}
    """What is done after the SQL of a step, in the same transaction."""


class WriterLock:
    """Holds a folder for one engine, or one worker, until closed or until the process ends."""

    def __init__(
        self,
        path: Path,
        who: str = "engine",
        advice: str = "use it through penstock.connect() or the command line, or stop it first",
    ) -> None:
        self._path = path
        try:
            self._file = open(path, "a+")  # noqa: SIM115 held for its owner's life
        except OSError as error:
            raise StoreFailed(
                f"can't write in {path.parent}: {error.strerror}",
                hint=f"{_ELSEWHERE}, or change its permissions",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise AlreadyRunning(
                f"another {who} (process {holder}) owns {path.parent}", hint=advice
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()
        close_in_children(self)

    def filenos(self) -> list[int]:
        return [] if self._file.closed else [self._file.fileno()]

    def close(self) -> None:
        self._file.close()


def open_writer(path: Path, durability: Durability, schema: Schema) -> apsw.Connection:
    """Open a file, and bring it up to date."""
    with storage_errors(path):
        connection = apsw.Connection(str(path))
        try:
            _prepare(connection, path, durability, schema)
        except BaseException:
            connection.close()
            raise
    return connection


def open_reader(path: Path, schema: Schema) -> apsw.Connection:
    with storage_errors(path):
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(5000)
        if _is_unfinished(connection):
            connection.close()
            raise StoreFailed(
                f"{path} holds nothing yet: the process that made it was killed at its start",
                hint="start an engine on it once",
            )
        connection.pragma("cache_size", -16_384)
        _check_ours(connection, path, schema)
        if connection.pragma("user_version") < len(schema.migrations()):
            raise StoreFailed(
                f"{path} was written by an older Penstock and can't be read as it is",
                hint="start an engine on it once: it brings it up to date",
            )
    return connection


def _prepare(
    connection: apsw.Connection, path: Path, durability: Durability, schema: Schema
) -> None:
    if connection.readonly("main"):
        raise StoreFailed(
            f"can't write {path}: it is read-only",
            hint="check the permissions of the file and its folder",
        )
    connection.set_busy_timeout(5000)
    if not _is_empty(connection):
        _check_ours(connection, path, schema)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", _SYNCHRONOUS[durability])
    connection.pragma("cache_size", -65_536)
    connection.pragma("temp_store", "memory")
    connection.pragma("foreign_keys", True)
    connection.pragma("wal_autocheckpoint", 4000)
    migrate(connection, path, schema)


def _is_empty(connection: apsw.Connection) -> bool:
    """Whether it is a file in which no engine, and nobody else, has written anything."""
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    return not (tables or connection.pragma("user_version"))


def _is_unfinished(connection: apsw.Connection) -> bool:
    """Whether its maker was killed before it wrote anything for good. What it had begun then has a
    rollback journal, which a reader can't roll back; in WAL mode, as later, there is none."""
    try:
        return _is_empty(connection)
    except apsw.ReadOnlyError as error:
        if getattr(error, "extendedresult", 0) != apsw.SQLITE_READONLY_ROLLBACK:
            raise
        return True


def _check_ours(connection: apsw.Connection, path: Path, schema: Schema) -> None:
    if connection.pragma("application_id") != schema.application_id:
        raise StoreCorrupt(
            f"{path} is a database, but not one of Penstock's",
            hint=_ELSEWHERE,
        )


def migrate(connection: apsw.Connection, path: Path, schema: Schema) -> None:
    """Bring the schema to the newest version, one numbered file at a time."""
    version = _known_version(connection, path, schema)
    for number, sql in enumerate(schema.migrations()[version:], start=version + 1):
        with connection:
            connection.execute(sql)
            if number in schema.after:
                schema.after[number](connection)
            connection.pragma("application_id", schema.application_id)
            connection.pragma("user_version", number)


def check_version(connection: apsw.Connection, path: Path, schema: Schema) -> None:
    """Refuse a file of another kind, or of a newer Penstock."""
    _check_ours(connection, path, schema)
    _known_version(connection, path, schema)


def _known_version(connection: apsw.Connection, path: Path, schema: Schema) -> int:
    version: int = connection.pragma("user_version")
    known = len(schema.migrations())
    if version > known:
        raise StoreCorrupt(
            f"{path} was written by a newer Penstock (schema {version}, this one knows {known})",
            hint=f"upgrade Penstock, or {_ELSEWHERE}",
        )
    return version


class storage_errors:
    """Turn SQLite's errors into ours, each with its cause and what to do."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, apsw.Error):
            raise translated(error, self._path) from error


def translated(error: apsw.Error, path: Path) -> StoreFailed:
    """What to tell of an error of SQLite."""
    match error:
        case apsw.FullError():
            return _full(path)
        case apsw.NotADBError() | apsw.CorruptError():
            return StoreCorrupt(
                f"{path} is not a readable database: {error}",
                hint=f"restore it from a backup, or {_ELSEWHERE}",
            )
        case apsw.CantOpenError() | apsw.ReadOnlyError() | apsw.PermissionsError():
            return StoreFailed(
                f"can't write {path}: {error}",
                hint="check the permissions of the file and its folder",
            )
        case apsw.IOError():
            if "disk" in str(error).lower() and _is_full(path):
                return _full(path)
            return StoreFailed(f"the disk refused to write {path}: {error}")
    return StoreFailed(f"the database {path} refused: {error}")


def _full(path: Path) -> StoreFull:
    return StoreFull(f"no space left for {path}", hint="free some space; nothing was stored")


def _is_full(path: Path) -> bool:
    stat = os.statvfs(path.parent)
    return stat.f_bavail * stat.f_frsize < 1 << 20


# -- reading ----------------------------------------------------------------------


class ReaderPool:
    """Connections for long readings: each in a thread, of one state of the file."""

    def __init__(self, path: Path, connect: Callable[[], apsw.Connection]) -> None:
        self._path = path
        self._connect = connect
        self._idle: list[apsw.Connection] = []
        self._closed = False

    async def run(self, work: Callable[[apsw.Connection], T]) -> T:
        """Read one state of the file at length."""
        return await asyncio.to_thread(self._run, work)

    def _run(self, work: Callable[[apsw.Connection], T]) -> T:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            with storage_errors(self._path), one_state(connection):
                result = work(connection)
        except BaseException:
            connection.close()
            raise
        if self._closed or len(self._idle) >= _MOST_IDLE:
            connection.close()
        else:
            self._idle.append(connection)
        return result

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()


@contextlib.contextmanager
def one_state(connection: apsw.Connection) -> Generator[None]:
    """Whatever is read within sees the file as it was at the first reading."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


async def to_the_end(future: asyncio.Future[T]) -> T:
    """Wait for a thread even if the loop is shut down meanwhile: it can't be stopped."""
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((future,))
    return future.result()


# -- SQL in files -----------------------------------------------------------------


def read_migrations(package: str, fill: Mapping[str, str]) -> list[str]:
    """The numbered files of its folder `migrations`, in order."""
    folder = files(package).joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [_filled(folder.joinpath(name).read_text(), fill) for name in names]


def read_queries(package: str, fill: Mapping[str, str]) -> dict[str, str]:
    """The statements of its `queries.sql`, each under its name."""
    queries = {}
    for part in files(package).joinpath("queries.sql").read_text().split("-- name: ")[1:]:
        name, _, sql = part.partition("\n")
        queries[name.strip()] = _filled(sql, fill).strip()
    return queries


def one_of(column: str, words: Iterable[StrEnum]) -> str:
    """The condition that a column has one of these words."""
    return " OR ".join(f"{column} = '{word}'" for word in sorted(words))


def _filled(sql: str, fill: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: fill[found[1]], sql)


# -- copying a file while others write it --------------------------------------------


class Snapshot:
    """One committed state of a database file, from `begin` to `end` or `close`.

    Writers are not blocked: the file is in WAL mode. The schema may be older than ours.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.path = path
        with storage_errors(path):
            self._connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            try:
                self._connection.set_busy_timeout(5000)
                check_version(self._connection, path, schema)
                version = self._connection.pragma("user_version")
            except BaseException:
                self._connection.close()
                raise
        self.is_current = version == len(schema.migrations())

    def begin(self) -> None:
        with storage_errors(self.path):
            # A transaction has a state of the file only from its first read on.
            self._connection.execute("BEGIN; SELECT count(*) FROM sqlite_schema").fetchall()

    def end(self) -> None:
        with storage_errors(self.path):
            self._connection.execute("ROLLBACK")

    @property
    def change(self) -> int:
        """Another number after each commit of others; of the state that is held, if one is."""
        with storage_errors(self.path):
            number: int = self._connection.pragma("data_version")
            return number

    def copy(self, to: Path) -> None:
        """Write this state to a new file that needs no write-ahead log."""
        os.close(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with storage_errors(to):
            copy = apsw.Connection(str(to))
            try:
                with copy.backup("main", self._connection, "main") as backup:
                    while not backup.done:
                        backup.step(1000)
                copy.pragma("journal_mode", "delete")
            finally:
                copy.close()

    def read(self, sql: str) -> Iterator[str]:
        """The first column of a query's rows."""
        with storage_errors(self.path):
            for row in self._connection.execute(sql):
                yield row[0]

    def close(self) -> None:
        self._connection.close()
