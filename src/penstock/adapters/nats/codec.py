"""Reading and writing of CAP packets (`cordum.agent.v1.BusPacket`), with their signatures. Pure.

Two profiles of signatures. *Ordinary*: ECDSA over the packet, serialised deterministically.
*Production* (`cap-production-v1`): ECDSA over the bytes as they are on the wire, with a message id,
an expiry, the id of the key, and the subject as audience. As in the SDK, the production profile is
for packets about jobs; handshakes, heartbeats and alerts have ordinary signatures.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from cap.packet_boundary import finalize_packet
from cap.pb.cordum.agent.v1 import alert_pb2, buspacket_pb2, job_pb2
from cap.production_events import seal_production_event
from cap.production_signing import (
    MAX_CLOCK_SKEW,
    ProductionSignatureError,
    ProductionTrust,
    extract_signature,
    verify_production_packet,
)
from cap.production_validation import IdentityMismatchError, validate_identity_binding
from cap.validate import validate_bus_packet
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.protobuf.message import DecodeError
from msgspec import Struct

from penstock.adapters.nats.packets import (
    BAD_SIGNATURE,
    DENIED,
    DUPLICATE,
    EXHAUSTED,
    MALFORMED,
    NO_SIGNATURE,
    UNKNOWN_PAYLOAD,
    VERSION,
    VERSION_MISMATCH,
    Rejected,
    tenant_of,
)
from penstock.adapters.nats.stream import Delivery

MAX_PACKET = 1 << 20
"""Bytes."""
MAX_SKEW = 300.0
"""Seconds that the time of a packet with an ordinary signature may differ from ours."""
_LIFETIME = timedelta(minutes=4)
"""Of our packets: a receiver whose clock is up to a minute behind still accepts 5 minutes."""
_MAX_REMEMBERED = 1_000_000
"""Signed packets by which a repetition is known."""
_SEALED = frozenset({"job_request", "job_result", "job_progress", "job_cancel"})
"""Payloads that the production profile is for."""
_SEVERITY = {
    VERSION_MISMATCH: alert_pb2.ALERT_SEVERITY_ERROR,
    MALFORMED: alert_pb2.ALERT_SEVERITY_ERROR,
    UNKNOWN_PAYLOAD: alert_pb2.ALERT_SEVERITY_WARNING,
    BAD_SIGNATURE: alert_pb2.ALERT_SEVERITY_CRITICAL,
    NO_SIGNATURE: alert_pb2.ALERT_SEVERITY_CRITICAL,
}


class Sender(Struct, frozen=True):
    """Somebody whose signatures are accepted."""

    keys: Mapping[str, ec.EllipticCurvePublicKey]
    """By their ids."""
    tenant: str = ""
    """The one tenant for which it may speak; empty: for all."""


class SigningKey(Struct, frozen=True):
    key_id: str
    key: ec.EllipticCurvePrivateKey


class ReplayStore:
    """Signed packets that were received, until they expire. If it is full, none is admitted."""

    def __init__(self, max_entries: int = _MAX_REMEMBERED) -> None:
        self._max_entries = max_entries
        self._seen: OrderedDict[bytes, tuple[bytes, int, float]] = OrderedDict()
        """Digests of packets, their numbers in a stream and when they expire, by their ids."""

    def admit(self, key: bytes, digest: bytes, number: int, expires: float, now: float) -> bool:
        """False for a repetition; one that the stream delivers again (`number`) is none.

        Raises Rejected for another packet with the same id."""
        known = self._seen.get(key)
        if known is not None:
            if known[0] != digest:
                raise Rejected(DUPLICATE, "the message id was used by another packet")
            return number >= 0 and known[1] == number
        while self._seen and next(iter(self._seen.values()))[2] < now:
            self._seen.popitem(last=False)
        if len(self._seen) >= self._max_entries:
            raise Rejected(EXHAUSTED, "too many signed packets within their lifetime")
        self._seen[key] = digest, number, expires
        return True


class Codec:
    """Reads and writes packets in the name of one component."""

    def __init__(
        self,
        sender_id: str,
        signing_key: SigningKey | None = None,
        senders: Mapping[str, Sender] | None = None,
        *,
        production: bool = False,
        replays: ReplayStore | None = None,
    ) -> None:
        """With `senders` every packet must be signed; with `production`, every packet about a job
        must have, and gets, a signature of the production profile."""
        self.sender_id, self.senders, self.is_production = sender_id, senders, production
        self.signing_key = signing_key
        self._replays = replays or ReplayStore()
        self._secret = b""
        if signing_key is not None:
            private = signing_key.key.private_bytes(
                Encoding.DER, PrivateFormat.PKCS8, NoEncryption()
            )
            self._secret = hashlib.sha256(b"penstock-cap-dispatch\0" + private).digest()

    # -- reading -------------------------------------------------------------------

    def decode(
        self, data: bytes, subject: str, now: float, delivery: Delivery | None = None
    ) -> buspacket_pb2.BusPacket | None:
        """None for a packet that was received before. Raises Rejected.

        `delivery`: how it came out of a stream."""
        if len(data) > MAX_PACKET:
            raise Rejected(MALFORMED, f"a packet of {len(data)} bytes (maximum {MAX_PACKET})")
        packet = buspacket_pb2.BusPacket()
        try:
            packet.ParseFromString(data)
        except (DecodeError, ValueError) as error:
            raise Rejected(MALFORMED, "a packet that can't be parsed") from error
        sender = packet.sender_id[:128]
        if packet.protocol_version != VERSION:
            said = f"protocol_version {packet.protocol_version} (must be {VERSION})"
            raise Rejected(VERSION_MISMATCH, said, sender)
        try:
            is_new = self._admit(data, packet, subject, now, delivery)
        except Rejected as rejected:
            raise Rejected(rejected.code, rejected.message, sender) from rejected
        if packet.WhichOneof("payload") is None:
            raise Rejected(UNKNOWN_PAYLOAD, "a packet without a known payload", sender)
        if problems := validate_bus_packet(packet):
            first = problems[0]
            raise Rejected(MALFORMED, f"{first.field} {first.message}", sender)
        return packet if is_new else None

    def _admit(
        self,
        data: bytes,
        packet: buspacket_pb2.BusPacket,
        subject: str,
        now: float,
        delivery: Delivery | None,
    ) -> bool:
        """Whether a packet that may be read is new. Raises Rejected."""
        if self.senders is None or packet.sender_id == self.sender_id:  # our own is not read
            return True
        if not packet.signature:
            raise Rejected(NO_SIGNATURE, "a packet without a signature")
        sender = self.senders.get(packet.sender_id)
        if sender is None:
            raise Rejected(BAD_SIGNATURE, f"no key is known of {packet.sender_id[:128]!r}")
        payload = packet.WhichOneof("payload")
        sent = now if delivery is None else delivery.stored_at
        is_sealed = packet.HasField("signature_metadata")
        if is_sealed:
            digest, expires = _verify_sealed(data, packet, sender, subject, sent)
            said = packet.signature_metadata
            owner = (packet.identity.tenant_id, said.audience, packet.sender_id)
            key = hashlib.sha256("\0".join(owner).encode() + b"\0" + said.message_id).digest()
        elif self.is_production and payload in _SEALED:
            raise Rejected(
                BAD_SIGNATURE, f"{payload} without a signature of the production profile"
            )
        else:
            digest = key = _verify(packet, sender, sent)
            expires = packet.created_at.seconds + MAX_SKEW
        if payload == "job_request" and sender.tenant not in ("", tenant_of(packet)):
            raise Rejected(DENIED, f"the sender may speak for tenant {sender.tenant!r} only")
        number = -1 if delivery is None else delivery.sequence
        is_new = self._replays.admit(key, digest, number, expires, now)
        if not is_new and not is_sealed:
            raise Rejected(DUPLICATE, "a packet that was received before")
        return is_new

    def tenant(self, packet: buspacket_pb2.BusPacket) -> str:
        """The one tenant for which the sender of a packet may speak; empty: for all."""
        if self.senders is None:
            return ""
        if packet.HasField("signature_metadata"):
            return str(packet.identity.tenant_id)
        sender = self.senders.get(packet.sender_id)
        return sender.tenant if sender is not None else ""

    # -- writing -------------------------------------------------------------------

    def encode(
        self, subject: str, trace_id: str, now: float, identity: Any = None, **payload: Any
    ) -> bytes:
        """One payload, by its field's name, as `job_request=...`; `identity`: for whom."""
        packet = buspacket_pb2.BusPacket(
            trace_id=trace_id or "none",
            sender_id=self.sender_id,
            protocol_version=VERSION,
            **payload,
        )
        packet.created_at.FromNanoseconds(int(now * 1e9))
        if not (self.is_production and _SEALED & payload.keys()):
            if self.signing_key is not None:
                packet = finalize_packet(packet, self.signing_key.key)
            ordinary: bytes = packet.SerializeToString(deterministic=True)
            return ordinary
        assert self.signing_key is not None
        if identity is not None:
            packet.identity.CopyFrom(identity)
            getattr(packet, next(iter(payload))).identity.CopyFrom(identity)
        sealed: bytes = seal_production_event(
            finalize_packet(packet),
            key=self.signing_key.key,
            key_id=self.signing_key.key_id,
            audience=subject,
            lifetime=_LIFETIME,
            now=lambda: datetime.fromtimestamp(now, UTC),
        )
        return sealed

    def dispatch_id(self, job_id: str, attempt: int) -> str:
        """The id of a dispatch. With a key of ours nobody else can foretell it."""
        told = f"{job_id}#{attempt}"
        if not self._secret:
            return told
        return hmac.new(self._secret, told.encode(), hashlib.sha256).hexdigest()[:32]

    def alert(self, subject: str, rejected: Rejected, now: float) -> bytes:
        severity = _SEVERITY.get(rejected.code, alert_pb2.ALERT_SEVERITY_WARNING)
        level = alert_pb2.AlertSeverity.Name(severity).rpartition("_")[2]
        alert = alert_pb2.SystemAlert(
            level=level,
            message=rejected.message,
            component=self.sender_id,
            code=str(rejected.code),
            severity=severity,
            error_code_enum=rejected.code,
            source_component=self.sender_id,
            details={"sender_id": rejected.sender},
        )
        return self.encode(subject, "alert", now, alert=alert)


def _verify(packet: buspacket_pb2.BusPacket, sender: Sender, now: float) -> bytes:
    """The digest of a packet with an ordinary signature. Raises Rejected."""
    unsigned = buspacket_pb2.BusPacket()
    unsigned.CopyFrom(packet)
    unsigned.ClearField("signature")
    body = unsigned.SerializeToString(deterministic=True)
    if not any(_is_signed(packet.signature, body, key) for key in sender.keys.values()):
        raise Rejected(BAD_SIGNATURE, "the signature is wrong")
    if abs(packet.created_at.seconds - now) > MAX_SKEW:
        raise Rejected(BAD_SIGNATURE, f"created_at is more than {MAX_SKEW:g} s away from now")
    return hashlib.sha256(body).digest()  # not of the signature: that can be changed


def _is_signed(signature: bytes, body: bytes, key: ec.EllipticCurvePublicKey) -> bool:
    try:
        key.verify(signature, body, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _verify_sealed(
    data: bytes, packet: buspacket_pb2.BusPacket, sender: Sender, subject: str, now: float
) -> tuple[bytes, float]:
    """The digest of a packet with a signature of the production profile, and when it expires.

    Raises Rejected."""
    trust = ProductionTrust(
        audience=subject,
        public_keys=sender.keys,
        tenant=sender.tenant or packet.identity.tenant_id,
        sender=packet.sender_id,
        clock_skew=MAX_CLOCK_SKEW,
        now=lambda: datetime.fromtimestamp(now, UTC),
    )
    try:
        verify_production_packet(data, trust)
        unsigned, _ = extract_signature(data)
    except ProductionSignatureError as error:
        raise Rejected(BAD_SIGNATURE, f"production profile: {error}") from error
    payload = packet.WhichOneof("payload")
    try:
        if payload == "job_request":
            validate_identity_binding(packet.job_request, packet.identity)
        elif payload in _SEALED:
            mirror = getattr(packet, payload).identity
            if mirror not in (packet.identity, job_pb2.IdentityBinding()):
                raise IdentityMismatchError(f"{payload}.identity mismatch")
    except IdentityMismatchError as error:
        raise Rejected(DENIED, f"production profile: {error}") from error
    expires = packet.signature_metadata.expires_at.seconds + 1 + MAX_CLOCK_SKEW.total_seconds()
    return hashlib.sha256(unsigned).digest(), expires
