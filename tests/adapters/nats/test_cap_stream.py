"""What is sent over CAP while the engine is away is kept by JetStream, and counts once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from cap.client import submit_job
from cap.pb.cordum.agent.v1 import job_pb2
from tests.support.cap import echo, packet_of, plane
from tests.support.nats import NatsServer
from tests.support.waiting import soon

from penstock.adapters.nats import stream
from penstock.adapters.nats.cap import CapBridge
from penstock.lifecycles.canonical import JobState
from penstock.testing.aio import run_async


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """With a stream that no other test has."""
    folder = tmp_path / "nats"
    folder.mkdir()
    started = NatsServer(folder)
    yield started
    started.kill()


@asynccontextmanager
async def client_of(server: NatsServer) -> AsyncIterator[Any]:
    client = await nats.connect(server.url)
    yield client
    await client.close()


async def submit(client: Any, job_id: str) -> None:
    request = job_pb2.JobRequest(job_id=job_id, topic="job.cap.echo")
    await submit_job(client, request, f"trace-{job_id}", "client")
    await client.flush()


async def unacknowledged(client: Any, name: str = stream.NAME) -> int:
    """Messages that the engine has not acknowledged."""
    told = await client.jetstream().consumers_info(name)
    return sum(one.num_pending + one.num_ack_pending for one in told)


async def is_empty(client: Any, name: str = stream.NAME) -> None:
    async with asyncio.timeout(20):
        while await unacknowledged(client, name):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@run_async
async def test_an_engine_that_stops_acknowledges_what_it_has_dropped(
    server: NatsServer, tmp_path: Path
) -> None:
    async with client_of(server) as client:
        async with plane(tmp_path / "data", server) as cap:
            for n in range(200):
                await client.publish("sys.job.submit", packet_of(f"client-{n}").SerializeToString())
            await client.flush()
            await soon(lambda: cap.bridge.rejected.total() == 200)
        await is_empty(client)


@run_async
async def test_a_job_that_is_submitted_while_the_engine_is_away_runs_later(
    server: NatsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    async with plane(folder, server):
        pass
    async with client_of(server) as client:
        for n in range(20):
            await submit(client, f"away-{n}")
        ran: list[str] = []

        async def work(request: Any) -> Any:
            ran.append(request.job_id)
            return await echo(request)

        async with plane(folder, server) as cap, cap.worker(work):
            for n in range(20):
                assert (await cap.done(f"away-{n}")).state is JobState.SUCCEEDED
            await is_empty(client)
        assert sorted(ran) == sorted(f"away-{n}" for n in range(20))


@run_async
async def test_a_result_that_is_sent_while_the_engine_is_away_counts(
    server: NatsServer, tmp_path: Path
) -> None:
    folder, gate = tmp_path / "data", asyncio.Event()
    given: list[str] = []

    async def work(request: Any) -> Any:
        given.append(request.job_id)
        await gate.wait()
        return await echo(request)

    async with client_of(server) as client:
        watched = await client.subscribe("sys.job.result")
        async with plane(folder, server) as cap:
            async with cap.worker(work):
                await cap.submit("long")
                await soon(lambda: given)
                await cap.engine.stop()
                gate.set()
                await watched.next_msg(20)
            async with plane(folder, server) as again:
                job = await again.done("long")
                assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
                await is_empty(client)
        assert given == ["long"]


@run_async
async def test_what_comes_again_counts_once(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that dies after its commit has not acknowledged it."""
    monkeypatch.setattr(stream, "_ACK_WAIT", 0.2)
    folder, ran = tmp_path / "data", list[str]()

    async def work(request: Any) -> Any:
        ran.append(request.job_id)
        return await echo(request)

    async with client_of(server) as client:
        with pytest.MonkeyPatch.context() as mute:
            mute.setattr(CapBridge, "_acknowledge", lambda bridge, receipt: None)
            async with plane(folder, server) as cap, cap.worker(work):
                await cap.submit("once", budget=job_pb2.Budget(deadline_ms=60_000))
                await cap.done("once")
                assert await unacknowledged(client)
        async with plane(folder, server) as cap, cap.worker(work):
            await is_empty(client)
            await cap.submit("next")
            assert (await cap.done("next")).state is JobState.SUCCEEDED
            assert 205 not in cap.alerts()
            assert (await cap.done("once")).attempt == 1
    assert ran == ["once", "next"]


@run_async
async def test_a_stream_that_is_there_is_used(server: NatsServer, tmp_path: Path) -> None:
    """As a control plane before ours made it."""
    folder, ran = tmp_path / "data", list[str]()

    async def work(request: Any) -> Any:
        ran.append(request.job_id)
        return await echo(request)

    async with client_of(server) as client:
        await client.jetstream().add_stream(name="CORDUM_SYS", subjects=["sys.>"])
        await submit(client, "kept")
        for job_id in ("first", "second"):
            async with plane(folder, server) as cap, cap.worker(work):
                await cap.submit(job_id)
                for each in (job_id, "kept"):
                    assert (await cap.done(each)).state is JobState.SUCCEEDED
                await is_empty(client, "CORDUM_SYS")
        streams = await client.jetstream().streams_info()
        assert [one.config.name for one in streams] == ["CORDUM_SYS"]
    assert sorted(ran) == ["first", "kept", "second"]


@run_async
async def test_without_jetstream_the_loss_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = NatsServer(tmp_path, jetstream=False)
    try:
        async with plane(tmp_path / "data", server) as cap, cap.worker(echo):
            assert "has no JetStream: submissions and results that are sent" in caplog.text
            await cap.submit("j1")
            assert (await cap.done("j1")).state is JobState.SUCCEEDED
    finally:
        server.kill()


@run_async
async def test_the_stream_can_be_left_out(server: NatsServer, tmp_path: Path) -> None:
    async with (
        client_of(server) as client,
        plane(tmp_path / "data", server, **{"cap.jetstream": False}) as cap,
        cap.worker(echo),
    ):
        await cap.submit("j1")
        assert (await cap.done("j1")).state is JobState.SUCCEEDED
        assert await client.jetstream().streams_info() == []


@run_async
async def test_jobs_that_were_submitted_before_a_crash_of_the_server_are_kept(
    server: NatsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    async with plane(folder, server):
        pass
    async with client_of(server) as client:
        await submit(client, "kept")
        told = await client.jetstream().stream_info(stream.NAME)
        assert told.state.messages == 1
    server.kill()
    server.start()
    async with plane(folder, server) as cap, cap.worker(echo):
        assert (await cap.done("kept")).state is JobState.SUCCEEDED
