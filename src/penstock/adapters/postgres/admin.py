"""What an operator asks of a database: how it is, and jobs that another store had."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import asyncpg
from msgspec import Struct

from penstock.adapters.postgres.engines import STANDBY
from penstock.adapters.postgres.schema import (
    PARTITION,
    Address,
    connect,
    ensure_partitions,
    load_queries,
    migrate,
    migrations,
    translated,
    version_of,
)
from penstock.core.errors import Conflict

_ROWS = 5000
"""Rows that are copied at once."""


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


async def database_status(url: str) -> DatabaseStatus:
    """Raises StoreFailed."""
    at = Address.parse(url)
    try:
        db = await connect(at)
        try:
            return await _status(db, at)
        finally:
            await db.close()
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise translated(error, at) from error


async def _status(db: asyncpg.Connection, at: Address) -> DatabaseStatus:
    schema, version = at.schema, await version_of(db, at.schema)
    server = await db.fetchval("SHOW server_version")
    known = len(migrations(schema))
    if version is None or version < known:
        return DatabaseStatus(server=server, schema=schema, version=version, known=known)
    owner = await db.fetchrow(
        f"SELECT coalesce(nullif(address, ''), regexp_replace(holder, '^.* |:[^:]*$', '', 'g')),"
        f' epoch, "until" > clock_timestamp() FROM {schema}.owner'
    )
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


async def migrate_database(url: str) -> int:
    """Bring the schema up to date; answers how many migrations were applied."""
    at = Address.parse(url)
    try:
        db = await connect(at)
        try:
            return await migrate(db, at.schema)
        finally:
            await db.close()
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise translated(error, at) from error


TableRows = Iterable[tuple[str, Sequence[str], Iterable[tuple[Any, ...]]]]
"""Tables by name, with their columns and rows."""


async def fill_database(url: str, tables: TableRows, last_seq: int) -> dict[str, int]:
    """Copy all of it in one transaction; answers the rows by table.

    Raises Conflict if there are jobs already.
    """
    at = Address.parse(url)
    copied: dict[str, int] = {}
    try:
        db = await connect(at)
        try:
            await migrate(db, at.schema)
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
        finally:
            await db.close()
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise translated(error, at) from error
