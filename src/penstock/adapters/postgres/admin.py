"""What an operator asks of a database: how it is, and jobs that another store had."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import asyncpg
from msgspec import Struct
from msgspec.structs import replace

from penstock.adapters.postgres.engines import STANDBY
from penstock.adapters.postgres.schema import (
    PARTITION,
    Address,
    connect,
    ensure_partitions,
    load_queries,
    migrate,
    migrations,
    set_shard,
    shard_in,
    translated,
    version_of,
)
from penstock.core.errors import Conflict
from penstock.core.shards import Shard, shard_url

_ROWS = 5000
"""Rows that are copied at once."""


class ShardStatus(Struct, frozen=True, kw_only=True):
    """One of several shards."""

    number: int
    schema: str
    owner: str
    """The engine that owns it, or owned it last."""
    owned: bool
    """Whether its lease is valid."""
    epoch: int
    open_jobs: int


class DatabaseStatus(Struct, frozen=True, kw_only=True):
    server: str
    """The version of PostgreSQL."""
    schema: str
    version: int | None
    """The number of applied migrations; None if there is nothing of Penstock's."""
    known: int
    """The number of migrations that this Penstock knows."""
    owner: str = ""
    """The engine that owns it, or owned it last."""
    owned: bool = False
    """Whether its lease is valid."""
    epoch: int = 0
    open_jobs: int = 0
    ended_jobs: int = 0
    """About so many."""
    bytes: int = 0
    partitions: int = 0
    inbox: int = 0
    """Jobs submitted with SQL that the engine has not taken yet."""
    refused: int = 0
    """Those that it refused: the table `inbox` says why."""
    standbys: tuple[str, ...] = ()
    """The engines that would own it next."""
    replicas: tuple[str, ...] = ()
    """Each as `name: sync_state`."""
    synchronous: bool = False
    """Whether a commit waits for a replica: only then a failover loses nothing acknowledged."""
    shards: tuple[ShardStatus, ...] = ()
    """If there are several. Owner, epoch, jobs and size beside it are those of shard 0."""


@asynccontextmanager
async def _connected(at: Address) -> AsyncIterator[asyncpg.Connection]:
    """Raises StoreFailed."""
    try:
        db = await connect(at)
        try:
            yield db
        finally:
            await db.close()
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise translated(error, at) from error


async def database_status(url: str) -> DatabaseStatus:
    """Raises StoreFailed."""
    at = Address.parse(url)
    async with _connected(at) as db:
        found = await _status(db, at)
        count = (await shard_in(db, at.schema)).count
        if count == 1:
            return found
        shards = [await _shard_status(db, url, number) for number in range(count)]
        return replace(found, shards=tuple(shards))


async def _shard_status(db: asyncpg.Connection, url: str, number: int) -> ShardStatus:
    schema = Address.parse(shard_url(url, number)).schema
    owner, epoch, owned = await _owner(db, schema) or ("", 0, False)
    return ShardStatus(
        number=number,
        schema=schema,
        owner=owner,
        owned=owned,
        epoch=epoch,
        open_jobs=await db.fetchval(f"SELECT count(*) FROM {schema}.job"),
    )


async def _owner(db: asyncpg.Connection, schema: str) -> Any:
    return await db.fetchrow(
        f"SELECT coalesce(nullif(address, ''), regexp_replace(holder, '^.* |:[^:]*$', '', 'g')),"
        f' epoch, "until" > clock_timestamp() FROM {schema}.owner'
    )


async def _status(db: asyncpg.Connection, at: Address) -> DatabaseStatus:
    schema, version = at.schema, await version_of(db, at.schema)
    server = await db.fetchval("SHOW server_version")
    known = len(migrations(schema))
    if version is None or version < known:
        return DatabaseStatus(server=server, schema=schema, version=version, known=known)
    owner = await _owner(db, schema)
    parts = await db.fetchrow(
        "SELECT count(*), coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_inherits"
        " JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = to_regclass($1)",
        f"{schema}.done",
    )
    size = await db.fetchval(
        "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
        " WHERE relnamespace = to_regnamespace($1) AND relkind = 'r'",
        schema,
    )
    replicas = await db.fetch(
        "SELECT coalesce(application_name, ''), coalesce(sync_state, '') FROM pg_stat_replication"
    )
    waits = await db.fetchval("SHOW synchronous_standby_names")
    inbox = await db.fetchrow(
        "SELECT count(*) FILTER (WHERE problem IS NULL), count(problem)"
        f" FROM (SELECT problem FROM {schema}.inbox LIMIT 100000) AS some_rows"
    )
    engines = await db.fetch(load_queries(schema)["engines"])
    return DatabaseStatus(
        server=server,
        schema=schema,
        version=version,
        known=known,
        standbys=tuple(one["name"] for one in engines if one["holder"].startswith(STANDBY)),
        owner="" if owner is None else owner[0],
        epoch=0 if owner is None else owner[1],
        owned=owner is not None and owner[2],
        open_jobs=await db.fetchval(f"SELECT count(*) FROM {schema}.job"),
        ended_jobs=parts[1],
        partitions=parts[0],
        bytes=size,
        inbox=inbox[0],
        refused=inbox[1],
        replicas=tuple(f"{name}: {state}" for name, state in replicas),
        synchronous=bool(waits) and any(state in ("sync", "quorum") for _, state in replicas),
    )


async def migrate_database(url: str, shards: int | None = None) -> int:
    """Bring the schemas up to date; answers how many migrations were applied.

    With `shards`, make a new database of so many. Raises Conflict if it has another number.
    """
    at = Address.parse(url)
    async with _connected(at) as db:
        is_new = await version_of(db, at.schema) is None
        count = (await shard_in(db, at.schema)).count
        if shards not in (None, count):
            if not is_new and (count > 1 or await _was_used(db, at.schema)):
                raise Conflict(
                    f"{at.name} has {count} shards: their number is fixed when it is made",
                    hint="make another database, or another schema, as with ?schema=other",
                )
            return await _make_shards(db, url, shards or 1)
        applied = 0
        for number in range(count):
            schema = Address.parse(shard_url(url, number)).schema
            applied += await migrate(db, schema)
        return applied


async def shard_count(url: str) -> int:
    """How many shards a database has; 1 if there are no tables yet. Raises StoreFailed."""
    at = Address.parse(url)
    async with _connected(at) as db:
        return (await shard_in(db, at.schema)).count


async def _was_used(db: asyncpg.Connection, schema: str) -> bool:
    """Whether an engine ever ran on it, or somebody submitted with SQL."""
    found: bool = await db.fetchval(
        f"SELECT EXISTS (SELECT 1 FROM {schema}.owner) OR EXISTS (SELECT 1 FROM {schema}.inbox)"
    )
    return found


async def _make_shards(db: asyncpg.Connection, url: str, count: int) -> int:
    """All of them, or none."""
    applied = 0
    async with db.transaction():
        for number in range(count):
            schema = Address.parse(shard_url(url, number)).schema
            if number and await version_of(db, schema) is not None:
                raise Conflict(
                    f"the schema {schema} exists already",
                    hint="choose another name with ?schema=NAME",
                )
            applied += await migrate(db, schema)
            await set_shard(db, schema, Shard(number, count))
    return applied


TableRows = Iterable[tuple[str, Sequence[str], Iterable[tuple[Any, ...]]]]
"""Tables by name, with their columns and rows."""


async def fill_database(url: str, tables: TableRows, last_seq: int) -> dict[str, int]:
    """Copy all of it in one transaction; answers the rows by table.

    Raises Conflict if there are jobs already.
    """
    at = Address.parse(url)
    copied: dict[str, int] = {}
    async with _connected(at) as db:
        await migrate(db, at.schema)
        if (await shard_in(db, at.schema)).count > 1:
            raise Conflict(
                f"{at.name} has several shards, and jobs can be copied into one only",
                hint="copy into another schema, as with ?schema=other",
            )
        for seq in range(0, last_seq + 1, PARTITION):
            await ensure_partitions(db, at.schema, seq)
        async with db.transaction():
            await db.execute(f"LOCK TABLE {at.schema}.owner IN EXCLUSIVE MODE")
            if await db.fetchval(
                f"SELECT EXISTS (SELECT 1 FROM {at.schema}.journal)"
                f' OR EXISTS (SELECT 1 FROM {at.schema}.owner WHERE "until" > now())'
            ):
                raise Conflict(
                    f"{at.name} holds jobs already, or an engine runs on it",
                    hint="copy into an empty schema, as with ?schema=other",
                )
            for table, columns, rows in tables:
                left = iter(rows)
                while some := list(islice(left, _ROWS)):
                    await db.copy_records_to_table(
                        table, schema_name=at.schema, columns=columns, records=some
                    )
                    copied[table] = copied.get(table, 0) + len(some)
    return copied
