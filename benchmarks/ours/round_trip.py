"""CAP round trips: an SDK client, a control plane and an SDK worker, on one NATS server.

`python -m ours.round_trip stub|scheduler|worker URL` runs a part that is a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import nats
from cap.client import submit_job
from cap.packet_boundary import finalize_packet
from cap.pb.cordum.agent.v1 import buspacket_pb2, job_pb2
from cap.validate import validate_bus_packet
from cap.worker import run_worker
from processes import free_port, process_seconds, running, start, wait_for_port

TOPIC = "job.bench.noop"
WINDOW = 64
Figures = dict[str, float | None]


# -- the parts -------------------------------------------------------------------------


async def stub(url: str) -> None:
    """A scheduler that keeps nothing: passes jobs on, and forgets them."""
    client = await nats.connect(url)

    async def dispatch(message: Any) -> None:
        packet = buspacket_pb2.BusPacket()
        packet.ParseFromString(message.data)
        packet.sender_id = "stub"
        await client.publish(packet.job_request.topic, packet.SerializeToString())

    await client.subscribe("sys.job.submit", queue="cordum-scheduler", cb=dispatch)
    await client.flush()
    await asyncio.Event().wait()


async def schedule(url: str) -> None:
    """A scheduler in memory: checks what comes, knows each job's state, and hears of its end."""
    client = await nats.connect(url)
    states: dict[str, str] = {}

    def read(message: Any) -> Any:
        packet = buspacket_pb2.BusPacket()
        packet.ParseFromString(message.data)
        return None if validate_bus_packet(packet) else packet

    async def dispatch(message: Any) -> None:
        packet = read(message)
        if packet is None or packet.job_request.job_id in states:
            return
        request = packet.job_request
        states[request.job_id] = "DISPATCHED"
        request.dispatch.dispatch_id, request.dispatch.attempt = f"{request.job_id}#1", 1
        sent = buspacket_pb2.BusPacket(
            trace_id=packet.trace_id, sender_id="memory", protocol_version=1, job_request=request
        )
        sent.created_at.GetCurrentTime()
        await client.publish(request.topic, finalize_packet(sent).SerializeToString())

    async def end(message: Any) -> None:
        packet = read(message)
        if packet is not None and states.get(packet.job_result.job_id) == "DISPATCHED":
            states[packet.job_result.job_id] = job_pb2.JobStatus.Name(packet.job_result.status)

    await client.subscribe("sys.job.submit", queue="cordum-scheduler", cb=dispatch)
    await client.subscribe("sys.job.result", queue="cordum-scheduler", cb=end)
    await client.flush()
    await asyncio.Event().wait()


async def work(url: str) -> None:
    async def noop(request: Any) -> Any:
        return job_pb2.JobResult(job_id=request.job_id, status=job_pb2.JOB_STATUS_SUCCEEDED)

    await run_worker(url, TOPIC, noop, sender_id="bench")


@contextmanager
def server(folder: Path, streams: str) -> Iterator[str]:
    """A NATS server; `streams` is what it says of JetStream."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    file = folder / "nats.conf"
    file.write_text(f'host: "127.0.0.1"\nport: {port}\n{streams}')
    beside = Path(sys.executable).parent / "nats-server"
    program = str(beside) if beside.is_file() else shutil.which("nats-server")
    assert program, "there is no nats-server"
    with running([start([program, "-c", str(file)], folder / "nats.log")]):
        wait_for_port(port)
        yield f"nats://127.0.0.1:{port}"


# -- measures --------------------------------------------------------------------------


async def through_stub(folder: Path, *, jobs: int) -> Figures:
    return await _measure(folder, jobs, streams="", plane="stub")


async def through_scheduler(folder: Path, *, jobs: int) -> Figures:
    return await _measure(folder, jobs, streams="", plane="scheduler")


async def through_engine(folder: Path, *, jobs: int) -> Figures:
    """Durable in the engine's store, power loss included; NATS keeps nothing."""
    return await _measure(folder, jobs, streams="", plane="penstock")


async def through_stream(folder: Path, *, jobs: int) -> Figures:
    """The same, and what is sent while the engine is away is on the NATS server's disk."""
    streams = f'jetstream {{ store_dir: "{folder}/js", sync_interval: always }}\n'
    return await _measure(folder, jobs, streams=streams, plane="penstock")


async def _measure(folder: Path, jobs: int, *, streams: str, plane: str) -> Figures:
    with ExitStack() as stack:
        url = stack.enter_context(server(folder, streams))
        module = [sys.executable, "-m", "ours.round_trip"]
        if plane == "penstock":
            scheduler = _engine(folder, url)
        else:
            scheduler = start([*module, plane, url], folder / "plane.log")
        worker = start([*module, "worker", url], folder / "worker.log")
        stack.enter_context(running([scheduler, worker]))
        return await _drive(url, jobs, scheduler.pid)


def _engine(folder: Path, url: str) -> Any:
    code = "import sys; from penstock.cli import main; sys.exit(main())"
    options = ["--data", str(folder / "data"), "up", "--no-http", "--no-worker", "--bus", url]
    topics = {"PENSTOCK_CAP__ENABLED": "true", "PENSTOCK_CAP__TOPICS": json.dumps([TOPIC])}
    return start([sys.executable, "-c", code, *options], folder / "plane.log", topics)


async def _drive(url: str, jobs: int, plane: int) -> Figures:
    client = await nats.connect(url)
    ended: dict[str, asyncio.Future[None]] = {}

    async def take(message: Any) -> None:
        packet = buspacket_pb2.BusPacket()
        packet.ParseFromString(message.data)
        if (waiting := ended.pop(packet.job_result.job_id, None)) is not None:
            waiting.set_result(None)

    await client.subscribe("sys.job.result", cb=take)

    async def one(job_id: str) -> None:
        waiting = ended[job_id] = asyncio.get_running_loop().create_future()
        request = job_pb2.JobRequest(job_id=job_id, topic=TOPIC)
        await submit_job(client, request, f"trace-{job_id}", "bench-client")
        await waiting

    await _ready(one, ended)
    begin, alone = time.monotonic(), max(50, jobs // 20)
    for n in range(alone):
        await one(f"alone-{n}")
    sequential = alone / (time.monotonic() - begin)
    numbers = iter(range(jobs))

    async def some() -> None:
        for n in numbers:
            await one(f"job-{n}")

    begin, cpu = time.monotonic(), process_seconds(plane)
    await asyncio.gather(*(some() for _ in range(WINDOW)))
    rate, cpu = jobs / (time.monotonic() - begin), process_seconds(plane) - cpu
    await client.close()
    return {"rate": rate, "sequential": sequential, "plane_us": cpu / jobs * 1e6}


async def _ready(one: Any, ended: dict[str, Any]) -> None:
    """The worker and the control plane are there."""
    for n in range(600):
        try:
            async with asyncio.timeout(0.5):
                await one(f"first-{n}")
                return
        except TimeoutError:
            ended.clear()
    raise RuntimeError("no job ever ended")


if __name__ == "__main__":
    part, address = sys.argv[1:]
    asyncio.run({"stub": stub, "scheduler": schedule, "worker": work}[part](address))
