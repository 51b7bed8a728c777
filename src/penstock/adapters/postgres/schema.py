"""Connections, migrations, partitions and errors of a PostgreSQL database."""

from __future__ import annotations

import re
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg

from penstock.core.errors import Misconfigured, NotOwner, StoreCorrupt, StoreFailed, StoreFull
from penstock.core.shards import Shard
from penstock.lifecycles.canonical import JobState
from penstock.ports import rows
from penstock.ports.process import keep_alive
from penstock.ports.store import Durability

PARTITION = 1_000_000
"""Jobs of one partition of ended jobs."""
_LOCK = 0x50454E53
"""The advisory lock of migrations: "PENS"."""
_CONNECT = 10.0
"""Seconds that a connection may take."""
_SILENCE = 15.0
"""Seconds after which a server that acknowledges nothing is given up."""
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,40}")
UNREACHABLE = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
)
"""The server ended the connection, or refused it: it stops, restarts or crashed."""
_SYNCHRONOUS = {Durability.DISK: "on", Durability.OS: "off", Durability.MEMORY: "off"}


class Address(NamedTuple):
    """A database, and the schema that the jobs are in."""

    urls: tuple[str, ...]
    """One for each server that may be the primary."""
    schema: str
    name: str
    """As it may be shown: without user and password."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """From `postgresql://host,other/database?schema=name`."""
        parts = urlsplit(url)
        if parts.scheme not in ("postgresql", "postgres"):
            raise Misconfigured(
                f"not the URL of a PostgreSQL database: {parts.scheme or url!r}",
                hint="use postgresql://user@host:port/database",
            )
        options = dict(parse_qsl(parts.query))
        schema = options.pop("schema", "penstock")
        if not _NAME.fullmatch(schema):
            raise Misconfigured(
                f"invalid schema name {schema!r}",
                hint="use lower-case letters, digits and underscores",
            )
        user, _, hosts = parts.netloc.rpartition("@")
        bare = parts._replace(query=urlencode(options))
        urls = [
            urlunsplit(bare._replace(netloc=f"{user}@{host}" if user else host))
            for host in hosts.split(",")
        ]
        at = hosts or options.get("host", "localhost")
        return cls(tuple(urls), schema, f"postgresql://{at}{parts.path}")


class PooledConnection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """Through a pooler such as PgBouncer: each transaction may be in another session.

    So nothing that belongs to a session works: prepared statements, LISTEN, SET.
    """


async def connect(
    at: Address, *, durability: Durability = Durability.DISK, timeout: float = _CONNECT
) -> asyncpg.Connection:
    """A new connection; if there are several servers, to the first that can be written to."""
    failures: list[Exception] = []
    for url in at.urls:
        try:
            db = await _connected(url, timeout / len(at.urls), primary=len(at.urls) > 1)
            break
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as failed:
            failures.append(failed)
    else:
        raise failures[-1]
    if durability is not Durability.DISK:
        if isinstance(db, PooledConnection):
            db.terminate()
            raise Misconfigured(
                f"durability {durability.value!r} can't be set through a connection pooler",
                hint="connect to PostgreSQL itself, or set synchronous_commit there",
            )
        await db.execute(f"SET synchronous_commit = {_SYNCHRONOUS[durability]}")
    return db


async def _connected(url: str, timeout: float, *, primary: bool) -> asyncpg.Connection:
    wanted = {"target_session_attrs": "read-write"} if primary else {}
    open_one = partial(asyncpg.connect, url, timeout=timeout, **wanted)
    try:
        # Whether there is a pooler is found out without anything that a pooler would break.
        db = await open_one(connection_class=PooledConnection, statement_cache_size=0)
        try:
            pid = await db.fetchval("SELECT pg_backend_pid()", timeout=timeout)
        except BaseException:
            db.terminate()
            raise
        if pid == db.get_server_pid():
            db.terminate()
            db = await open_one()
    except asyncpg.TargetServerAttributeNotMatched:
        raise ConnectionError("none of its servers is a primary") from None
    keep_alive(db._transport.get_extra_info("socket"), _SILENCE)  # it has no public name
    return db


def translated(error: BaseException, at: Address) -> StoreFailed:
    """What to tell of an error of PostgreSQL."""
    state = getattr(error, "sqlstate", None) or ""
    text = str(error) or type(error).__name__
    if state == "PS001":
        return NotOwner(f"another engine owns {at.name} now")
    if state == "53100":
        return StoreFull(f"no space left for {at.name}", hint="free some space; nothing was stored")
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return StoreFailed(f"{at.name} refuses this user: {text}", hint="check user and password")
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return StoreFailed(f"{at.name} does not exist", hint="create it with createdb")
    if state in ("42703", "42704", "42883", "42P01", "42P07"):  # missing, or there already
        return StoreCorrupt(
            f"the schema {at.schema} of {at.name} is not one of Penstock's: {text}",
            hint="choose another one with ?schema=NAME, or restore a backup",
        )
    if state == "57014":
        return StoreFailed(
            f"{at.name} ended a statement that took too long: {text}",
            hint="raise statement_timeout for this user",
        )
    if state == "25006":
        return StoreFailed(f"{at.name} is a replica", hint="name the primary in the URL, too")
    if isinstance(error, (OSError, TimeoutError, *UNREACHABLE)):
        return StoreFailed(
            f"can't reach {at.name}: {text}", hint="check that PostgreSQL runs there"
        )
    return StoreFailed(f"the database {at.name} refused: {text}")


# -- SQL in files -----------------------------------------------------------------


@cache
def load_queries(schema: str) -> dict[str, str]:
    text = files("penstock.adapters.postgres").joinpath("queries.sql").read_text()
    queries = {}
    for part in text.split("-- name: ")[1:]:
        name, _, sql = part.partition("\n")
        queries[name.strip()] = _filled(sql, {"schema": schema, "job": rows.COLUMNS}).strip()
    return queries


def migrations(schema: str) -> list[str]:
    """The numbered migrations, in order."""
    codes = rows.STATE_CODES
    fill = {
        "schema": schema,
        "states": ", ".join(f"({code}, '{state}')" for state, code in codes.items()),
        "first_final": str(rows.FIRST_FINAL),
        "last_state": str(max(codes.values())),
        "succeeded": str(codes[JobState.SUCCEEDED]),
    }
    folder = files("penstock.adapters.postgres").joinpath("migrations")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [_filled(folder.joinpath(name).read_text(), fill) for name in names]


def _filled(sql: str, fill: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: fill[found[1]], sql)


# -- migrations -------------------------------------------------------------------


async def version_of(db: asyncpg.Connection, schema: str) -> int | None:
    """The number of migrations that were applied; None if there is nothing of ours."""
    if await db.fetchval("SELECT to_regclass($1)", f"{schema}.migration") is None:
        return None
    found: int = await db.fetchval(f"SELECT coalesce(max(number), 0) FROM {schema}.migration")
    return found


async def migrate(db: asyncpg.Connection, schema: str) -> int:
    """Apply what is missing, one numbered file at a time; answers how many were applied."""
    known = migrations(schema)
    if await version_of(db, schema) == len(known):
        return 0
    async with db.transaction():
        await db.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        await db.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        await db.execute(
            f"CREATE TABLE IF NOT EXISTS {schema}.migration"
            " (number integer PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())"
        )
        version = await version_of(db, schema) or 0
        for number, sql in enumerate(known[version:], start=version + 1):
            await db.execute(sql)
            await db.execute(f"INSERT INTO {schema}.migration (number) VALUES ($1)", number)
    await db.reload_schema_state()
    return len(known) - version


async def check_version(db: asyncpg.Connection, at: Address) -> None:
    """Refuse a database that this version can't read."""
    version, known = await version_of(db, at.schema), len(migrations(at.schema))
    if version is None:
        raise StoreFailed(f"{at.name} holds no jobs yet", hint="start an engine on it once")
    if version < known:
        raise StoreFailed(
            f"{at.name} was written by an older Penstock (schema {version}, now {known})",
            hint="run penstock db migrate",
        )
    if version > known and await _is_broken(db, at.schema):
        raise StoreCorrupt(
            f"{at.name} was written by a newer Penstock (schema {version}, this one knows {known})",
            hint="upgrade Penstock",
        )


async def _is_broken(db: asyncpg.Connection, schema: str) -> bool:
    """Whether a newer schema has ceased to serve this version."""
    oldest = await db.fetchval(f"SELECT value FROM {schema}.mark WHERE name = 'oldest_schema'")
    return oldest is not None and oldest > len(migrations(schema))


# -- shards -----------------------------------------------------------------------


async def shard_in(db: asyncpg.Connection, schema: str) -> Shard:
    """Which shard of how many has its tables in this schema."""
    if await db.fetchval("SELECT to_regclass($1)", f"{schema}.mark") is None:
        return Shard()
    marks = dict(
        await db.fetch(f"SELECT name, value FROM {schema}.mark WHERE name IN ('shard', 'shards')")
    )
    return Shard(marks.get("shard", 0), marks.get("shards", 1))


async def set_shard(db: asyncpg.Connection, schema: str, shard: Shard) -> None:
    await db.execute(
        f"INSERT INTO {schema}.mark VALUES ('shard', $1), ('shards', $2)",
        *(shard.number, shard.count),
    )


# -- partitions -------------------------------------------------------------------


async def ensure_partitions(db: asyncpg.Connection, schema: str, seq: int) -> int:
    """Make the partitions for this number and the next million; answers up to which number."""
    first = seq // PARTITION
    for number in range(first, first + 2):
        name, low = f"{schema}.done_{number}", number * PARTITION
        if await db.fetchval("SELECT to_regclass($1)", name) is None:
            # Made apart and then attached: that waits for no reader.
            await db.execute(
                f"CREATE TABLE {name} (LIKE {schema}.done INCLUDING ALL);"
                f"ALTER TABLE {schema}.done ATTACH PARTITION {name}"
                f" FOR VALUES FROM ({low}) TO ({low + PARTITION})"
            )
    return (first + 2) * PARTITION - 1


async def drop_partitions(db: asyncpg.Connection, schema: str) -> int:
    """Drop the partitions below the oldest ended or open job; answers how many."""
    lowest = await db.fetchval(
        f"SELECT least((SELECT min(seq) FROM {schema}.job), (SELECT min(seq) FROM {schema}.done),"
        f" (SELECT value FROM {schema}.mark WHERE name = 'seq'))"
    )
    found: list[Any] = await db.fetch(
        "SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid"
        " WHERE inhparent = to_regclass($1)",
        f"{schema}.done",
    )
    old = [name for (name,) in found if (int(name.removeprefix("done_")) + 1) * PARTITION <= lowest]
    for name in old:
        await db.execute(f"ALTER TABLE {schema}.done DETACH PARTITION {schema}.{name} CONCURRENTLY")
        await db.execute(f"DROP TABLE {schema}.{name}")
    return len(old)
