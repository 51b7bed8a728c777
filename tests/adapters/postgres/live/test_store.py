"""The PostgreSQL backend, held to the contract of all backends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conformance.test_store import same_answers, searched, some_changes, some_query
from tests.support.postgres import PostgresServer

from penstock.adapters.memory.store import MemoryBackend
from penstock.adapters.postgres.store import PostgresBackend
from penstock.control.follower import Follower
from penstock.control.ledger import Ledger
from penstock.ports.store import Backend, Opened
from penstock.testing.aio import run_async
from penstock.testing.samples import T0
from penstock.testing.store import FallibleContract


class BackendOfTest(PostgresBackend):
    """Closes its connections when the test's event loop ends."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lease=0)
        self._ending: asyncio.Task[None] | None = None

    async def open(self, *, own: bool = True) -> Opened:
        self._ending = asyncio.create_task(self._end())
        return await super().open(own=own)

    async def _end(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await self.close()
            await asyncio.sleep(0)


class TestPostgres(FallibleContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: PostgresServer, url: str) -> None:
        self._server_of_test, self._url = server, url

    @pytest.fixture
    def store(self, tmp_path: Path, _server: None) -> Ledger:
        # Its connections end with the test's event loop.
        return Ledger(self.backend(tmp_path))

    def backend(self, folder: Path) -> Backend:
        return BackendOfTest(self._url)

    def successor(self, store: Ledger, folder: Path) -> Backend:
        return self.backend(folder)

    @contextmanager
    def failing(self, store: Ledger) -> Iterator[None]:
        """What PostgreSQL says when the disk is full."""
        assert isinstance(store.backend, PostgresBackend)
        schema, sql = store.backend.at.schema, self._server_of_test.sql
        sql(
            f"CREATE FUNCTION {schema}.fails() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN RAISE EXCEPTION 'no space left' USING ERRCODE = '53100'; END $$;"
            f"CREATE TRIGGER fails BEFORE INSERT ON {schema}.journal"
            f" EXECUTE FUNCTION {schema}.fails()"
        )
        try:
            yield
        finally:
            sql(f"DROP FUNCTION {schema}.fails CASCADE")

    @run_async
    async def test_errors_of_the_newest_jobs_are_searched(
        self, store: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("penstock.adapters.postgres.finding.MAX_SEARCHED", 2)
        await searched(store)


@pytest.mark.parametrize("seed", range(5))
@run_async
async def test_it_finds_the_same_as_the_backend_in_memory(url: str, seed: int) -> None:
    chance = random.Random(seed)
    changes = some_changes(chance, 120)
    memory, database = Ledger(MemoryBackend()), Ledger(PostgresBackend(url, lease=0))
    for start in range(0, len(changes), 9):
        some = changes[start : start + 9]
        assert await memory.apply(some) == await database.apply(some)
    assert await same_answers(memory, database, chance) > 300
    assert await memory.events(0, 10_000) == await database.events(0, 10_000)

    await database.close()
    await memory.close()
    memory, database = Ledger(memory.backend), Ledger(PostgresBackend(url, lease=0))
    assert await same_answers(memory, database, chance) > 300

    awaited = {"j003", "j004", "j005"}
    pruned = [await each.prune(T0 + 100, 30, awaited) for each in (memory, database)]
    assert pruned[0] == pruned[1]
    assert pruned[0].jobs == 30
    assert await same_answers(memory, database, chance) > 100
    assert await memory.events(0, 10_000) == await database.events(0, 10_000)
    assert (await database.verify()).mismatches == ()
    await database.close()


@pytest.mark.parametrize("replay", [1, 4, 1000])
@run_async
async def test_a_follower_reads_what_the_owner_does(
    url: str, replay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the owner brings rows up to date, and however seldom the follower looks."""
    monkeypatch.setattr("penstock.control.ledger._REPLAY_PAGES", replay)
    chance = random.Random(replay)
    changes = some_changes(chance, 120)
    owner = Ledger(PostgresBackend(url, lease=0))
    await owner.open()
    backend = PostgresBackend(url)
    follower, behind = Follower(backend), 0
    for change in changes:
        await owner.apply([change])
        behind += bool(owner.lagging)
        if chance.random() < 0.3:
            query = some_query(chance, 120)
            assert await follower.find(query) == await owner.find(query)
            assert await follower.get("j007") == await owner.get("j007")
            assert await follower.fetch(range(50)) == await owner.fetch(range(50))
    assert replay == 1 or behind > 50
    assert await same_answers(owner, follower, chance) > 300
    await owner.close()
    owner = Ledger(PostgresBackend(url, lease=0))
    assert await same_answers(owner, follower, chance) > 300
    await owner.close()
    await follower.close()
