"""Signatures of CAP's production profile: the SDK's own functions are the other side."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from cap.pb.cordum.agent.v1 import buspacket_pb2, handshake_pb2, job_pb2
from cap.production_events import admit_production_event, seal_production_event
from cap.production_replay import InMemoryReplayStore
from cap.production_signing import ProductionTrust, extract_signature, verify_production_packet
from cryptography.hazmat.primitives.asymmetric import ec
from tests.support.cap import packet_of

from penstock.adapters.nats.codec import Codec, ReplayStore, Sender, SigningKey
from penstock.adapters.nats.packets import Rejected
from penstock.adapters.nats.stream import Delivery

SUBMIT = "sys.job.submit"
CLIENT, OURS, STRANGER, OLD = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
KEYS = {"k1": CLIENT.public_key(), "k0": OLD.public_key()}


def codec(*, production: bool = True, tenant: str = "", **options: Any) -> Codec:
    senders = {"client": Sender(KEYS, tenant)}
    return Codec("penstock", SigningKey("p1", OURS), senders, production=production, **options)


def asked(tenant: str = "acme", **fields: Any) -> Any:
    request = job_pb2.JobRequest(job_id="j", topic="job.a", tenant_id=tenant, **fields)
    packet = packet_of("client", job_request=request)
    packet.identity.tenant_id = "acme"
    return packet


def sealed(packet: Any = None, **changes: Any) -> bytes:
    options = {"key": CLIENT, "key_id": "k1", "audience": SUBMIT, **changes}
    data: bytes = seal_production_event(packet or asked(), **options)
    return data


def code(reader: Codec, data: bytes, subject: str = SUBMIT, **options: Any) -> int:
    with pytest.raises(Rejected) as rejected:
        reader.decode(data, subject, time.time(), **options)
    assert rejected.value.sender == "client"
    return rejected.value.code


def test_a_sealed_submission_is_read_with_any_key_of_its_sender() -> None:
    for key_id, key in (("k1", CLIENT), ("k0", OLD)):
        packet = codec().decode(sealed(key_id=key_id, key=key), SUBMIT, time.time())
        assert packet is not None
        assert (packet.job_request.job_id, packet.identity.tenant_id) == ("j", "acme")


def _changed() -> bytes:
    return sealed().replace(b"job.a", b"job.b")


def _unknown_field() -> bytes:
    return sealed() + b"\xc2\x3e\x01x"  # field 1000


def _twice_signed() -> bytes:
    data = sealed()
    unsigned, _ = extract_signature(data)
    return data + data[len(unsigned) :]


WRONG: dict[str, tuple[Callable[[], bytes], int]] = {
    "another audience": (lambda: sealed(audience="sys.job.result"), 103),
    "another key": (lambda: sealed(key=STRANGER), 103),
    "unknown key id": (lambda: sealed(key_id="k9"), 103),
    "key id of another key": (lambda: sealed(key_id="k0"), 103),
    "changed": (_changed, 103),
    "unknown field": (_unknown_field, 103),
    "two signatures": (_twice_signed, 103),
    "no identity": (lambda: sealed(packet_of("client", job_request=asked().job_request)), 103),
    "identity of another tenant": (lambda: sealed(asked("other")), 202),
    "tenant in env": (lambda: sealed(asked(env={"tenant_id": "other"})), 202),
    "unsigned": (lambda: asked().SerializeToString(), 104),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrongly_sealed_is_rejected(name: str) -> None:
    make, expected = WRONG[name]
    assert code(codec(), make()) == expected


def test_a_sealed_packet_expires() -> None:
    data = sealed(lifetime=timedelta(seconds=30))
    reader = codec()
    with pytest.raises(Rejected, match="expired"):
        reader.decode(data, SUBMIT, time.time() + 91)  # a minute of skew is allowed
    with pytest.raises(Rejected, match="lifetime"):
        reader.decode(sealed(), SUBMIT, time.time() - 61)
    assert reader.decode(data, SUBMIT, time.time() + 89) is not None


def test_what_waited_in_a_stream_is_judged_by_when_it_was_sent() -> None:
    sent = time.time()
    data = sealed()
    waited = Delivery(sequence=7, stored_at=sent, is_repeated=False, receipt="r")
    assert codec().decode(data, SUBMIT, sent + 3600, waited) is not None


def test_an_ordinary_signature_is_not_enough_if_the_profile_is_required() -> None:
    senders = {"client": Sender({"k1": CLIENT.public_key()})}
    writer = Codec("client", SigningKey("k1", CLIENT))
    data = writer.encode(SUBMIT, "t", time.time(), job_request=asked().job_request)
    assert code(Codec("penstock", SigningKey("p1", OURS), senders, production=True), data) == 103
    assert codec(production=False).decode(data, SUBMIT, time.time()) is not None
    assert codec(production=False).decode(sealed(), SUBMIT, time.time()) is not None
    # As in the SDK, the profile is for packets about jobs.
    hello = handshake_pb2.Handshake(component_id="client", role=3)
    data = writer.encode("sys.handshake", "t", time.time(), handshake=hello)
    assert codec().decode(data, "sys.handshake", time.time()) is not None


def test_a_repetition_is_ignored_and_another_packet_of_the_same_id_is_rejected() -> None:
    reader, data, now = codec(), sealed(), time.time()
    first = Delivery(sequence=1, stored_at=now, is_repeated=False, receipt="r")
    again = Delivery(sequence=2, stored_at=now, is_repeated=False, receipt="r")
    assert reader.decode(data, SUBMIT, now, first) is not None
    assert reader.decode(data, SUBMIT, now, first) is not None, "it was not acknowledged"
    assert reader.decode(data, SUBMIT, now, again) is None
    assert reader.decode(data, SUBMIT, now) is None
    message_id = buspacket_pb2.BusPacket.FromString(data).signature_metadata.message_id
    other = asked(memory_id="m")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cap.production_events.os.urandom", lambda _: message_id)
        assert code(reader, sealed(other)) == 205
        # It is another message to another audience.
        result = job_pb2.JobResult(job_id="j", status=5, worker_id="client")
        said = packet_of("client", job_result=result)
        said.identity.tenant_id = "acme"
        data = sealed(said, audience="sys.job.result")
    assert reader.decode(data, "sys.job.result", now) is not None


def test_a_full_replay_store_admits_nothing_until_its_packets_expire() -> None:
    store, now = ReplayStore(max_entries=2), 1000.0
    assert store.admit(b"1", b"d", -1, now + 5, now)
    assert store.admit(b"2", b"d", -1, now + 5, now)
    with pytest.raises(Rejected) as rejected:
        store.admit(b"3", b"d", -1, now + 5, now)
    assert rejected.value.code == 201
    assert not store.admit(b"2", b"d", -1, now + 5, now)
    assert store.admit(b"3", b"d", -1, now + 20, now + 10)


def test_a_sender_of_one_tenant_can_not_speak_for_another() -> None:
    assert code(codec(tenant="other"), sealed()) == 103
    writer = Codec("client", SigningKey("k1", CLIENT))
    data = writer.encode(SUBMIT, "t", time.time(), job_request=asked().job_request)
    assert code(codec(production=False, tenant="other"), data) == 202
    assert codec(tenant="acme").decode(sealed(), SUBMIT, time.time()) is not None


def test_the_sdk_admits_what_we_seal() -> None:
    """Every byte is checked by its verifier, before its handler is called."""
    subject, identity = "worker.w.jobs", job_pb2.IdentityBinding(tenant_id="acme")
    request = asked(labels={"b": "1", "a": "2"}, env={"z": "1", "y": "2"}).job_request
    data = codec().encode(subject, "trace", time.time(), identity, job_request=request)
    trust = ProductionTrust(subject, {"p1": OURS.public_key()}, "acme", "penstock")
    taken: list[Any] = []
    store = InMemoryReplayStore()
    packet = admit_production_event(data, trust=trust, replay=store, handler=taken.append)
    assert packet is not None
    assert (taken[0].job_id, taken[0].identity) == ("j", identity)
    assert packet.signature_metadata.audience == subject
    assert admit_production_event(data, trust=trust, replay=store, handler=taken.append) is None
    assert len(taken) == 1
    for said in ("job_result", "job_progress", "job_cancel"):
        bare = {
            "job_result": job_pb2.JobResult(job_id="j", status=5, worker_id="penstock"),
            "job_progress": job_pb2.JobProgress(job_id="j", percent=1),
            "job_cancel": job_pb2.JobCancel(job_id="j", requested_by="penstock"),
        }[said]
        data = codec().encode(subject, "trace", time.time(), identity, **{said: bare})
        assert verify_production_packet(data, trust).WhichOneof("payload") == said


def test_nobody_can_foretell_the_id_of_a_dispatch() -> None:
    first, other = codec().dispatch_id("j", 1), Codec("penstock", SigningKey("p", OLD))
    assert first == codec().dispatch_id("j", 1), "the same after a restart"
    assert len({first, codec().dispatch_id("j", 2), other.dispatch_id("j", 1)}) == 3
