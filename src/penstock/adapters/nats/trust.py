"""The trust handshake of CAP workers, on the scheduler's side.

A worker proves that it has the private key of a public key in `cap.keys`, and gets a session token,
which it puts into every packet from then on. There are two requests: for a challenge, which we
sign, and for its authentication, which the worker signs. A challenge counts once; a new session
replaces the one before. Digests of tokens are in the engine's shared state: a session outlives a
restart.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from cap.pb.cordum.agent.v1 import buspacket_pb2, handshake_pb2
from cap.trust_signing import TrustSigningError, sign_trust_packet, verify_trust_packet
from cap.worker_trust import (
    WORKER_HANDSHAKE_AUDIENCE,
    WORKER_HANDSHAKE_MAX_LIFETIME,
    WORKER_HANDSHAKE_MAX_SKEW,
    WorkerHandshakePacketError,
)
from cap.worker_trust_codec import marshal_worker_trust_packet, unmarshal_worker_trust_packet
from msgspec import Struct

from penstock.adapters.nats.codec import Sender, SigningKey
from penstock.adapters.nats.packets import (
    BAD_SIGNATURE,
    DUPLICATE,
    EXHAUSTED,
    MALFORMED,
    VERSION,
    Rejected,
)
from penstock.ports.shared_state import SharedState

SESSION = 3600.0
"""Seconds that a session lasts; the SDK renews it after half of that."""
_STATE = "cap/sessions/"
_IN_FLIGHT = 60.0
"""Seconds for which reports with the token before count: they may have been on their way."""
_MAX_CHALLENGES = 10_000
_RENEW = handshake_pb2.WORKER_HANDSHAKE_PURPOSE_RENEW


class _Session(Struct, frozen=True):
    digest: bytes
    tenant: str
    key_id: str
    issued_at: float
    expires_at: float
    before: bytes = b""
    """Digest of the token that this one replaced."""


class SessionIssuer:
    """Issues sessions to workers, and knows which are live."""

    def __init__(
        self,
        sender_id: str,
        signing_key: SigningKey,
        senders: Mapping[str, Sender],
        state: SharedState,
        now: Callable[[], float],
    ) -> None:
        self._sender_id, self._signing_key, self._senders = sender_id, signing_key, senders
        self._state, self._now = state, now
        self._sessions: dict[str, _Session] = {}
        """By worker."""
        self._challenges: OrderedDict[str, Any] = OrderedDict()
        """Those that were not answered, by their ids."""
        self._asked: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        """Request ids and client nonces by worker, and when they may be forgotten."""

    async def restore(self) -> None:
        for name, value in (await self._state.read_all(_STATE)).items():
            self._sessions[name.removeprefix(_STATE)] = msgspec.msgpack.decode(value, type=_Session)

    def is_live(self, worker_id: str, token: str, sent_at: float) -> bool:
        """Whether a packet that was sent then has the token of its sender's session."""
        session, sender = self._sessions.get(worker_id), self._senders.get(worker_id)
        if session is None or sender is None or session.key_id not in sender.keys:
            return False
        digest = _digest(token)
        if hmac.compare_digest(digest, session.digest):
            return sent_at < session.expires_at
        is_before = bool(session.before) and hmac.compare_digest(digest, session.before)
        return is_before and sent_at < session.issued_at + _IN_FLIGHT

    def tenant(self, worker_id: str) -> str:
        """The tenant of a worker's session; empty: it has none."""
        session = self._sessions.get(worker_id)
        return session.tenant if session is not None else ""

    # -- the two requests ----------------------------------------------------------

    def challenge(self, data: bytes) -> bytes:
        """The answer to a request for a challenge. Raises Rejected: that has no answer."""
        packet, key_id, _ = self._read(data, "worker_handshake_challenge_request")
        asked, now = packet.worker_handshake_challenge_request, self._now()
        sender = packet.sender_id
        while self._asked and next(iter(self._asked.values())) < now:
            self._asked.popitem(last=False)
        for mark in ((sender, asked.request_id.encode()), (sender, asked.client_nonce)):
            if mark in self._asked:
                raise Rejected(DUPLICATE, "a request for a challenge came twice", sender[:128])
            if len(self._asked) >= 2 * _MAX_CHALLENGES:
                raise Rejected(EXHAUSTED, "too many requests for challenges", sender[:128])
            self._asked[mark] = now + 2 * WORKER_HANDSHAKE_MAX_SKEW.total_seconds()
        challenge = handshake_pb2.WorkerHandshakeChallenge(
            request_id=asked.request_id,
            challenge_id=secrets.token_hex(16),
            trace_id=asked.trace_id,
            worker_id=sender,
            agent_id=sender,
            tenant_id=self._senders[sender].tenant or "default",
            proof_key_id=key_id,
            proof_algorithm=asked.proof_algorithm,
            server_key_id=self._signing_key.key_id,
            audience=WORKER_HANDSHAKE_AUDIENCE,
            purpose=asked.purpose,
            client_nonce=asked.client_nonce,
            server_nonce=secrets.token_bytes(32),
            protocol_version=VERSION,
            sdk_version=asked.sdk_version,
        )
        _set(challenge.issued_at, now)
        _set(challenge.expires_at, now + WORKER_HANDSHAKE_MAX_LIFETIME.total_seconds())
        self._challenges[challenge.challenge_id] = challenge
        if len(self._challenges) > _MAX_CHALLENGES:
            self._challenges.popitem(last=False)
        return self._sign(asked.trace_id, "", worker_handshake_challenge=challenge)

    async def authenticate(self, data: bytes) -> tuple[bytes, Rejected | None]:
        """The answer to a signed challenge, and what is wrong with it. Raises Rejected."""
        packet, _, wrong = self._read(data, "worker_handshake_authenticate")
        told = packet.worker_handshake_authenticate.challenge
        reason, said = wrong or self._judge(packet)
        result = handshake_pb2.WorkerHandshakeResult(accepted=not reason, rejection_reason=reason)
        result.challenge.CopyFrom(told)
        now = self._now()
        _set(result.issued_at, now)
        if reason:
            answer = self._sign(told.trace_id, "", worker_handshake_result=result)
            return answer, Rejected(BAD_SIGNATURE, said, packet.sender_id[:128])
        token, before = secrets.token_urlsafe(32), self._sessions.get(packet.sender_id)
        session = _Session(
            *(_digest(token), told.tenant_id, told.proof_key_id, now, now + SESSION),
            before.digest if before is not None and told.purpose == _RENEW else b"",
        )
        await self._state.write(_STATE + packet.sender_id, msgspec.msgpack.encode(session))
        self._sessions[packet.sender_id] = session
        _set(result.token_expires_at, session.expires_at)
        return self._sign(told.trace_id, token, worker_handshake_result=result), None

    def _read(self, data: bytes, payload: str) -> tuple[Any, str, tuple[int, str] | None]:
        """A packet of a known worker, the id of its key, and why it is refused.

        Raises Rejected if it can't be answered."""
        try:
            packet = unmarshal_worker_trust_packet(data)
        except WorkerHandshakePacketError as error:
            raise Rejected(MALFORMED, f"trust handshake: {error}") from error
        sender_id = packet.sender_id
        if packet.WhichOneof("payload") != payload:
            raise Rejected(MALFORMED, f"trust handshake: not a {payload}", sender_id[:128])
        told = getattr(packet, payload)
        told = told if payload.endswith("request") else told.challenge
        sender = self._senders.get(sender_id)
        try:
            if sender is None or told.audience != WORKER_HANDSHAKE_AUDIENCE:
                raise TrustSigningError("unknown worker or audience")
            verify_trust_packet(packet, sender.keys)
        except TrustSigningError as error:
            said = f"trust handshake: {error}"
            if payload.endswith("request"):
                raise Rejected(BAD_SIGNATURE, said, sender_id[:128]) from error
            return packet, "", (_reason("AUTHENTICATION_FAILED"), said)
        created = packet.created_at.ToDatetime(tzinfo=UTC)
        if abs(created - datetime.fromtimestamp(self._now(), UTC)) > WORKER_HANDSHAKE_MAX_SKEW:
            said = "trust handshake: created_at is more than 60 s away from now"
            if payload.endswith("request"):
                raise Rejected(BAD_SIGNATURE, said, sender_id[:128])
            return packet, "", (_reason("CLOCK_SKEW"), said)
        return packet, told.proof_key_id, None

    def _judge(self, packet: Any) -> tuple[int, str]:
        """Why an authentication whose signature is right is refused; 0 if it is not.

        Takes the challenge away, so that it counts once."""
        told = packet.worker_handshake_authenticate.challenge
        if told.purpose == _RENEW:
            session = self._sessions.get(packet.sender_id)
            is_bound = session is not None and (session.tenant, session.key_id) == (
                told.tenant_id,
                told.proof_key_id,
            )
            if (
                session is None
                or not is_bound
                or not hmac.compare_digest(_digest(packet.auth_token), session.digest)
                or self._now() >= session.expires_at
            ):
                return _reason("SESSION_INVALID"), "trust handshake: the session is not live"
        ours = self._challenges.get(told.challenge_id)
        if ours is None:
            return _reason("REPLAY_DETECTED"), "trust handshake: unknown or used challenge"
        if ours != told or told.worker_id != packet.sender_id:
            return _reason("AUTHENTICATION_FAILED"), "trust handshake: another challenge"
        del self._challenges[told.challenge_id]
        if self._now() >= told.expires_at.ToDatetime(tzinfo=UTC).timestamp():
            return _reason("CHALLENGE_EXPIRED"), "trust handshake: the challenge has expired"
        return 0, ""

    def _sign(self, trace_id: str, token: str, **payload: Any) -> bytes:
        packet = buspacket_pb2.BusPacket(
            trace_id=trace_id,
            sender_id=self._sender_id,
            protocol_version=VERSION,
            auth_token=token,
            **payload,
        )
        _set(packet.created_at, self._now())
        sign_trust_packet(packet, self._signing_key.key)
        data: bytes = marshal_worker_trust_packet(packet)
        return data


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _reason(name: str) -> int:
    value: int = handshake_pb2.WorkerHandshakeRejectionReason.Value(
        f"WORKER_HANDSHAKE_REJECTION_REASON_{name}"
    )
    return value


def _set(timestamp: Any, seconds: float) -> None:
    timestamp.FromNanoseconds(int(seconds * 1e9))
