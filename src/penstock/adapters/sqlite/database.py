"""Opening the database file: one writer, the right durability, the newest schema.

The writer takes a lock file beside the database, so a second engine on the same folder is
refused rather than left to fight over pages. Readers open the file read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import apsw

from penstock.adapters.sqlite.texts import read_migrations
from penstock.core.errors import AlreadyRunning, StoreCorrupt, StoreFailed, StoreFull
from penstock.lifecycles.canonical import CANONICAL, HELD, TERMINAL, JobEvent, JobState
from penstock.ports.store import Durability

APPLICATION_ID = 0x50454E53  # "PENS": how we know a file to be ours
STATE_CODES = {state: code for code, state in enumerate(JobState, start=1)}
"""How a state is stored: its number on the CAP wire. Final states come last."""
AT_ONCE: tuple[tuple[Any, ...], ...] = (
    (JobState.PENDING, JobEvent.SCHEDULE, JobEvent.DISPATCH),
    (JobState.PENDING, JobEvent.SCHEDULE, JobEvent.DENY),
    (JobState.PENDING, JobEvent.SCHEDULE, JobEvent.PARK),
    (JobState.DISPATCHED, JobEvent.START, JobEvent.SUCCEED),
    (JobState.DISPATCHED, JobEvent.START, JobEvent.FAIL),
)
"""A state, and the events that usually happen to it together: they share a row."""
FIRST_FINAL = min(STATE_CODES[state] for state in TERMINAL)
DEAD = (STATE_CODES[JobState.FAILED], STATE_CODES[JobState.TIMEOUT])
"""What ended in these, and was not retried, is a dead letter."""
_ELSEWHERE = "choose another folder with --data (of a container worker: with jobs_dir)"
_SYNCHRONOUS = {Durability.DISK: "FULL", Durability.OS: "NORMAL", Durability.MEMORY: "OFF"}


class Schema(NamedTuple):
    """What a file of one kind must be: its mark, and the steps to its newest tables."""

    application_id: int
    migrations: Callable[[], list[str]]


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

    def close(self) -> None:
        self._file.close()


def open_writer(
    path: Path, durability: Durability, schema: Schema | None = None
) -> apsw.Connection:
    """Open, and bring up to date, a file of jobs or of another schema."""
    with storage_errors(path):
        connection = apsw.Connection(str(path))
        try:
            _prepare(connection, path, durability, schema or JOBS)
        except BaseException:
            connection.close()
            raise
    return connection


def open_reader(path: Path, schema: Schema | None = None) -> apsw.Connection:
    schema = schema or JOBS
    with storage_errors(path):
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
        connection.set_busy_timeout(5000)
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
    version = connection.pragma("user_version")
    if version or connection.execute("SELECT count(*) FROM sqlite_schema").get:
        _check_ours(connection, path, schema)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", _SYNCHRONOUS[durability])
    connection.pragma("cache_size", -65_536)
    connection.pragma("temp_store", "memory")
    connection.pragma("foreign_keys", True)
    connection.pragma("wal_autocheckpoint", 4000)
    migrate(connection, path, schema)


def _check_ours(connection: apsw.Connection, path: Path, schema: Schema) -> None:
    if connection.pragma("application_id") != schema.application_id:
        raise StoreCorrupt(
            f"{path} is a database, but not one of Penstock's",
            hint=_ELSEWHERE,
        )


def migrate(connection: apsw.Connection, path: Path, schema: Schema | None = None) -> None:
    """Bring the schema to the newest version, one numbered file at a time."""
    schema = schema or JOBS
    version = _known_version(connection, path, schema)
    for number, sql in enumerate(schema.migrations()[version:], start=version + 1):
        with connection:
            connection.execute(sql)
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


def migrations() -> list[str]:
    """The numbered migration files, in order, with the lifecycle's rules filled in."""
    return read_migrations("penstock.adapters.sqlite", _rules())


JOBS = Schema(APPLICATION_ID, lambda: migrations())  # looked up late: tests replace it


def _rules() -> dict[str, str]:
    codes = STATE_CODES.values()
    return {
        "states": _values(enumerate(JobState, start=1)),
        "paths": _values((code, *path) for code, path in enumerate(_paths(), start=1)),
        "moves": _values(path for path in _paths() if path[0] is not None),
        "last_state": str(max(codes)),
        "first_final": str(FIRST_FINAL),
        "scheduled": str(STATE_CODES[JobState.SCHEDULED]),
        "succeeded": str(STATE_CODES[JobState.SUCCEEDED]),
        "dead": ", ".join(map(str, DEAD)),
        "held": ", ".join(sorted(str(STATE_CODES[state]) for state in HELD)),
    }


def _paths() -> Iterator[tuple[str | None, str, str]]:
    """Every legal step, and the steps that are made at once: (before, events, after)."""
    yield None, CANONICAL.birth, CANONICAL.initial
    yield from CANONICAL
    for before, *events in AT_ONCE:
        after = before
        for event in events:
            after = CANONICAL.after(after, event)
        yield before, " ".join(events), after


def _values(rows: Iterable[tuple[object, ...]]) -> str:
    return ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else f"'{value}'"


@contextlib.contextmanager
def transaction(connection: apsw.Connection, path: Path) -> Generator[None]:
    """All of it or nothing."""
    with storage_errors(path), connection:
        yield


@contextlib.contextmanager
def storage_errors(path: Path) -> Generator[None]:
    """Turn SQLite's errors into ours, each with its cause and what to do."""
    try:
        yield
    except apsw.FullError as error:
        raise StoreFull(
            f"no space left for {path}", hint="free some space; nothing was stored"
        ) from error
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise StoreCorrupt(
            f"{path} is not a readable database: {error}",
            hint=f"restore it from a backup, or {_ELSEWHERE}",
        ) from error
    except (apsw.CantOpenError, apsw.ReadOnlyError, apsw.PermissionsError) as error:
        raise StoreFailed(
            f"can't write {path}: {error}",
            hint="check the permissions of the file and its folder",
        ) from error
    except apsw.IOError as error:
        if "disk" in str(error).lower() and _is_full(path):
            raise StoreFull(
                f"no space left for {path}", hint="free some space; nothing was stored"
            ) from error
        raise StoreFailed(f"the disk refused to write {path}: {error}") from error
    except apsw.Error as error:
        raise StoreFailed(f"the database {path} refused: {error}") from error


def _is_full(path: Path) -> bool:
    stat = os.statvfs(path.parent)
    return stat.f_bavail * stat.f_frsize < 1 << 20
