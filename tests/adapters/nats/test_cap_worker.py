"""A worker of ours under a control plane of others, which is made of the CAP SDK's own types."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
import redis.asyncio
from cap.pb.cordum.agent.v1 import buspacket_pb2, handshake_pb2, job_pb2
from cap.validate import validate_bus_packet
from tests.support.cap import packet_of
from tests.support.cli.commands import Penstock, said
from tests.support.nats import NatsServer
from tests.support.waiting import soon

import penstock
from penstock import App
from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.adapters.nats.pointers import PointerStore, RedisServer
from penstock.app.nats import CapWorkerProcess
from penstock.config import load
from penstock.testing.aio import run_async

SUCCEEDED, FAILED, CANCELLED = (
    job_pb2.JOB_STATUS_SUCCEEDED,
    job_pb2.JOB_STATUS_FAILED,
    job_pb2.JOB_STATUS_CANCELLED,
)
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")


class ForeignPlane:
    """Dispatches, and notes every packet that a worker sends."""

    def __init__(self, nc: Any) -> None:
        self.nc = nc
        self.seen: list[tuple[str, Any]] = []

    async def listen(self) -> None:
        async def take(message: Any) -> None:
            packet = buspacket_pb2.BusPacket()
            packet.ParseFromString(message.data)
            if packet.sender_id != "foreign":
                self.seen.append((message.subject, packet))

        await self.nc.subscribe("sys.>", cb=take)
        await self.nc.flush()

    def of(self, subject: str, job_id: str = "") -> list[Any]:
        """The packets of a subject, or those of one job on it."""
        found = [packet for where, packet in self.seen if where == subject]
        if not job_id:
            return found
        field = "job_result" if subject == "sys.job.result" else "job_progress"
        return [one for one in found if getattr(one, field).job_id == job_id]

    async def dispatch(
        self, job_id: str, topic: str = "job.cap.add", *, to: str = "", **fields: Any
    ) -> None:
        request = job_pb2.JobRequest(job_id=job_id, topic=topic, **fields)
        packet = packet_of("foreign", job_request=request)
        packet.trace_id = f"trace-{job_id}"
        subject = f"worker.{to}.jobs" if to else topic
        await self.nc.publish(subject, packet.SerializeToString())

    async def cancel(self, job_id: str) -> None:
        cancel = job_pb2.JobCancel(job_id=job_id, reason="enough", requested_by="ada")
        packet = packet_of("foreign", job_cancel=cancel)
        await self.nc.publish("sys.job.cancel", packet.SerializeToString())

    async def result(self, job_id: str, count: int = 1) -> Any:
        await soon(lambda: len(self.of("sys.job.result", job_id)) >= count, job_id)
        packet = self.of("sys.job.result", job_id)[count - 1]
        assert packet.trace_id == f"trace-{job_id}"
        return packet.job_result

    def check(self) -> None:
        """Every packet is as the protocol wants it."""
        for subject, packet in self.seen:
            assert not validate_bus_packet(packet), (subject, packet)
            payload = getattr(packet, packet.WhichOneof("payload"))
            worker = getattr(payload, "worker_id", "") or getattr(payload, "component_id", "")
            assert worker in ("", packet.sender_id), subject


def application() -> tuple[App, list[str], asyncio.Event]:
    app, ran, gate = App(), list[str](), asyncio.Event()

    @app.job("job.cap.add")
    async def add(a: int = 0, b: int = 0) -> dict[str, int]:
        ran.append(penstock.current().job_id)
        return {"sum": a + b}

    @app.job("job.cap.wait")
    async def wait() -> str:
        ran.append(penstock.current().job_id)
        penstock.current().progress(0.5, "half way")
        await gate.wait()
        return "done"

    @app.job("job.cap.fail")
    async def fail() -> None:
        ran.append(penstock.current().job_id)
        raise ValueError("boom")

    return app, ran, gate


@asynccontextmanager
async def memory_server() -> AsyncIterator[str]:
    async def find(job_id: str) -> None:
        return None

    server = RedisServer(PointerStore(MemoryBlobs(), find), "secret")
    port = await server.listen("127.0.0.1", 0)
    yield f"redis://:secret@127.0.0.1:{port}/0"
    await server.close()


@asynccontextmanager
async def serving(
    app: App, server: NatsServer, folder: Path, **settings: Any
) -> AsyncIterator[tuple[ForeignPlane, asyncio.Task[None]]]:
    given = {"data_dir": str(folder), "bus.url": server.url, "concurrency": 4, **settings}
    nc = await nats.connect(server.url)
    plane = ForeignPlane(nc)
    await plane.listen()
    process = CapWorkerProcess(app, load(environ={}, flags=given), worker_id="w1", pool="blue")
    running = asyncio.create_task(process.run())
    await soon(lambda: running.done() or plane.of("sys.heartbeat"))
    try:
        yield plane, running
        plane.check()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await nc.close()


@run_async
async def test_jobs_of_the_pool_and_direct_ones_with_memory_pointers(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    app, ran, _ = application()
    async with (
        memory_server() as url,
        redis.asyncio.from_url(url) as memory,
        serving(app, nats_server, tmp_path, **{"cap.memory": url}) as (plane, _running),
    ):
        [hello] = [one.handshake for one in plane.of("sys.handshake")]
        assert hello.role == handshake_pb2.COMPONENT_ROLE_WORKER
        assert {"job.cap.add", "job.cap.wait"} <= {*hello.ready_topics}
        assert [*hello.supported_versions] == [1]
        beat = plane.of("sys.heartbeat")[0].heartbeat
        assert (beat.worker_id, beat.pool, beat.max_parallel_jobs) == ("w1", "blue", 4)
        for job_id, to in (("pool", ""), ("direct", "w1")):
            await memory.set(f"ctx:{job_id}", json.dumps({"a": 2, "b": 3}))
            pointer = f"redis://ctx:{job_id}"
            identity = job_pb2.DispatchIdentity(dispatch_id="d", attempt=1)
            await plane.dispatch(job_id, to=to, context_ptr=pointer, dispatch=identity)
            result = await plane.result(job_id)
            assert (result.status, result.worker_id) == (SUCCEEDED, "w1")
            assert result.result_ptr == f"redis://res:{job_id}"
            assert (result.dispatch.dispatch_id, result.dispatch.attempt) == ("d", 1)
            assert json.loads(await memory.get(f"res:{job_id}")) == {"sum": 5}
            [started] = plane.of("sys.job.progress", job_id)
            assert started.job_progress.status == job_pb2.JOB_STATUS_RUNNING
        await plane.dispatch("lost", context_ptr="redis://ctx:lost")
        lost = await plane.result("lost")
        assert (lost.status, lost.error_code_enum) == (FAILED, 204)
        assert "context not found" in lost.error_message
        await plane.dispatch("odd", context_ptr="s3://bucket/x")
        assert "unsupported pointer scheme" in (await plane.result("odd")).error_message
    assert ran == ["pool", "direct"]


@run_async
async def test_progress_cancellation_failure_and_time_limit(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    app, _, gate = application()
    async with serving(app, nats_server, tmp_path) as (plane, _running):
        await plane.dispatch("c1", "job.cap.wait")
        await soon(lambda: len(plane.of("sys.job.progress", "c1")) == 2)
        first, second = (one.job_progress for one in plane.of("sys.job.progress", "c1"))
        assert (first.percent, second.percent, second.message) == (0, 50, "half way")
        await plane.cancel("unknown")
        await plane.cancel("c1")
        assert (await plane.result("c1")).status == CANCELLED
        await plane.dispatch("f1", "job.cap.fail")
        failed = await plane.result("f1")
        assert failed.status == FAILED
        assert "boom" in failed.error_message
        await plane.dispatch("t1", "job.cap.wait", budget=job_pb2.Budget(deadline_ms=100))
        assert (await plane.result("t1")).status == job_pb2.JOB_STATUS_TIMEOUT
        # More than there are slots: the others wait, and can be cancelled while they do.
        for n in range(6):
            await plane.dispatch(f"w{n}", "job.cap.wait", to="w1")
        await soon(lambda: plane.of("sys.job.progress", "w3"))
        await plane.cancel("w5")
        assert (await plane.result("w5")).status == CANCELLED
        assert not plane.of("sys.job.progress", "w5")
        gate.set()
        for n in range(5):
            result = await plane.result(f"w{n}")
            assert result.status == SUCCEEDED
            assert result.result_ptr.startswith("data:")
        await plane.dispatch("elsewhere", "job.cap.unknown", to="w1")
        assert (await plane.result("elsewhere")).error_code_enum == 203


@run_async
async def test_a_dispatch_that_comes_twice_is_run_once(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    app, ran, gate = application()
    async with serving(app, nats_server, tmp_path) as (plane, _running):

        def attempt(number: int) -> Any:
            return job_pb2.DispatchIdentity(dispatch_id=f"d{number}", attempt=number)

        await plane.dispatch("twice", "job.cap.wait", dispatch=attempt(1))
        await plane.dispatch("twice", "job.cap.wait", dispatch=attempt(1))
        await soon(lambda: ran)
        gate.set()
        await plane.result("twice")
        await plane.dispatch("twice", "job.cap.wait", dispatch=attempt(1))  # its result was lost
        again = await plane.result("twice", 2)
        assert (again.status, ran) == (SUCCEEDED, ["twice"])
        await plane.dispatch("twice", "job.cap.wait", dispatch=attempt(2))
        assert (await plane.result("twice", 3)).dispatch.attempt == 2
        assert ran == ["twice", "twice"]
        # Without an identity only a success is known to be the same dispatch.
        await plane.dispatch("plain")
        await plane.result("plain")
        await plane.dispatch("plain")
        await plane.result("plain", 2)
        assert ran.count("plain") == 1
        await plane.dispatch("again", "job.cap.fail")
        await plane.result("again")
        await plane.dispatch("again", "job.cap.fail")
        await plane.result("again", 2)
        assert ran.count("again") == 2


@run_async
async def test_an_attempt_that_was_given_up_does_not_count(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    app, ran, gate = application()
    async with serving(app, nats_server, tmp_path) as (plane, _running):
        for number in (1, 2):
            identity = job_pb2.DispatchIdentity(dispatch_id=f"d{number}", attempt=number)
            await plane.dispatch("moved", "job.cap.wait", dispatch=identity)
            await soon(lambda number=number: len(ran) == number)  # type: ignore[misc]
        gate.set()
        result = await plane.result("moved")
        assert (result.status, result.dispatch.attempt) == (SUCCEEDED, 2)
        assert len(plane.of("sys.job.result", "moved")) == 1


@run_async
async def test_results_wait_for_a_server_that_was_away(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    app, ran, gate = application()
    try:
        async with serving(app, server, tmp_path / "data") as (plane, _running):
            stream = plane.nc.jetstream()
            await stream.add_stream(name="RESULTS", subjects=["sys.job.result"])
            await plane.dispatch("kept", "job.cap.wait")
            await soon(lambda: ran)
            server.kill()
            gate.set()  # its end may be sent into a connection that is lost already
            server.start()
            packet = buspacket_pb2.BusPacket()
            async with await nats.connect(server.url) as reader:
                results = await reader.jetstream().subscribe("sys.job.result")
                packet.ParseFromString((await results.next_msg(timeout=30)).data)
            assert packet.job_result.job_id == "kept"
            assert packet.job_result.status == SUCCEEDED
            plane.seen.clear()
            await soon(lambda: plane.of("sys.heartbeat"))  # it hears again
            await plane.dispatch("next")
            assert (await plane.result("next")).status == SUCCEEDED
    finally:
        server.kill()


@run_async
async def test_a_bad_packet_is_dropped_and_alerted(nats_server: NatsServer, tmp_path: Path) -> None:
    app, ran, _ = application()
    async with serving(app, nats_server, tmp_path) as (plane, _running):
        await plane.nc.publish("job.cap.add", b"\xff\xff")
        wrong = packet_of(
            "foreign", job_request=job_pb2.JobRequest(job_id="v", topic="job.cap.add")
        )
        wrong.protocol_version = 2
        await plane.nc.publish("job.cap.add", wrong.SerializeToString())
        await soon(lambda: len(plane.of("sys.alert")) == 2)
        codes = [one.alert.error_code_enum for one in plane.of("sys.alert")]
        assert (sorted(codes), ran) == ([100, 101], [])


@run_async
async def test_the_command_drains_when_it_is_stopped(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    command = Penstock(tmp_path)
    nc = await nats.connect(nats_server.url)
    plane = ForeignPlane(nc)
    await plane.listen()
    worker = command.start(
        "worker", "--cap", nats_server.url, "--app", "jobs:app", "--id", "w1", "--concurrency", "1"
    )
    try:
        told = await asyncio.to_thread(said, worker, "serves")
        assert f"worker w1 in pool default, 1 at once, serves {nats_server.url}" in told
        gate = tmp_path / "gate"
        data = "data:application/json," + json.dumps({"path": str(gate)}).replace('"', "%22")
        await soon(lambda: plane.of("sys.heartbeat"))
        await plane.dispatch("held", "job.wait.file", context_ptr=data)
        await plane.dispatch("behind", "job.wait.file", context_ptr=data)
        await soon(Path(f"{gate}.started").exists)
        worker.send_signal(signal.SIGTERM)
        back = await plane.result("behind")
        assert back.status == job_pb2.JOB_STATUS_FAILED_RETRYABLE
        gate.touch()
        assert (await plane.result("held")).status == SUCCEEDED
        assert await asyncio.to_thread(worker.wait, 30) == 0
        plane.check()
    finally:
        worker.kill()
        worker.communicate()
        await nc.close()
