"""The public CAP SDK, unmodified, with our control plane on a real NATS server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from cap.packet_boundary import finalize_packet
from cap.pb.cordum.agent.v1 import alert_pb2, handshake_pb2, heartbeat_pb2, job_pb2
from cap.validate import validate_bus_packet
from cap.worker import run_worker
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from tests.support.cap import echo, packet_of, plane
from tests.support.nats import NatsServer
from tests.support.waiting import soon

from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.errors import Misconfigured
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.testing.aio import run_async

# The SDK's own use of its Redis client.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")


# -- the SDK, unmodified --------------------------------------------------------------


@run_async
async def test_a_client_and_a_silent_worker_of_the_sdk(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap, cap.worker(echo):
        await cap.watch("job.cap.echo")
        await cap.submit("j1", labels={"team": "a"}, memory_id="m1", priority=3)
        job = await cap.done("j1")
        assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
        assert (job.request.labels, job.request.priority) == ({"team": "a"}, "critical")
        await soon(lambda: cap.of("sys.job.result"))
        [given] = cap.of("job.cap.echo")[-1:]
        assert (given.trace_id, given.sender_id) == ("trace-j1", "penstock")
        request = given.job_request
        assert (request.job_id, request.memory_id, request.priority) == ("j1", "m1", 3)
        assert (request.dispatch.attempt, dict(request.labels)) == (1, {"team": "a"})
        assert "cap.trace_id" not in request.env
        await asyncio.sleep(0.1)
        assert len(cap.of("sys.job.result")) == 1  # the worker's own, and no second one
        for subject, packet in cap.seen:
            if packet.trace_id:  # not the test's own look for a listener
                assert not validate_bus_packet(packet), subject


@run_async
async def test_an_agent_of_the_sdk_with_memory_pointers(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap, cap.agent(pool="gpu", max_parallel=3) as agent:

        async def add(context: Any, value: dict[str, int]) -> dict[str, int]:
            return {"sum": value["a"] + value["b"]}

        agent.job("job.cap.add")(add)
        await agent.start()
        await cap.knows("agent-1")
        await cap.watch("worker.agent-1.jobs")
        client = redis.asyncio.from_url(cap.redis_url)
        await client.set("ctx:j2", json.dumps({"a": 2, "b": 3}))
        await cap.submit("j2", "job.cap.add", context_ptr="redis://ctx:j2")
        job = await cap.done("j2")
        assert job.state is JobState.SUCCEEDED, job.result
        assert job.worker_id == "cap:agent-1"
        assert json.loads(await client.get("res:j2")) == {"sum": 5}
        assert json.loads(await cap.result(job)) == {"sum": 5}
        assert cap.of("worker.agent-1.jobs"), "an announced worker has a subject of its own"
        # A heartbeat says what the handshake can't.
        await soon(lambda: cap.engine.open_jobs.roster.workers["cap:agent-1"].slots == 3)
        assert cap.engine.open_jobs.roster.workers["cap:agent-1"].pool == "gpu"
        # Jobs from elsewhere reach it as well, and its input is found.
        data = encode_data(json.dumps({"a": 1, "b": 1}).encode())
        request = JobRequest(job_id="", topic="job.cap.add", context_ptr=data)
        [other] = await cap.engine.api.submit([request])
        assert (await cap.engine.api.wait(other.job_id, 20)).state is JobState.SUCCEEDED
        # A job without input fails in the worker, and that is a result too.
        await cap.submit("j3", "job.cap.add")
        failed = await cap.done("j3")
        assert failed.state is JobState.FAILED
        assert failed.result is not None
        assert failed.result.error_message
        await soon(lambda: cap.of("sys.job.dlq"))
        await client.aclose()


@run_async
async def test_a_job_waits_for_a_worker_that_comes_later(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap:
        await cap.submit("j4", "job.cap.later")
        bridge = cap.bridge
        await soon(lambda: "job.cap.later" in bridge._paused)
        why = bridge._paused["job.cap.later"]
        assert why == "no CAP worker subscribes to job.cap.later"
        async with cap.worker(echo, "job.cap.later"):
            job = await cap.done("j4")
            assert job.state is JobState.SUCCEEDED
            assert job.attempt > 1
            assert job.uncharged == job.attempt - 1


# -- workers that misbehave -----------------------------------------------------------


@run_async
async def test_a_cancellation_wins_over_a_worker_that_ignores_it(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    flags = {"timeouts.kill_grace": 0.3}
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return await echo(request)

    async with plane(tmp_path, nats_server, **flags) as cap, cap.worker(slow, "job.cap.slow"):
        await cap.submit("j5", "job.cap.slow")
        await asyncio.wait_for(begun.wait(), 10)
        cancel = job_pb2.JobCancel(job_id="j5", reason="enough", requested_by="client")
        await cap.send("sys.job.cancel", "client", job_cancel=cancel)
        job = await cap.done("j5")
        assert job.state is JobState.CANCELLED
        told = [packet for packet in cap.of("sys.job.cancel") if packet.sender_id == "penstock"]
        assert told[0].job_cancel.requested_by == "penstock"
        await soon(lambda: cap.of("sys.job.result"))
        said = cap.of("sys.job.result")[0].job_result
        assert (said.status, said.worker_id) == (job_pb2.JOB_STATUS_CANCELLED, "penstock")
        goes_on.set()
        await soon(lambda: cap.bridge.late == 1)
        assert (await cap.done("j5")).state is JobState.CANCELLED


@run_async
async def test_only_the_first_result_of_a_job_counts(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap, cap.worker(echo):
        await cap.submit("j9")
        assert (await cap.done("j9")).state is JobState.SUCCEEDED
        for status in (job_pb2.JOB_STATUS_SUCCEEDED, job_pb2.JOB_STATUS_FAILED):
            again = job_pb2.JobResult(job_id="j9", status=status, worker_id="low")
            await cap.send("sys.job.result", "low", job_result=again)
        await soon(lambda: cap.bridge.late == 2)
        assert (await cap.done("j9")).state is JobState.SUCCEEDED
        assert not cap.bridge.rejected


@run_async
async def test_an_announced_worker_that_never_sends_a_heartbeat_is_not_taken_for_dead(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    flags = {"timeouts.lease": 1.0, "timeouts.lost_grace": 0.2}
    async with plane(tmp_path, nats_server, **flags) as cap, cap.agent("mute") as agent:
        agent._heartbeat_interval = 3600

        async def mute(context: Any, value: Any) -> str:
            await asyncio.sleep(1.3)  # longer than the lease
            return "here"

        agent.job("job.cap.mute")(mute)
        await agent.start()
        await cap.knows("mute")
        request = JobRequest(job_id="", topic="job.cap.mute", context_ptr=encode_data(b"{}"))
        [job] = await cap.engine.api.submit([request])
        done = await cap.engine.api.wait(job.job_id, 20)
        assert (done.state, done.worker_id) == (JobState.SUCCEEDED, "cap:mute")


@run_async
async def test_an_announced_worker_without_subscriber_is_gone_until_it_is_heard_of(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    hello = handshake_pb2.Handshake(
        component_id="ghost", role=3, supported_versions=[1], ready_topics=["job.cap.ghost"]
    )
    flags = {"timeouts.lost_grace": 0.2}
    async with plane(tmp_path, nats_server, **flags) as cap:
        await cap.send("sys.handshake", "ghost", handshake=hello)
        await cap.knows("ghost")
        request = JobRequest(job_id="", topic="job.cap.ghost", context_ptr=encode_data(b"{}"))
        [job] = await cap.engine.api.submit([request])
        workers = cap.engine.open_jobs.roster.workers
        await soon(lambda: "cap:ghost" not in workers)
        assert (await cap.engine.api.get(job.job_id)).state not in TERMINAL
        async with cap.agent("ghost") as agent:

            async def here(context: Any, value: Any) -> str:
                return "here"

            agent.job("job.cap.ghost")(here)
            await agent.start()
            done = await cap.engine.api.wait(job.job_id, 20)
            assert (done.state, done.worker_id) == (JobState.SUCCEEDED, "cap:ghost")
            assert done.attempt == 2


@run_async
async def test_a_drained_worker_ends_what_it_has_and_gets_no_more(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async with plane(tmp_path, nats_server) as cap, cap.agent("leaving") as agent:

        async def slow(context: Any, value: Any) -> str:
            begun.set()
            await goes_on.wait()
            return "done"

        agent.job("job.cap.leaving")(slow)
        await agent.start()
        await cap.knows("leaving")
        await soon(lambda: cap.bridge._workers["cap:leaving"].beats)
        request = JobRequest(job_id="", topic="job.cap.leaving", context_ptr=encode_data(b"{}"))
        [job] = await cap.engine.api.submit([request])
        await asyncio.wait_for(begun.wait(), 10)
        await cap.engine.api.drain_worker("cap:leaving")
        [later] = await cap.engine.api.submit([request])
        goes_on.set()
        assert (await cap.engine.api.wait(job.job_id, 20)).state is JobState.SUCCEEDED
        workers = cap.engine.open_jobs.roster.workers
        await soon(lambda: "cap:leaving" not in workers)
        await asyncio.sleep(0.5)  # more than two of its heartbeats
        assert "cap:leaving" not in workers
        assert (await cap.engine.api.get(later.job_id)).state is JobState.SCHEDULED


@pytest.mark.parametrize("idempotent", [False, True])
@run_async
async def test_the_job_of_a_dead_worker_runs_again_only_if_it_may(
    nats_server: NatsServer, tmp_path: Path, idempotent: bool
) -> None:
    topic = f"job.cap.dies-{idempotent}"
    runs: list[int] = []
    begun = asyncio.Event()

    async def work(context: Any, value: Any) -> str:
        runs.append(context.job.dispatch.attempt)
        begun.set()
        if len(runs) == 1:
            await asyncio.sleep(60)
        return "done"

    flags = {"timeouts.lease": 1.0, "timeouts.lost_grace": 0.2}
    async with plane(tmp_path, nats_server, **flags) as cap, cap.agent("mortal") as mortal:
        mortal.job(topic)(work)
        await mortal.start()
        await cap.knows("mortal")
        workers = cap.engine.open_jobs.roster.workers
        await soon(lambda: cap.bridge._workers["cap:mortal"].beats)
        data = encode_data(b"{}")
        request = JobRequest(job_id="", topic=topic, context_ptr=data, idempotent=idempotent)
        [job] = await cap.engine.api.submit([request])
        await asyncio.wait_for(begun.wait(), 10)
        for task in [*mortal._handler_tasks, mortal._heartbeat_task]:
            task.cancel()
        await mortal._nc.close()  # it dies without a word
        mortal._subscriptions.clear()
        async with cap.agent("heir") as heir:
            heir.job(topic)(work)
            await heir.start()
            done = await cap.engine.api.wait(job.job_id, 20)
            if idempotent:
                assert (done.state, runs) == (JobState.SUCCEEDED, [1, 2])
            else:
                assert (done.state, runs) == (JobState.TIMEOUT, [1])
                assert done.result is not None
                assert done.result.error_code == "WORKER_LOST"
        assert workers is cap.engine.open_jobs.roster.workers
        mortal._nc = mortal._heartbeat_task = None


@run_async
async def test_a_running_job_survives_a_restart_of_the_engine(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return await echo(request)

    running = asyncio.create_task(run_worker(nats_server.url, "job.cap.long", slow, sender_id="l"))
    try:
        async with plane(tmp_path, nats_server) as cap:
            await cap._listening("job.cap.long")
            await cap.submit("j6", "job.cap.long")
            await asyncio.wait_for(begun.wait(), 10)
            await soon(lambda: cap.bridge._held["j6"].has_started)
        async with plane(tmp_path, nats_server) as cap:
            goes_on.set()
            job = await cap.done("j6")
            assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@run_async
async def test_jobs_go_on_after_the_death_of_the_nats_server(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    try:
        async with plane(tmp_path / "data", server) as cap, cap.worker(echo):
            await cap.submit("before")
            assert (await cap.done("before")).state is JobState.SUCCEEDED
            first = cap.bridge._connection.client
            server.kill()
            await soon(lambda: cap.bridge._connection.client is None)
            [job] = await cap.engine.api.submit([JobRequest(job_id="", topic="job.cap.echo")])
            server.start()
            await soon(lambda: cap.bridge._connection.client not in (None, first))
            done = await cap.engine.api.wait(job.job_id, 30)
            assert done.state is JobState.SUCCEEDED
    finally:
        server.kill()


# -- bad input ------------------------------------------------------------------------


def _submit(**changes: Any) -> bytes:
    request = job_pb2.JobRequest(job_id="bad", topic="job.cap.bad")
    packet = packet_of("client", job_request=request)
    for name, value in changes.items():
        packet.ClearField(name) if value is None else setattr(packet, name, value)
    data: bytes = packet.SerializeToString()
    return data


def _of(**payload: Any) -> bytes:
    data: bytes = packet_of("w", **payload).SerializeToString()
    return data


def _job(**fields: Any) -> bytes:
    return _of(job_request=job_pb2.JobRequest(**fields))


UNKNOWN = job_pb2.JobResult(job_id="nobody", status=5, worker_id="w")
OTHERS = job_pb2.JobResult(job_id="nobody", status=5, worker_id="other")
OLD_WORKER = handshake_pb2.Handshake(component_id="w", role=3, supported_versions=[2])
LIAR = heartbeat_pb2.Heartbeat(worker_id="other")
CANCEL = job_pb2.JobCancel(job_id="nobody", requested_by="w")
BAD: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "noise": ("sys.job.submit", lambda: b"\xff\xff not a packet", 101),
    "truncated": ("sys.job.submit", lambda: _submit()[:-3], 101),
    "empty": ("sys.job.submit", lambda: b"", 100),
    "oversized": ("sys.job.submit", lambda: _submit(trace_id="x" * 1_000_000), 203),
    "version": ("sys.job.submit", lambda: _submit(protocol_version=2), 100),
    "no trace": ("sys.job.submit", lambda: _submit(trace_id=""), 101),
    "no time": ("sys.job.submit", lambda: _submit(created_at=None), 101),
    "no payload": ("sys.job.submit", lambda: _submit(job_request=None), 102),
    "wrong payload": ("sys.job.submit", lambda: _of(job_result=UNKNOWN), 102),
    "job id": ("sys.job.submit", lambda: _job(job_id="a b", topic="job.x"), 203),
    "topic": ("sys.job.submit", lambda: _job(job_id="a", topic="nojob"), 203),
    "pointer": (
        "sys.job.submit",
        lambda: _job(job_id="a", topic="job.x", context_ptr="redis://q"),
        204,
    ),
    "data pointer": (
        "sys.job.submit",
        lambda: _job(job_id="a", topic="job.x", context_ptr="data:no comma"),
        204,
    ),
    "unknown job": ("sys.job.result", lambda: _of(job_result=UNKNOWN), 204),
    "another's result": ("sys.job.result", lambda: _of(job_result=OTHERS), 101),
    "another's heartbeat": ("sys.heartbeat", lambda: _of(heartbeat=LIAR), 101),
    "worker's version": ("sys.handshake", lambda: _of(handshake=OLD_WORKER), 100),
    "cancel of nothing": ("sys.job.cancel", lambda: _of(job_cancel=CANCEL), 204),
}


@pytest.mark.parametrize("name", BAD)
@run_async
async def test_a_bad_packet_is_dropped_counted_and_alerted(
    nats_server: NatsServer, tmp_path: Path, name: str
) -> None:
    subject, make, code = BAD[name]
    async with plane(tmp_path, nats_server) as cap:
        await cap.nc.publish(subject, make())
        await soon(lambda: cap.alerts() == [code])
        assert cap.bridge.rejected == {code: 1}
        cap.bridge._tell_facts()
        record = cap.engine.open_jobs.roster.workers["cap:any"]
        await soon(lambda: record.facts.get("dropped_packets") == {str(code): 1})
        assert not validate_bus_packet(cap.of("sys.alert")[0])
        assert (await cap.engine.api.status()).tally == {}


@run_async
async def test_alerts_of_others_are_logged_and_counted(
    nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def alert(code: int) -> Any:
        said = {"message": "lost\nthe bus", "source_component": "peer", "severity": 2}
        return alert_pb2.SystemAlert(**said, error_code_enum=code)

    async with plane(tmp_path, nats_server) as cap:
        for _ in range(3):
            await cap.send("sys.alert", "peer", alert=alert(402))
        await soon(lambda: cap.bridge.alerts == {402: 3})
        lines = [one.getMessage() for one in caplog.records if "alert" in one.getMessage()]
        assert lines == ["CAP: alert (402, from 'peer'): 'lost\\nthe bus'"]
        cap.bridge._tell_facts()
        record = cap.engine.open_jobs.roster.workers["cap:any"]
        await soon(lambda: record.facts.get("received_alerts") == {"402": 3})
        # One that is wrong is dropped without an alert: two components could go on for ever.
        await cap.nc.publish("sys.alert", b"\xff\xff not a packet")
        await soon(lambda: cap.bridge.rejected == {101: 1})
        await cap.bridge._connection.sent()
        await cap.nc.flush()
        assert 101 not in cap.alerts()


@run_async
async def test_who_speaks_of_anothers_job_is_not_believed(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async with plane(tmp_path, nats_server) as cap, cap.agent("honest") as agent:

        async def own(context: Any, value: Any) -> str:
            begun.set()
            await goes_on.wait()
            return "mine"

        agent.job("job.cap.own")(own)
        await agent.start()
        await cap.knows("honest")
        request = JobRequest(job_id="own", topic="job.cap.own", context_ptr=encode_data(b"{}"))
        await cap.engine.api.submit([request])
        await asyncio.wait_for(begun.wait(), 10)
        claim = job_pb2.JobResult(job_id="own", status=5, worker_id="thief")
        await cap.send("sys.job.result", "thief", job_result=claim)
        await soon(lambda: 202 in cap.alerts())
        goes_on.set()
        job = await cap.done("own")
        assert await cap.result(job) == b'"mine"'


@run_async
async def test_a_repeated_submission_is_one_job_and_another_one_is_refused(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    runs = 0

    async def count(request: Any) -> Any:
        nonlocal runs
        runs += 1
        return await echo(request)

    async with plane(tmp_path, nats_server) as cap, cap.worker(count, "job.cap.once"):
        for _ in range(3):
            await cap.submit("j7", "job.cap.once")
        assert (await cap.done("j7")).state is JobState.SUCCEEDED
        await cap.submit("j7", "job.cap.once", labels={"other": "job"})
        await soon(lambda: 205 in cap.alerts())
        assert runs == 1
        assert (await cap.done("j7")).state is JobState.SUCCEEDED


@run_async
async def test_a_flood_of_one_tenant_leaves_the_others_room(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    flags = {"cap.max_pending": 5}
    async with plane(tmp_path, nats_server, **flags) as cap, cap.worker(echo):
        for number in range(300):
            await cap.submit(f"flood-{number}", tenant_id="loud")
        await cap.submit("calm", tenant_id="quiet")
        assert (await cap.done("calm")).state is JobState.SUCCEEDED
        assert cap.bridge.rejected[201] > 0
        await soon(lambda: 201 in cap.alerts())
        refused = [one.job_result for one in cap.of("sys.job.result")]
        refused = [one for one in refused if one.error_code_enum == 201]
        assert refused[0].error_code == "JOB_RESOURCE_EXHAUSTED"


@run_async
async def test_a_denied_job_is_told_in_our_name(nats_server: NatsServer, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'default = "allow"\n[[rules]]\nid = "no"\ntopics = ["job.cap.no"]\ndecision = "deny"\n'
    )
    async with plane(tmp_path / "data", nats_server, rules=str(rules)) as cap:
        await cap.submit("j8", "job.cap.no")
        assert (await cap.done("j8")).state is JobState.DENIED
        await soon(lambda: cap.of("sys.job.dlq"))
        packet = cap.of("sys.job.result")[0]
        said = packet.job_result
        assert (said.status, said.error_code_enum) == (job_pb2.JOB_STATUS_DENIED, 300)
        assert (said.worker_id, packet.sender_id) == ("penstock", "penstock")
        assert packet.trace_id == "trace-j8"
        assert not validate_bus_packet(packet)


# -- signatures -----------------------------------------------------------------------


@run_async
async def test_with_keys_every_packet_must_be_signed(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    client, ours, wrong, low = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
    keys = tmp_path / "keys"
    keys.mkdir()
    for name, key in (("client", client), ("low", low)):
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (keys / f"{name}.pem").write_bytes(public)
    own = tmp_path / "own.pem"
    own.write_bytes(ours.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    flags = {"cap.keys": str(keys), "cap.private_key": str(own)}

    def signed(job_id: str, key: Any, sender: str = "client") -> bytes:
        request = job_pb2.JobRequest(job_id=job_id, topic="job.cap.signed")
        packet = finalize_packet(packet_of(sender, job_request=request), key)
        data: bytes = packet.SerializeToString(deterministic=True)
        return data

    async with plane(tmp_path / "data", nats_server, **flags) as cap:
        running = asyncio.create_task(
            run_worker(
                nats_server.url,
                "job.cap.signed",
                echo,
                public_keys={"penstock": ours.public_key()},
                private_key=low,
                sender_id="low",
            )
        )
        await cap._listening("job.cap.signed")
        good = signed("good", client)
        await cap.nc.publish("sys.job.submit", good)
        assert (await cap.done("good")).state is JobState.SUCCEEDED
        for data, code in (
            (signed("unsigned", None), 104),
            (signed("forged", wrong), 103),
            (signed("stranger", wrong, "stranger"), 103),
            (good, 205),
        ):
            before = cap.bridge.rejected.total()
            await cap.nc.publish("sys.job.submit", data)
            await soon(lambda before=before: cap.bridge.rejected.total() > before)  # type: ignore[misc]
            assert cap.bridge.rejected[code]
        await soon(lambda: {103, 104, 205} <= set(cap.alerts()))
        assert (await cap.engine.api.status()).finished == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# -- pointers -------------------------------------------------------------------------


@run_async
async def test_pointers_need_the_token_and_bad_commands_do_no_harm(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path, nats_server) as cap:
        assert cap.engine.cap is not None
        port = cap.engine.cap.redis_port
        for url in (f"redis://127.0.0.1:{port}/0", f"redis://:wrong@127.0.0.1:{port}/0"):
            stranger = redis.asyncio.from_url(url)
            with pytest.raises(redis.exceptions.RedisError):
                await stranger.get("ctx:a")
            await stranger.aclose()
        for junk in (b"GET a\r\n", b"*99\r\n", b"*1\r\n$-5\r\n", b"*1\r\n$999999999999\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(junk)
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()
        client = redis.asyncio.from_url(cap.redis_url)
        assert await client.ping()
        assert await client.get("ctx:nothing") is None
        await client.set("art:x", b"\x00\xff")
        assert await client.get("art:x") == b"\x00\xff"
        assert await client.exists("art:x") == 1
        with pytest.raises(redis.exceptions.ResponseError):
            await client.execute_command("FLUSHALL")
        await client.aclose()


def test_cap_needs_a_bus(tmp_path: Path) -> None:
    settings = load(environ={}, flags={"data_dir": str(tmp_path), "cap.enabled": True})
    with pytest.raises(Misconfigured, match=r"needs bus\.url"):
        asyncio.run(Engine(settings).start())
