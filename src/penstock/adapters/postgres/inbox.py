"""Jobs that users submitted with SQL: `SELECT penstock.submit('job.topic', '{"n": 1}')`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import asyncpg

from penstock.adapters.postgres.schema import Address, PooledConnection, connect, translated
from penstock.core.shards import Shard
from penstock.ports.inbox import InboxRow

_POLL = 1.0
"""Seconds after which it is looked even if no notification came: one may be lost."""


class PostgresInbox:
    """See `penstock.ports.inbox.Inbox`."""

    def __init__(self, url: str, shard: Shard) -> None:
        """All shards share the inbox of shard 0, at this URL: each takes rows of its tenants."""
        self._at = Address.parse(url)
        self._mine = _in_shard(shard) if shard.count > 1 else ""
        self._db: asyncpg.Connection | None = None
        self._notified = asyncio.Event()

    async def wait(self) -> None:
        """Until a job may have come."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._notified.wait(), _POLL)
        self._notified.clear()

    async def read(self, limit: int) -> list[InboxRow]:
        found = await self._fetch(
            f"SELECT n, job_id, topic, tenant, input, options, by_user FROM {self._at.schema}.inbox"
            f" WHERE problem IS NULL {self._mine} ORDER BY n LIMIT $1",
            limit,
        )
        return [
            InboxRow(number, job_id, topic, tenant, given, json.loads(options), user)
            for number, job_id, topic, tenant, given, options, user in found
        ]

    async def remove(self, numbers: Sequence[int]) -> None:
        await self._fetch(f"DELETE FROM {self._at.schema}.inbox WHERE n = ANY ($1)", [*numbers])

    async def refuse(self, number: int, problem: str) -> None:
        sql = f"UPDATE {self._at.schema}.inbox SET problem = $2 WHERE n = $1"
        await self._fetch(sql, number, problem.replace("\0", ""))

    async def _fetch(self, sql: str, *values: Any) -> list[Any]:
        """Raises StoreFailed."""
        try:
            if self._db is None or self._db.is_closed():
                self._db = await connect(self._at)
                if not isinstance(self._db, PooledConnection):
                    await self._db.add_listener(f"{self._at.schema}_inbox", self._hear)
            found: list[Any] = await self._db.fetch(sql, *values)
            return found
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise translated(error, self._at) from error

    def _hear(self, *_: object) -> None:
        self._notified.set()

    async def close(self) -> None:
        if self._db is not None:
            self._db.terminate()


def _in_shard(shard: Shard) -> str:
    """The same as `penstock.core.shards.shard_of`."""
    digest = "sha256(convert_to(tenant, 'UTF8'))"
    number = f"(get_byte({digest}, 0) * 256 + get_byte({digest}, 1)) % {shard.count}"
    return f"AND {number} = {shard.number}"
