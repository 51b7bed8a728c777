"""CAP's trust handshake and production profile: the SDK's Agent, unmodified, on a real server."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from cap.packet_boundary import finalize_packet
from cap.pb.cordum.agent.v1 import buspacket_pb2, handshake_pb2, heartbeat_pb2, job_pb2
from cap.production_events import seal_production_event
from cap.production_replay import InMemoryReplayStore
from cap.production_signing import ProductionTrust, verify_production_packet
from cap.worker_trust import (
    WorkerHandshakeRejectionError,
    WorkerHandshakeRequestOptions,
    WorkerTrustConfig,
    build_authenticate,
    build_challenge_request,
    verify_challenge,
    verify_result,
)
from cap.worker_trust_codec import marshal_worker_trust_packet, unmarshal_worker_trust_packet
from cap.worker_trust_runtime import WorkerTrustRuntimeError
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from tests.support.cap import Plane, packet_of, plane
from tests.support.nats import NatsServer
from tests.support.waiting import soon

from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.errors import Misconfigured
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.testing.aio import run_async

# The SDK's own use of its Redis client.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated close:DeprecationWarning")

OURS, CLIENT, AGENT, STRANGER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
CHALLENGE, AUTHENTICATE = "sys.worker.handshake.challenge", "sys.worker.handshake.authenticate"
ISSUE = handshake_pb2.WORKER_HANDSHAKE_PURPOSE_ISSUE
RENEW = handshake_pb2.WORKER_HANDSHAKE_PURPOSE_RENEW
TOPIC = "job.cap.trusted"


def flags(folder: Path, *, production: bool = True) -> dict[str, Any]:
    """The agent is of the tenant acme; the client may submit for every tenant."""
    keys = folder / "keys"
    (keys / "acme").mkdir(parents=True)
    for name, key in (("acme/agent=a1", AGENT), ("client", CLIENT)):
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (keys / f"{name}.pem").write_bytes(public)
    own = folder / "own.pem"
    own.write_bytes(OURS.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return {
        "cap.keys": str(keys),
        "cap.private_key": str(own),
        "cap.key_id": "p1",
        "cap.production": production,
    }


def trust(**changes: Any) -> WorkerTrustConfig:
    given = {
        "worker_id": "agent",
        "expected_agent_id": "agent",
        "tenant_id": "acme",
        "audience": "cordum-scheduler",
        "proof_key_id": "a1",
        "proof_private_key": AGENT,
        "expected_scheduler_id": "penstock",
        "scheduler_public_keys": {"p1": OURS.public_key()},
        "sdk_version": "test",
        **changes,
    }
    return WorkerTrustConfig(**given)


def agent_options(**changes: Any) -> dict[str, Any]:
    return {
        "worker_id": "agent",
        "private_key": AGENT,
        "worker_trust_mode": "enforce",
        "worker_trust": trust(**changes),
        "worker_trust_timeout": 1.0,
        "worker_trust_retries": 1,
    }


def production_options() -> dict[str, Any]:
    pins = {"p1": OURS.public_key()}
    return {
        **agent_options(),
        "production_trust": ProductionTrust("any", pins, "acme", "penstock"),
        "replay_store": InMemoryReplayStore(),
    }


async def submit(cap: Plane, job_id: str, value: bytes = b"{}", tenant: str = "acme") -> bytes:
    """As a client that seals what it sends."""
    client = redis.asyncio.from_url(cap.redis_url)
    await client.set(f"ctx:{job_id}", value)
    await client.aclose()
    request = job_pb2.JobRequest(
        job_id=job_id, topic=TOPIC, tenant_id=tenant, context_ptr=f"redis://ctx:{job_id}"
    )
    packet = packet_of("client", job_request=request)
    packet.identity.tenant_id, packet.identity.principal_id = tenant, "ada"
    data: bytes = seal_production_event(
        packet, key=CLIENT, key_id="client", audience="sys.job.submit"
    )
    await cap.nc.publish("sys.job.submit", data)
    return data


class Worker:
    """The worker's side of the handshake, step by step, by the SDK's functions."""

    def __init__(self, cap: Plane) -> None:
        self.cap = cap

    def request(self, purpose: int = ISSUE, **changes: Any) -> Any:
        given = {
            "request_id": f"r{time.monotonic_ns()}",
            "client_nonce": time.time_ns().to_bytes(32),
        }
        options = WorkerHandshakeRequestOptions(
            trace_id="t", purpose=purpose, created_at=_now(), **{**given, **changes}
        )
        return build_challenge_request(trust(), options)

    async def ask(self, subject: str, packet: Any) -> Any:
        data = marshal_worker_trust_packet(packet)
        answer = await self.cap.nc.request(subject, data, timeout=1)
        return unmarshal_worker_trust_packet(answer.data)

    async def prove(self, purpose: int = ISSUE, token: str = "") -> tuple[Any, Any]:
        """A verified challenge, and its authentication."""
        request = self.request(purpose)
        verified = verify_challenge(trust(), request, await self.ask(CHALLENGE, request), _now())
        capability = handshake_pb2.Handshake(
            component_id="agent",
            role=handshake_pb2.COMPONENT_ROLE_WORKER,
            supported_versions=[1],
            sdk_version="test",
            ready_topics=[TOPIC],
        )
        return verified, build_authenticate(trust(), verified, capability, token, _now())

    async def session(self, purpose: int = ISSUE, token: str = "") -> str:
        verified, proof = await self.prove(purpose, token)
        answer = await self.ask(AUTHENTICATE, proof)
        granted: str = verify_result(trust(), verified, proof, answer, _now()).token
        return granted


def _now() -> Any:
    packet = buspacket_pb2.BusPacket()
    packet.created_at.GetCurrentTime()
    return packet.created_at.ToDatetime(tzinfo=UTC)


async def double(context: Any, value: dict[str, int]) -> int:
    return 2 * value["n"]


# -- the SDK, unmodified --------------------------------------------------------------


@run_async
async def test_an_agent_in_production_gets_jobs_and_its_results_count(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    options = production_options()
    async with (
        plane(tmp_path / "data", nats_server, **flags(tmp_path)) as cap,
        cap.agent(**options) as agent,
    ):
        seen: list[tuple[str, bytes]] = []

        async def note(message: Any) -> None:
            seen.append((message.subject, message.data))

        agent.job(TOPIC)(double)
        await agent.start()
        await cap.knows("agent")
        for subject in ("worker.agent.jobs", "sys.job.>"):
            await cap.nc.subscribe(subject, cb=note)
        await cap.nc.flush()
        data = await submit(cap, "j1", b'{"n": 4}')
        job = await cap.done("j1")
        assert job.state is JobState.SUCCEEDED, job.result
        assert json.loads(await cap.result(job)) == 8
        assert (job.request.tenant, job.worker_id) == ("acme", "cap:agent")
        # What is seen on the bus verifies by the SDK, with its real subject as audience.
        pins = {"p1": OURS.public_key()}
        [given] = [one for subject, one in seen if subject == "worker.agent.jobs"]
        packet = verify_production_packet(
            given, ProductionTrust("worker.agent.jobs", pins, "acme", "penstock")
        )
        assert packet.identity.principal_id == "ada", "the client's identity"
        await cap.nc.publish("sys.job.submit", data)  # the same once more: nothing happens
        await submit(cap, "j2")
        failed = await cap.done("j2")
        assert failed.state is JobState.FAILED
        await soon(lambda: any(subject == "sys.job.dlq" for subject, _ in seen))
        [told] = [one for subject, one in seen if subject == "sys.job.dlq"]
        verify_production_packet(told, ProductionTrust("sys.job.dlq", pins, "acme", "penstock"))
        assert cap.bridge.rejected == {}


@run_async
async def test_an_agent_with_a_session_works_with_ordinary_signatures(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    given = flags(tmp_path, production=False)
    async with (
        plane(tmp_path / "data", nats_server, **given) as cap,
        cap.agent(**agent_options()) as agent,
    ):
        agent.job(TOPIC)(double)
        await agent.start()
        await cap.knows("agent")
        request = JobRequest(
            job_id="", topic=TOPIC, tenant="acme", context_ptr=encode_data(b'{"n": 1}')
        )
        [job] = await cap.engine.api.submit([request])
        done = await cap.engine.api.wait(job.job_id, 20)
        assert done.state is JobState.SUCCEEDED, done.result
        assert await agent._worker_trust.renew()
        await soon(lambda: cap.bridge._workers["cap:agent"].beats)
        assert cap.bridge.rejected == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"proof_private_key": STRANGER},
        {"proof_key_id": "a2"},
        {"tenant_id": "other"},
        {"worker_id": "stranger", "expected_agent_id": "stranger"},
    ],
    ids=["key", "key id", "tenant", "worker"],
)
@run_async
async def test_an_agent_that_is_not_who_it_says_gets_no_session(
    nats_server: NatsServer, tmp_path: Path, changes: dict[str, Any]
) -> None:
    options = agent_options(**changes)
    options["worker_id"] = changes.get("worker_id", "agent")
    async with (
        plane(tmp_path / "data", nats_server, **flags(tmp_path)) as cap,
        cap.agent(**options) as agent,
    ):
        agent.job(TOPIC)(double)
        with pytest.raises(WorkerTrustRuntimeError):
            await agent.start()
        assert "cap:agent" not in cap.engine.open_jobs.roster.workers


# -- the handshake, step by step ------------------------------------------------------


@run_async
async def test_a_session_outlives_the_engine_and_a_renewal_replaces_it(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    given = flags(tmp_path)
    async with plane(tmp_path / "data", nats_server, **given) as cap:
        first = await Worker(cap).session()
    async with plane(tmp_path / "data", nats_server, **given) as cap:
        worker, sessions = Worker(cap), cap.bridge._sessions
        assert sessions is not None
        assert sessions.is_live("agent", first, time.time())
        assert not sessions.is_live("agent", first, time.time() + 3601)
        second = await worker.session(RENEW, first)
        assert sessions.is_live("agent", second, time.time())
        assert sessions.is_live("agent", first, time.time()), "reports may be on their way"
        assert not sessions.is_live("agent", first, time.time() + 61)
        assert not sessions.is_live("client", second, time.time())
        with pytest.raises(WorkerHandshakeRejectionError) as rejected:
            await worker.session(RENEW, first)
        assert (
            rejected.value.reason == handshake_pb2.WORKER_HANDSHAKE_REJECTION_REASON_SESSION_INVALID
        )
        # Who begins anew has no session but the new one.
        third = await worker.session()
        assert sessions.is_live("agent", third, time.time())
        assert not sessions.is_live("agent", second, time.time())


@run_async
async def test_a_challenge_counts_once_and_only_with_the_right_proof(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path / "data", nats_server, **flags(tmp_path)) as cap:
        worker = Worker(cap)
        verified, proof = await worker.prove()
        forged = buspacket_pb2.BusPacket()
        forged.CopyFrom(proof)
        forged.signature = finalize_packet(
            packet_of("agent", handshake=proof.worker_handshake_authenticate.capability_handshake),
            AGENT,
        ).signature
        answer = await worker.ask(AUTHENTICATE, forged)
        assert not answer.worker_handshake_result.accepted
        assert answer.worker_handshake_result.rejection_reason == 2
        answer = await worker.ask(AUTHENTICATE, proof)
        assert verify_result(trust(), verified, proof, answer, _now()).token
        again = await worker.ask(AUTHENTICATE, proof)
        assert (again.worker_handshake_result.rejection_reason, again.auth_token) == (3, "")
        # Neither a request nor a nonce makes a second challenge.
        request = worker.request(request_id="same", client_nonce=b"n" * 32)
        await worker.ask(CHALLENGE, request)
        for packet in (
            request,
            worker.request(request_id="same"),
            worker.request(client_nonce=b"n" * 32),
        ):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(worker.ask(CHALLENGE, packet), 0.2)
        assert cap.bridge.rejected == {103: 2, 205: 3}


@run_async
async def test_noise_on_the_subjects_of_the_handshake_does_no_harm(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path / "data", nats_server, **flags(tmp_path)) as cap:
        worker = Worker(cap)
        request = marshal_worker_trust_packet(worker.request())
        for subject in (CHALLENGE, AUTHENTICATE):
            for data in (
                b"",
                b"\xff noise",
                request[:-3],
                request + b"\xc2\x3e\x01x",
                b"x" * 70_000,
            ):
                await cap.nc.publish(subject, data, reply="_INBOX.nobody")
        await cap.nc.publish(AUTHENTICATE, request, reply="_INBOX.nobody")
        await soon(lambda: cap.bridge.rejected == {101: 11})
        assert await worker.session()


# -- what is required in production ---------------------------------------------------


@run_async
async def test_in_production_nobody_is_believed_without_a_session_and_a_seal(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with (
        plane(tmp_path / "data", nats_server, **flags(tmp_path)) as cap,
        cap.agent(**production_options()) as agent,
    ):
        begun, goes_on = asyncio.Event(), asyncio.Event()

        async def slow(context: Any, value: Any) -> str:
            begun.set()
            await goes_on.wait()
            return "mine"

        agent.job(TOPIC)(slow)
        await agent.start()
        await cap.knows("agent")
        await submit(cap, "held")
        await asyncio.wait_for(begun.wait(), 10)
        held = cap.bridge._held["held"]
        token = agent.session_token

        def signed(token: str = "", **payload: Any) -> bytes:
            packet = finalize_packet(packet_of("agent", **payload), AGENT, session_token=token)
            data: bytes = packet.SerializeToString(deterministic=True)
            return data

        def sealed(subject: str, token: str, **payload: Any) -> bytes:
            packet = packet_of("agent", **payload)
            packet.auth_token, packet.identity.tenant_id = token, "acme"
            data: bytes = seal_production_event(packet, key=AGENT, key_id="a1", audience=subject)
            return data

        result = job_pb2.JobResult(job_id="held", status=5, worker_id="agent")
        progress = job_pb2.JobProgress(job_id="held", percent=50)
        hello = handshake_pb2.Handshake(component_id="agent", role=3, ready_topics=["job.other"])
        beat = heartbeat_pb2.Heartbeat(worker_id="agent", max_parallel_jobs=9)
        job = job_pb2.JobRequest(job_id="bare", topic=TOPIC)
        for subject, data in (
            ("sys.job.result", signed(token, job_result=result)),
            ("sys.job.result", sealed("sys.job.result", "", job_result=result)),
            ("sys.job.result", sealed("sys.job.result", "wrong", job_result=result)),
            ("sys.job.result", sealed("sys.job.progress", token, job_result=result)),
            ("sys.job.progress", sealed("sys.job.progress", "", job_progress=progress)),
            ("sys.handshake", signed(handshake=hello)),
            ("sys.heartbeat", signed("wrong", heartbeat=beat)),
            ("sys.job.submit", signed(token, job_request=job)),
        ):
            before = cap.bridge.rejected[103]
            await cap.nc.publish(subject, data)
            await soon(lambda before=before: cap.bridge.rejected[103] == before + 1)  # type: ignore[misc]
        # A result of another dispatch is late, whoever says it.
        result.dispatch.attempt = held.attempt
        result.dispatch.dispatch_id = "guessed"
        late = cap.bridge.late
        await cap.nc.publish("sys.job.result", sealed("sys.job.result", token, job_result=result))
        await soon(lambda: cap.bridge.late == late + 1)
        # The client of another tenant can't end it.
        cancel = packet_of("client", job_cancel=job_pb2.JobCancel(job_id="held", requested_by="c"))
        cancel.identity.tenant_id = "other"
        data = seal_production_event(cancel, key=CLIENT, key_id="client", audience="sys.job.cancel")
        await cap.nc.publish("sys.job.cancel", data)
        await soon(lambda: cap.bridge.rejected[204] == 1)
        goes_on.set()
        done = await cap.done("held")
        assert (done.state, await cap.result(done)) == (JobState.SUCCEEDED, b'"mine"')
        assert cap.engine.open_jobs.roster.workers["cap:agent"].topics == (TOPIC,)


@run_async
async def test_a_job_of_another_tenant_is_not_sent_to_a_worker_with_a_session(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with (
        plane(tmp_path / "data", nats_server, **flags(tmp_path)) as cap,
        cap.agent(**production_options()) as agent,
    ):
        agent.job(TOPIC)(double)
        await agent.start()
        await cap.knows("agent")
        await submit(cap, "foreign", tenant="other")
        job = await cap.done("foreign")
        assert job.state is JobState.FAILED
        assert job.result is not None
        assert job.result.error_code == "PERMISSION_DENIED"


@run_async
async def test_in_production_a_job_waits_for_a_worker_that_proves_who_it_is(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with plane(tmp_path / "data", nats_server, **flags(tmp_path)) as cap:
        await cap.nc.subscribe(TOPIC)  # somebody listens, without a session
        await submit(cap, "waits", b'{"n": 3}')

        async def is_waiting() -> bool:
            job = await cap.bridge._engine.find("waits")
            return job is not None and job.state is JobState.SCHEDULED

        async with asyncio.timeout(10):
            while not await is_waiting():  # noqa: ASYNC110  (over the public way alone)
                await asyncio.sleep(0.02)
        async with cap.agent(**production_options()) as agent:
            agent.job(TOPIC)(double)
            await agent.start()
            job = await cap.done("waits")
            assert (job.state, await cap.result(job)) == (JobState.SUCCEEDED, b"6")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cap.keys": None}, "needs cap.keys and cap.private_key"),
        ({"cap.private_key": None}, "needs cap.keys and cap.private_key"),
        ({"cap.topics": ["job.a"]}, "must announce themselves"),
    ],
)
def test_production_without_what_it_needs_is_refused(
    nats_server: NatsServer, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    given = {**flags(tmp_path), "bus.url": nats_server.url, "cap.enabled": True, **changes}
    given = {name: value for name, value in given.items() if value is not None}
    settings = load(environ={}, flags={"data_dir": str(tmp_path / "data"), **given})
    with pytest.raises(Misconfigured, match=problem):
        asyncio.run(Engine(settings).start())
