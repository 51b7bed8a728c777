"""An engine that speaks CAP, and the SDK's clients and workers, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
from cap.client import submit_job
from cap.pb.cordum.agent.v1 import buspacket_pb2, job_pb2
from cap.runtime import Agent
from cap.worker import run_worker
from tests.support.nats import NatsServer
from tests.support.waiting import soon

from penstock import App
from penstock.adapters.nats.cap import CapBridge
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.job import Job
from penstock.lifecycles.canonical import TERMINAL

Handler = Callable[[Any], Any]


class Plane:
    """An engine that speaks CAP, and an observer of all that is on the bus."""

    def __init__(self, engine: Engine, nc: Any, url: str) -> None:
        self.engine, self.nc, self.url = engine, nc, url
        self.seen: list[tuple[str, Any]] = []
        """Subjects and packets."""

    @property
    def bridge(self) -> CapBridge:
        assert self.engine.cap is not None
        return self.engine.cap.bridge

    @property
    def redis_url(self) -> str:
        assert self.engine.cap is not None
        token = self.engine.settings.token_file.read_text().strip()
        return f"redis://:{token}@127.0.0.1:{self.engine.cap.redis_port}/0"

    async def watch(self, *subjects: str) -> None:
        """Who listens where jobs go is one who takes them: so not before a worker does."""

        async def take(message: Any) -> None:
            packet = buspacket_pb2.BusPacket()
            packet.ParseFromString(message.data)
            self.seen.append((message.subject, packet))

        for subject in subjects:
            await self.nc.subscribe(subject, cb=take)
        await self.nc.flush()

    def of(self, subject: str) -> list[Any]:
        return [packet for where, packet in self.seen if where == subject]

    def alerts(self) -> list[int]:
        return [packet.alert.error_code_enum for packet in self.of("sys.alert")]

    async def submit(self, job_id: str, topic: str = "job.cap.echo", **fields: Any) -> None:
        request = job_pb2.JobRequest(job_id=job_id, topic=topic, **fields)
        await submit_job(self.nc, request, f"trace-{job_id}", "client")

    async def send(self, subject: str, sender: str, **payload: Any) -> None:
        await self.nc.publish(subject, packet_of(sender, **payload).SerializeToString())

    async def done(self, job_id: str) -> Job:
        held: list[Job] = []

        async def look() -> bool:
            job = await self.bridge._engine.find(job_id)
            held[:] = [job] if job is not None and job.state in TERMINAL else []
            return bool(held)

        async with asyncio.timeout(20):
            while not await look():  # noqa: ASYNC110  (over the public way alone)
                await asyncio.sleep(0.02)
        return held[0]

    async def result(self, job: Job) -> bytes:
        assert job.result is not None
        assert job.result.result_ptr is not None
        return await self.engine.blobs.get(job.result.result_ptr)

    @asynccontextmanager
    async def worker(self, handler: Handler, subject: str = "job.cap.echo") -> AsyncIterator[None]:
        """The SDK's low-level worker: no handshake, no heartbeat, no start."""
        running = asyncio.create_task(run_worker(self.url, subject, handler, sender_id="low"))
        await self._listening(subject)
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _listening(self, subject: str) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    await self.nc.request(subject, b"", timeout=0.05)
                except nats.errors.NoRespondersError:
                    await asyncio.sleep(0.02)
                except TimeoutError:
                    return

    @asynccontextmanager
    async def agent(self, worker_id: str = "agent-1", **options: Any) -> AsyncIterator[Agent]:
        """The SDK's runtime, with its own Redis client."""
        agent = Agent(
            nats_url=self.url,
            redis_url=self.redis_url,
            worker_id=worker_id,
            heartbeat_interval=0.2,
            **options,
        )
        yield agent
        await agent.close()

    async def knows(self, worker_id: str) -> None:
        workers = self.engine.open_jobs.roster.workers
        await soon(lambda: f"cap:{worker_id}" in workers and workers[f"cap:{worker_id}"].ready)


def packet_of(sender: str, **payload: Any) -> Any:
    packet = buspacket_pb2.BusPacket(trace_id="t", sender_id=sender, protocol_version=1, **payload)
    packet.created_at.GetCurrentTime()
    return packet


@asynccontextmanager
async def plane(
    folder: Path, server: NatsServer, app: App | None = None, **flags: Any
) -> AsyncIterator[Plane]:
    """`app`: whose jobs the engine runs itself."""
    given = {
        "data_dir": str(folder),
        "bus.url": server.url,
        "bus.prefix": f"cap-{folder.parent.name}-{folder.name}".replace(".", "-")[-60:],
        "cap.enabled": True,
        "cap.pointers": "127.0.0.1:0",
        **flags,
    }
    settings = load(environ={}, flags=given)
    engine = Engine(settings, () if app is None else make_executors(app, settings))
    nc = await nats.connect(server.url)
    async with engine:
        made = Plane(engine, nc, server.url)
        await soon(lambda: made.bridge.is_connected)
        await made.watch("sys.>")
        yield made
    await nc.close()


async def echo(request: Any) -> Any:
    return job_pb2.JobResult(job_id=request.job_id, status=job_pb2.JOB_STATUS_SUCCEEDED)
