"""A PostgreSQL whose disk is full: submissions are refused until there is space."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.chaos.disks import mount, tmpfs
from tests.support.postgres import PostgresServer

from penstock.adapters.postgres.store import PostgresBackend
from penstock.control.ledger import Ledger
from penstock.core.errors import StoreFull
from penstock.testing.aio import run_async
from penstock.testing.samples import accept, verdicts


@pytest.fixture
def disk(server: PostgresServer) -> Iterator[Path]:
    """A small disk, on which the database `small` is."""
    # Not below pytest's folder, which only its own user can enter.
    with tempfile.TemporaryDirectory(prefix="penstock-disk-") as folder:
        Path(folder).chmod(0o711)
        with tmpfs(Path(folder) / "disk", "size=24m") as made:
            owner = server.data.stat()
            shutil.chown(made, owner.st_uid, owner.st_gid)
            server.sql(f"CREATE TABLESPACE small LOCATION '{made}'")
            server.sql("CREATE DATABASE small TABLESPACE small")
            yield made
            server.sql("DROP DATABASE small WITH (FORCE)")
            server.sql("DROP TABLESPACE small")


async def _fill(store: Ledger, accepted: list[str]) -> None:
    while len(accepted) < 10_000:
        names = [f"j{len(accepted) + n}" for n in range(100)]
        payload = f"data:,{secrets.token_hex(1000)}"
        some = [accept(name, context_ptr=payload) for name in names]
        assert verdicts(await store.apply(some)) == "M" * 100
        accepted += names


@run_async
async def test_a_full_disk_refuses_jobs_and_loses_none(server: PostgresServer, disk: Path) -> None:
    store = Ledger(PostgresBackend(f"{server.url.rpartition('/')[0]}/small", lease=0))
    accepted: list[str] = []
    with pytest.raises(StoreFull, match="no space left") as refused:
        await _fill(store, accepted)
    assert "nothing was stored" in (refused.value.hint or "")
    assert sum((await store.tally()).values()) == len(accepted) > 0
    mount("-o", "remount,size=64m", str(disk))
    assert verdicts(await store.apply([accept("after")])) == "M"
    verified = await store.verify()
    assert (verified.jobs, verified.mismatches) == (len(accepted) + 1, ())
    await store.close()
