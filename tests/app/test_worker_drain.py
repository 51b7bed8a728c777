"""One worker is looked at, drained over HTTP, and leaves when what it ran has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.api.house import house
from tests.support.waiting import soon

from penstock import App
from penstock.adapters.http.engine_api import http_engine_api
from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import remote_api
from penstock.app.engine import Engine
from penstock.app.worker_process import WorkerProcess
from penstock.config import load
from penstock.core.errors import Conflict, NotFound
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import HANDSHAKE, Handshake
from penstock.ports.store import AuditQuery
from penstock.testing.aio import run_async


@run_async
async def test_a_drained_worker_finishes_what_it_runs_and_leaves(tmp_path: Path) -> None:
    app, goes_on = App(), asyncio.Event()

    @app.job("job.slow.wait")
    async def wait() -> str:
        await goes_on.wait()
        return "done"

    settings = load(flags={"data_dir": str(tmp_path / "data"), "http": "127.0.0.1:0"})
    async with Engine(settings) as engine:
        there = Address(path=settings.socket)
        site = WorkerProcess(app, there, settings, worker_id="w-1")
        working = asyncio.create_task(site.run())
        await site.welcomed()
        link = Link(there)
        http = http_engine_api(engine.url, settings.token_file.read_text())
        await link.connect()
        await http.connect()
        try:
            job = (await http.submit([_request()]))[0]
            held = engine.open_jobs.held
            await soon(lambda: job.job_id in held and held[job.job_id].state is JobState.RUNNING)
            assert (await http.worker("w-1")).held == 1
            assert (await http.drain_worker("w-1")).status == "draining"
            assert (await remote_api(link).worker("w-1")).status == "draining"
            assert (await http.pool("default")).name == "default"
            later = (await http.submit([_request()]))[0]
            await asyncio.sleep(0.3)
            assert not working.done()
            assert (await http.get(later.job_id)).state is JobState.SCHEDULED
            goes_on.set()
            await asyncio.wait_for(working, 10)  # without an error
            assert (await http.wait(job.job_id, 10)).state is JobState.SUCCEEDED
            with pytest.raises(NotFound):
                await http.worker("w-1")
            assert (await http.get(later.job_id)).state is JobState.SCHEDULED
            entries = await http.audit.read(AuditQuery(action="worker.drain"))
            assert [(one.subject, one.principal) for one in entries] == [("w-1", "owner")]
        finally:
            await http.close()
            await link.close()


def _request() -> JobRequest:
    return JobRequest(job_id="", topic="job.slow.wait", context_ptr=encode_data(b"{}"))


@run_async
async def test_the_engines_own_worker_and_unknown_ones_are_not_drained(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        api = one.engine.api
        local = (await api.workers())[0].worker_id
        with pytest.raises(Conflict, match="own process"):
            await api.drain_worker(local)
        assert (await api.worker(local)).status == "ready"
        answer = await one.call("POST", "/v1/workers/nobody/drain")
        assert (answer.status, answer.json["code"]) == (404, "NOT_FOUND")
        assert (await one.call("GET", "/v1/pools/nowhere")).status == 404


@run_async
async def test_a_worker_that_lost_its_connection_is_told_again_to_drain(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        engine = one.engine
        hello = Handshake("w-9", "default", ("job.other.x",), 1, {}, session="s1")
        engine.bus.publish(HANDSHAKE, [hello])
        await soon(lambda: "w-9" in engine.open_jobs.roster.workers)
        await engine.api.drain_worker("w-9")
        told: list[object] = []

        async def take(messages: list[object]) -> None:
            told.extend(type(message).__name__ for message in messages)

        engine.bus.subscribe("worker.w-9.jobs", take)  # type: ignore[arg-type]
        engine.bus.publish(HANDSHAKE, [hello])
        await soon(lambda: told == ["Welcomed", "Drain"])
        assert (await engine.api.worker("w-9")).status == "draining"
        # Another process of that name is not meant.
        roster = engine.open_jobs.roster
        roster.forget(roster.workers["w-9"])
        engine.bus.publish(
            HANDSHAKE, [Handshake("w-9", "default", ("job.other.x",), 1, {}, session="s2")]
        )
        await soon(lambda: "w-9" in roster.workers)
        assert (await engine.api.worker("w-9")).status == "ready"
