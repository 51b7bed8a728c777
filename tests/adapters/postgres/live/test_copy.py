"""An engine on SQLite that moves to PostgreSQL, and what an operator can see there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock import App, Client, Conflict, JobFailed, NotFound
from penstock.adapters.postgres.admin import database_status
from penstock.app.databases import copy_to_postgres
from penstock.config import Settings
from penstock.core.errors import AlreadyRunning
from penstock.ports.store import AuditQuery

app = App()


@app.job("job.copy.double", idempotent=True)
def double(n: int) -> int:
    if n < 0:
        raise ValueError("negative")
    print(f"doubling {n}")
    return 2 * n


def everything(client: Client) -> dict[str, object]:
    """All that can be asked about jobs."""
    jobs = client.jobs(limit=1000, tries=True)
    api = client.api

    async def ask() -> dict[str, object]:
        return {
            "records": {job.job_id: await api.get(job.job_id) for job in jobs},
            "histories": {job.job_id: await api.history(job.job_id) for job in jobs},
            "logs": {job.job_id: await api.read_log(job.job_id) for job in jobs},
            "schedules": [view.schedule for view in await api.schedules.list()],
            "keys": await api.keys.list(),
            "audit": await api.audit.read(AuditQuery(limit=1000)),
            "tally": (await api.status()).tally,
        }

    return client._engine.run(lambda _: ask())


def test_nothing_is_lost_when_an_engine_moves_from_sqlite_to_postgresql(
    tmp_path: Path, url: str
) -> None:
    data = tmp_path / "data"
    with app.run(data) as client:
        for n in range(20):
            assert double.submit(n).result(30) == 2 * n
        with pytest.raises(JobFailed):
            double.submit(-1).result(30)
        later = client.submit("job.copy.double", {"n": 100}, delay=3600)
        client.keys.create("ann", ("submit",))
        before = everything(client)
    settings = Settings(data_dir=data)
    copied = asyncio.run(copy_to_postgres(settings, url))
    assert copied["done"] == 21
    assert copied["job"] == 1
    with app.run(data, store=url) as client:
        assert everything(client) == before
        assert client.get(later.job_id).state == "SCHEDULED"
        assert double.submit(50).result(30) == 100
        assert not client._engine.run(lambda api: api.verify()).mismatches
    with pytest.raises(Conflict, match="holds jobs already"):
        asyncio.run(copy_to_postgres(settings, url))
    status = asyncio.run(database_status(url))
    assert (status.version, status.owned, status.open_jobs) == (status.known, False, 1)


def test_a_running_engine_and_an_empty_folder_are_refused(tmp_path: Path, url: str) -> None:
    with app.run(tmp_path / "data"), pytest.raises(AlreadyRunning):
        asyncio.run(copy_to_postgres(Settings(data_dir=tmp_path / "data"), url))
    with pytest.raises(NotFound):
        asyncio.run(copy_to_postgres(Settings(data_dir=tmp_path / "none"), url))
    assert asyncio.run(database_status(url)).version is None
