"""A database that crashes, fails over, times out or is behind a pooler: no accepted job is lost."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import asyncpg
import pytest
from tests.support.chaos.engines import Cluster, all_succeed, submitting
from tests.support.cli.commands import Penstock
from tests.support.postgres import PgBouncer, PostgresServer
from tests.support.waiting import eventually, soon

from penstock.adapters.postgres.store import PostgresBackend
from penstock.control.ledger import Ledger
from penstock.core.errors import Misconfigured, NotOwner, StoreFailed
from penstock.ports.store import Durability
from penstock.testing.aio import run_async
from penstock.testing.samples import accept, names, verdicts

pytestmark = pytest.mark.timeout(180)
"""Servers and engines are started; that takes a while where other tests run."""


@contextmanager
def own_folder() -> Iterator[Path]:
    """Not below pytest's folder, which only its own user can enter."""
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@contextmanager
def pair(*, synchronous: bool) -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary and its streaming replica."""
    with ExitStack() as stack:
        primary = PostgresServer(stack.enter_context(own_folder()))
        stack.callback(primary.stop)
        replica = PostgresServer(stack.enter_context(own_folder()), copy_of=primary)
        stack.callback(replica.stop)
        if synchronous:
            primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
            primary.sql("SELECT pg_reload_conf()")
        state, sql = (
            "sync" if synchronous else "async",
            "SELECT sync_state FROM pg_stat_replication",
        )
        eventually(lambda: primary.sql(sql) == f"{state}\n")
        yield primary, replica


@pytest.fixture
def pooler(server: PostgresServer) -> Iterator[PgBouncer]:
    with own_folder() as folder:
        made = PgBouncer(folder, server)
        yield made
        made.stop()


@contextmanager
def engines(folder: Path, url: str, *names: str) -> Iterator[Cluster]:
    cluster = Cluster(folder, url)
    try:
        for name in names:
            cluster.start(name)
        yield cluster
    finally:
        cluster.close()


@contextmanager
def submitting_all_the_while(where: Penstock) -> Iterator[Callable[[], None]]:
    """Gives a function that waits until more jobs were accepted. At last, all have succeeded."""
    with submitting(where, StoreFailed) as ids:

        def go_on() -> None:
            count = len(ids)
            eventually(lambda: len(ids) > count + 20, within=40)

        go_on()
        yield go_on
    all_succeed(where, ids)


def both(primary: PostgresServer, replica: PostgresServer) -> str:
    """The URL that names both."""
    return primary.url.replace("/postgres", f",127.0.0.1:{replica.port}/postgres")


async def opened(url: str, lease: float = 60) -> Ledger:
    ledger = Ledger(PostgresBackend(url, lease=lease))
    await ledger.open()
    return ledger


# -- failover -------------------------------------------------------------------------


def test_a_killed_primary_with_a_synchronous_replica_loses_no_accepted_job(tmp_path: Path) -> None:
    with (
        pair(synchronous=True) as (primary, replica),
        engines(tmp_path, both(primary, replica), "a", "b") as cluster,
    ):
        here = cluster.command("b")
        assert here.json("db", "status")["synchronous"]
        with submitting_all_the_while(here) as go_on:
            primary.stop(signal.SIGKILL)
            replica.promote()
            go_on()


@run_async
async def test_an_engine_stops_writing_to_a_primary_that_lost_its_commits() -> None:
    with pair(synchronous=False) as (primary, replica):
        url = both(primary, replica)
        first = await opened(url)
        await first.apply([accept("a")])
        eventually(lambda: _jobs(replica) == "1\n")
        with pytest.raises(StoreFailed, match="is a replica"):
            await opened(replica.url)
        replica.sql("ALTER SYSTEM SET primary_conninfo = ''")
        replica.sql("SELECT pg_reload_conf()")
        eventually(lambda: primary.sql("SELECT count(*) FROM pg_stat_replication") == "0\n")
        await first.apply([accept("b")])
        await first.apply([accept("c")])
        primary.stop(signal.SIGKILL)
        with pytest.raises(StoreFailed, match="none of its servers is a primary"):
            await opened(url)
        replica.promote()
        with pytest.raises(NotOwner, match="has lost the last 2 commits"):
            await _apply_until_it_is_not_the_owner(first)
        await first.close()
        second = await opened(url)
        assert await names(second) == "a"
        assert verdicts(await second.apply([accept("d")])) == "M"
        assert (await second.verify()).mismatches == ()
        await second.close()


async def _apply_until_it_is_not_the_owner(store: Ledger) -> None:
    for _ in range(10):  # the first find that their connections are gone
        try:
            await store.apply([accept("e")])
        except NotOwner:
            raise
        except StoreFailed:
            continue


def _jobs(server: PostgresServer) -> str:
    return server.sql("SELECT count(*) FROM penstock.job")


# -- commits whose outcome is not known at once -----------------------------------------


@run_async
async def test_a_commit_that_the_server_still_works_on_is_waited_for(
    server: PostgresServer, url: str
) -> None:
    backend = PostgresBackend(url, lease=60)
    store = Ledger(backend)
    await store.apply([accept("a")])
    other = await _locking(url)
    committing = asyncio.create_task(store.apply([accept("b")]))
    await _waiting_for_locks(server, 1)
    assert backend._writer is not None
    backend._writer.terminate()  # the server goes on
    await _waiting_for_locks(server, 2)  # who asks for the outcome waits behind it
    await other.close()
    assert verdicts(await committing) == "M"
    assert verdicts(await store.apply([accept("c")])) == "M"
    assert await names(store) == "cba"
    assert (await store.verify()).mismatches == ()
    await store.close()


@run_async
async def test_a_statement_timeout_is_reported_and_leaves_nothing_behind(
    server: PostgresServer, url: str
) -> None:
    await (await opened(url)).close()
    server.sql("CREATE ROLE hasty SUPERUSER LOGIN; ALTER ROLE hasty SET statement_timeout = 500")
    store = await opened(url.replace("test@", "hasty@"))
    other = await _locking(url)
    with pytest.raises(StoreFailed, match="took too long") as refused:
        await store.apply([accept("a")])
    assert "statement_timeout" in (refused.value.hint or "")
    await other.close()
    assert verdicts(await store.apply([accept("b")])) == "M"
    assert await names(store) == "b"
    assert (await store.verify()).mismatches == ()
    await store.close()


async def _locking(url: str) -> asyncpg.Connection:
    """A session in whose transaction nobody else can write to the journal."""
    address, _, schema = url.partition("?schema=")
    other = await asyncpg.connect(address)
    await other.execute(f"BEGIN; LOCK {schema}.journal IN EXCLUSIVE MODE")
    return other


async def _waiting_for_locks(server: PostgresServer, count: int) -> None:
    sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    await soon(lambda: server.sql(sql) == f"{count}\n")


def test_a_killed_server_process_loses_no_accepted_job(
    server: PostgresServer, url: str, tmp_path: Path
) -> None:
    """PostgreSQL then ends all sessions, and recovers."""
    with (
        engines(tmp_path, url, "a") as cluster,
        submitting_all_the_while(cluster.command("a")) as go_on,
    ):
        for _ in range(3):
            server.kill_backend("%write_commit%")
            go_on()


# -- PgBouncer --------------------------------------------------------------------------


def test_engines_work_behind_a_pooler_in_transaction_mode(
    server: PostgresServer, pooler: PgBouncer, url: str, tmp_path: Path
) -> None:
    schema = url.partition("schema=")[2]
    with engines(tmp_path, f"{pooler.url}?schema={schema}", "a", "b") as cluster:
        here = cluster.command("b")
        with submitting_all_the_while(here) as go_on:
            server.stop(signal.SIGKILL)
            server.start()
            go_on()
            cluster.engines["a"].kill()
            go_on()
        given = "'job.text.shout', '{\"text\": \"sql\"}', 'by-sql'"
        server.sql(f"SELECT {schema}.submit({given})")
        eventually(lambda: "by-sql" in here.out("ps", "--all", "-o", "name"))
        assert here.out("result", "by-sql", "--timeout", "30s") == '"SQL!"'
        assert not here.json("db", "verify")["mismatches"]
        listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        assert server.sql(listening) == "0\n"


@run_async
async def test_a_weaker_durability_is_refused_behind_a_pooler(pooler: PgBouncer) -> None:
    with pytest.raises(Misconfigured, match="can't be set through a connection pooler"):
        await Ledger(PostgresBackend(pooler.url, durability=Durability.OS)).open()
