"""Migrations: each may be applied while engines of the version before go on."""

from __future__ import annotations

import pytest

from penstock.adapters.postgres import schema
from penstock.adapters.postgres.admin import migrate_database
from penstock.adapters.postgres.store import PostgresBackend
from penstock.control.ledger import Ledger
from penstock.lifecycles.canonical import JobEvent
from penstock.testing.aio import run_async
from penstock.testing.samples import accept, move, names, verdicts

KNOWN = len(schema.migrations("penstock"))


@pytest.mark.parametrize("version", range(1, KNOWN))
@run_async
async def test_an_engine_of_an_earlier_schema_goes_on_while_it_is_migrated(
    url: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = schema.migrations
    with monkeypatch.context() as old:
        old.setattr(schema, "migrations", lambda name: every(name)[:version])
        owner = Ledger(PostgresBackend(url, lease=0))
        await owner.open()
        reader = Ledger(PostgresBackend(url), own=False)
        assert verdicts(await owner.apply([accept("a"), accept("b")])) == "MM"
        old.undo()
        assert await migrate_database(url) == KNOWN - version
        old.setattr(schema, "migrations", lambda name: every(name)[:version])
        given = move("a", JobEvent.SCHEDULE, JobEvent.DISPATCH)
        assert verdicts(await owner.apply([given, accept("c")])) == "MM"
        assert await names(owner) == "cba"
        await owner.close()
        await reader.open()  # one of the old version that is started again
        assert await names(reader) == "cba"
        await reader.close()
    newer = Ledger(PostgresBackend(url, lease=0))
    assert await names(newer) == "cba"
    assert verdicts(await newer.apply([move("a", JobEvent.START, attempt=1)])) == "M"
    assert (await newer.verify()).mismatches == ()
    await newer.close()
