"""What is in the small frames, as msgpack. Fields are added at the end, with a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct

from penstock.workloads.pipes.config import WireFormat
from penstock.workloads.pipes.job import Hop, JobTime
from penstock.workloads.pipes.wire.frames import PROTOCOL, BadFrame, Kind

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
