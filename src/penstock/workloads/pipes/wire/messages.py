"""What nodes say to each other: kinds of frames, what is in the small ones (msgpack), and what is
refused, counted by its reason.

Fields are added at the end, with a default.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.workloads.pipes.config import WireFormat
from penstock.workloads.pipes.job import Hop, JobTime

PROTOCOL = 1
"""Nodes of different protocols do not talk. HELLO and BYE stay as they are for ever, so that
each can tell the other."""


class Kind(IntEnum):
    HELLO = 1
    """The first frame each way."""
    BYE = 2
    """The last one: why the connection ends."""
    PING = 3
    PONG = 4
    STATE = 5
    """Records of nodes: what each holds."""
    OPEN = 6
    """The origin asks for room for a job."""
    OPENED = 7
    STEPS = 8
    """Hidden states of one or more jobs, on their way to the next layers."""
    ACKED = 9
    """The last node of a pipe has taken a pass of which nothing is sent back."""
    FAILED = 10
    """A node can't go on with a job."""
    END = 11
    """The origin is done with a job."""
    ASSIGN = 12
    """Which layers a node is to hold."""


MAX_STEPS = 64 << 20
"""Bytes of a STEPS frame, unless told otherwise: 512 tokens of a model 16384 wide, in float32,
twice."""
_SMALL = 4 << 10
_CONTROL = 64 << 10

HELLO_LIMITS: Mapping[int, int] = {Kind.HELLO: _SMALL, Kind.BYE: _SMALL}
"""Before the peer is known."""


def limits(steps: int = MAX_STEPS) -> Mapping[int, int]:
    """The most bytes a frame of each kind may have after HELLO."""
    return {
        Kind.BYE: _SMALL,
        Kind.PING: 8,
        Kind.PONG: 8,
        # A record is a few kilobytes: fingerprints of all the layers that a node holds.
        Kind.STATE: 16 << 20,
        Kind.OPEN: _CONTROL,
        Kind.OPENED: _CONTROL,
        Kind.STEPS: steps,
        Kind.ACKED: _CONTROL,
        Kind.FAILED: _CONTROL,
        Kind.END: _CONTROL,
        Kind.ASSIGN: _CONTROL,
    }


def steps_limit(hidden: int, tokens: int, jobs: int = 256) -> int:
    """Bytes that one pass can need: its hidden states in float32, and a header for each job."""
    return hidden * tokens * 4 + jobs * _SMALL


class Refused(StrEnum):
    """Names in counters and in status."""

    # A connection that did not come about.
    NOT_TLS = "not_tls"
    NO_CERTIFICATE = "no_certificate"
    WRONG_KEY = "wrong_key"
    OLD_PROTOCOL = "old_protocol"
    NODE_ID_MISMATCH = "node_id_mismatch"
    """HELLO names another node than the certificate."""
    OWN_NODE_ID = "own_node_id"
    SECOND_CONNECTION = "second_connection"
    NOT_ADMITTED = "not_admitted"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    HANDSHAKE_BROKEN = "handshake_broken"
    """The peer went away before it said who it is."""
    TOO_MANY_HANDSHAKES = "too_many_handshakes"
    # A connection that had to be ended.
    BAD_FRAME = "bad_frame"
    UNKNOWN_KIND = "unknown_kind"
    OVERSIZED = "oversized"
    TRUNCATED = "truncated"
    TAMPERED = "tampered"
    """Bytes were changed, or sent again, on the way."""
    SILENT = "silent"
    NOT_READING = "not_reading"
    # One job of a frame.
    BAD_HASH = "bad_hash"
    BAD_DTYPE = "bad_dtype"
    BAD_SHAPE = "bad_shape"
    NOT_FINITE = "not_finite"
    # A node that is in no way.
    OTHER_WEIGHTS = "other_weights"
    # A word about a job.
    UNKNOWN_JOB = "unknown_job"
    """As a rule one that has just ended."""
    FOREIGN_ACK = "foreign_ack"
    """Not from who computes the last layers, or of a pass that has more to bring."""
    FOREIGN_FAILURE = "foreign_failure"
    """Not from a node of its way."""
    FOREIGN_END = "foreign_end"
    """Not from its origin."""


class Counters(Counter[str]):
    """One for a node. Others count here too, under names of their own."""

    def add(self, what: str) -> None:
        self[str(what)] += 1


_WRONG_KEY = frozenset(
    {
        "CERTIFICATE_VERIFY_FAILED",
        # What the other side says when it is the one that finds it.
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "TLSV1_ALERT_DECRYPT_ERROR",
    }
)
_NO_CERTIFICATE = frozenset(
    {"PEER_DID_NOT_RETURN_A_CERTIFICATE", "TLSV13_ALERT_CERTIFICATE_REQUIRED"}
)


def refusal_of(error: ssl.SSLError) -> tuple[Refused, str]:
    """What it failed for."""
    told = error.reason or ""
    if told in _WRONG_KEY:
        return Refused.WRONG_KEY, "it has another network's key"
    if told in _NO_CERTIFICATE:
        return Refused.NO_CERTIFICATE, "no certificate was shown"
    if told == "DECRYPTION_FAILED_OR_BAD_RECORD_MAC":
        return Refused.TAMPERED, "what came was changed on the way"
    return Refused.NOT_TLS, f"no handshake: {told.replace('_', ' ').lower() or error}"


class BadFrame(Exception):
    """What came in can't be taken. `what` is for the counters."""

    def __init__(
        self, reason: str, what: str = Refused.BAD_FRAME, job_id: bytes | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.what = reason, what
        self.job_id = job_id
        """The one job it is about; the others of its frame are well."""


# -- messages -----------------------------------------------------------------------

JobId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class Hello(Struct, frozen=True, kw_only=True):
    """Who speaks. Its node id is checked against its certificate."""

    protocol: int = PROTOCOL
    node_id: Name
    boot: Name
    """New at each start of the process."""
    address: Name = ""
    """HOST:PORT at which others reach it; empty if they can't."""
    observer: bool = False
    """Only looks: holds nothing, and is no member."""


class Bye(Struct, frozen=True):
    reason: str = ""
    what: str = ""
    """A name of `Refused`, if it was a refusal."""


class State(Struct, frozen=True, array_like=True):
    records: tuple[Raw, ...]
    """As msgpack, not read yet: what a record is, `net.records` knows."""


class Open(Struct, frozen=True, array_like=True):
    """The origin, who sends it, asks for room."""

    job_id: JobId
    pipe_id: Name
    model: Name
    hops: Annotated[tuple[Hop, ...], Meta(min_length=1, max_length=512)]
    """The whole way."""
    tokens: Annotated[int, Meta(ge=1, lt=1 << 32)]
    """Positions that the job may come to have."""
    reuse: Annotated[bytes, Meta(max_length=64)] | None = None
    """The key of a kept cache to go on from."""
    deadline: Seconds = 60.0
    """Seconds that it may wait."""
    wire: WireFormat = "exact"
    """How each node is to send its hidden states."""
    same: Count = 0
    """Positions that are the same in that cache as in this job: they need not be computed again."""


class Opened(Struct, frozen=True, array_like=True):
    job_id: JobId
    ok: bool
    have: Count = 0
    """Positions that the cache has already."""
    code: Name = ""
    reason: Text = ""
    waiting: bool = False
    """An interim word: there is no room yet, `reason` says why; it will be answered again."""


class Acked(Struct, frozen=True, array_like=True):
    job_id: JobId
    sequence: Count
    times: Annotated[tuple[JobTime, ...], Meta(max_length=512)] = ()


class Failed(Struct, frozen=True, array_like=True):
    job_id: JobId
    sequence: Count
    code: Name
    reason: Text
    node_id: Name
    lost: Name = ""
    """With NODE_LOST: whom it does not reach."""


class End(Struct, frozen=True, array_like=True):
    job_id: JobId
    keep: bool = False
    """Whether its cache is kept for a next turn, under the job's id."""
    seconds: Seconds = 0.0
    reason: Text = ""


class Assign(Struct, frozen=True, array_like=True):
    model: Name
    start: Count
    end: Count
    by: Name
    generation: Count = 0
    """Rises with each plan of the same coordinator."""


Message = Hello | Bye | State | Open | Opened | Acked | Failed | End | Assign

_KINDS: Mapping[type[Any], Kind] = {
    Hello: Kind.HELLO,
    Bye: Kind.BYE,
    State: Kind.STATE,
    Open: Kind.OPEN,
    Opened: Kind.OPENED,
    Acked: Kind.ACKED,
    Failed: Kind.FAILED,
    End: Kind.END,
    Assign: Kind.ASSIGN,
}
_DECODERS = {of: msgspec.msgpack.Decoder(of) for of in _KINDS}
_ENCODER = msgspec.msgpack.Encoder()
T = TypeVar("T")


class _Version(Struct, frozen=True):
    protocol: int = 0


_version = msgspec.msgpack.Decoder(_Version)


def protocol_of(payload: memoryview) -> int:
    """The one field of HELLO that every protocol has; 0 if it can't be read."""
    try:
        return _version.decode(payload).protocol
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0


def kind_of(message: Message) -> Kind:
    return _KINDS[type(message)]


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(payload: memoryview | bytes, of: type[T]) -> T:
    """Raises BadFrame."""
    try:
        return cast(T, _DECODERS[of].decode(payload))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"{_KINDS[of].name}: {error}") from None
