"""One owner at a time, whatever happens to it, to its connection or to the server."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.support.postgres import PostgresServer

from penstock.adapters.postgres.store import PostgresBackend
from penstock.control.ledger import Ledger
from penstock.core.errors import AlreadyRunning, Misconfigured, StoreFailed
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.testing.aio import run_async
from penstock.testing.samples import accept, move, names, verdicts

_LEASE = 1.0


class Paused(PostgresBackend):
    """An owner that stops renewing its lease, as a process under SIGSTOP."""

    async def _renew(self) -> None:
        await asyncio.Event().wait()


async def opened(backend: PostgresBackend) -> Ledger:
    ledger = Ledger(backend)
    await ledger.open()
    return ledger


class Lock:
    """The lock of a data directory, as far as the backend knows it."""

    def close(self) -> None:
        pass


@run_async
async def test_a_second_engine_is_refused_while_the_first_lives(url: str) -> None:
    first = await opened(PostgresBackend(url, lease=_LEASE, address="penstock://one:7480"))
    await asyncio.sleep(2 * _LEASE)  # it was renewed meanwhile
    with pytest.raises(AlreadyRunning, match="penstock://one"):
        await Ledger(PostgresBackend(url, lease=_LEASE, patience=0)).open()
    assert verdicts(await first.apply([accept("a")])) == "M"
    await first.close()
    second = await opened(PostgresBackend(url, lease=60, patience=0))
    assert await names(second) == "a"
    await second.close()


@run_async
async def test_an_owner_that_was_silent_for_too_long_is_replaced_and_can_write_no_more(
    url: str,
) -> None:
    first = await opened(Paused(url, lease=_LEASE))
    await first.apply([accept("a"), move("a", JobEvent.SCHEDULE, JobEvent.DISPATCH)])
    second = await opened(PostgresBackend(url, lease=_LEASE))
    with pytest.raises(StoreFailed, match="another engine owns"):
        await first.apply([accept("b")])
    with pytest.raises(StoreFailed, match="another engine owns"):
        await first.prune(1e12, limit=10)
    (job,) = await second.unfinished()
    assert (job.job_id, job.state, job.attempt) == ("a", JobState.DISPATCHED, 1)
    assert verdicts(await second.apply([accept("b")])) == "M"
    assert (await second.verify()).mismatches == ()
    await first.backend.close()
    await second.close()


@run_async
async def test_an_engine_that_was_killed_is_replaced_at_once_by_the_next_one_on_its_folder(
    url: str,
) -> None:
    first = await opened(Paused(url, lease=60, instance="machine:folder", lock=Lock()))
    await first.apply([accept("a")])
    for other in ("machine:another", "machine:folder2"):
        with pytest.raises(AlreadyRunning):
            await opened(PostgresBackend(url, patience=0, instance=other, lock=Lock()))
    second = await opened(PostgresBackend(url, patience=0, instance="machine:folder", lock=Lock()))
    assert await names(second) == "a"
    with pytest.raises(StoreFailed, match="another engine owns"):
        await first.apply([accept("b")])
    await first.backend.close()
    await second.close()


@run_async
async def test_an_owner_hears_by_itself_that_it_was_replaced(
    url: str, server: PostgresServer
) -> None:
    backend = PostgresBackend(url, lease=_LEASE)
    first = await opened(backend)
    server.sql(f"UPDATE {backend.at.schema}.owner SET epoch = epoch + 1, holder = 'other'")
    async with asyncio.timeout(30):
        while not backend._lost:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    with pytest.raises(StoreFailed, match="another engine owns"):
        await first.apply([accept("a")])
    await first.backend.close()


class Forgetful(PostgresBackend):
    """Loses the answer to a commit: `before` or `after` the server has it."""

    when = ""

    async def _to_the_end(self, work: Any) -> Any:
        if self.when == "before":
            work.close()
        else:
            answer = await super()._to_the_end(work)
        if not self.when:
            return answer
        self.when = ""
        assert self._writer is not None
        self._writer.terminate()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle")


@pytest.mark.parametrize("when", ["before", "after"])
@run_async
async def test_a_commit_whose_answer_was_lost_is_answered_by_what_is_stored(
    url: str, when: str
) -> None:
    backend = Forgetful(url, lease=60)
    store = await opened(backend)
    await store.apply([accept("a")])
    backend.when = when
    if when == "before":
        with pytest.raises(StoreFailed):
            await store.apply([accept("b")])
    else:
        assert verdicts(await store.apply([accept("b")])) == "M"
    assert verdicts(await store.apply([accept("c")])) == "M"
    assert await names(store) == ("cba" if when == "after" else "ca")
    assert (await store.verify()).mismatches == ()
    await store.close()


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """One that may be stopped."""
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder:
        server = PostgresServer(Path(folder))
        yield server
        server.stop()


@run_async
async def test_a_server_that_crashes_and_comes_back_loses_nothing(
    own_server: PostgresServer,
) -> None:
    store = await opened(PostgresBackend(own_server.url, lease=60))
    acknowledged = []
    for n in range(20):
        await store.apply([accept(f"a{n}")])
        acknowledged.append(f"a{n}")
    own_server.stop(signal.SIGQUIT)
    with pytest.raises(StoreFailed, match="can't reach"):
        await store.apply([accept("lost")])
    with pytest.raises(StoreFailed):
        await store.get("a-job-that-is-not-in-memory")
    own_server.start()
    assert verdicts(await store.apply([accept("b")])) == "M"
    assert {job.job_id for job in await store.unfinished()} == {*acknowledged, "b"}
    assert (await store.verify()).mismatches == ()
    await store.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://localhost/x", "not the URL of a PostgreSQL database"),
        ("postgresql://localhost/x?schema=Robert;DROP", "invalid schema name"),
    ],
)
def test_a_bad_address_is_refused(url: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        PostgresBackend(url)


@run_async
async def test_a_server_that_is_not_there_and_a_database_that_is_not_there_are_said(
    server: PostgresServer,
) -> None:
    for url, said in (
        ("postgresql://test@127.0.0.1:9/postgres", "can't reach postgresql://127.0.0.1:9"),
        (server.url.replace("/postgres", "/nothing"), "/nothing does not exist"),
    ):
        with pytest.raises(StoreFailed, match=said):
            await Ledger(PostgresBackend(url)).open()
