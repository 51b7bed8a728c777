"""The binary form of STEPS: some jobs' headers, then their hidden states one after the other.

    version u8 · 0 u8 · jobs u16 · bytes of all headers u32
    for each job:  hash 16 · length u16 · layer u16 · job id 16 · sequence, start, count, returns,
                   width, size u32 · step, dtype, length of pipe id, length of origin u8
                   · pipe id · origin · times (msgpack)
    zeros up to a multiple of sixteen
    for each job:  `size` bytes: rows of `width` numbers

All numbers are little-endian. The hash is over all of the job's header behind it and its numbers.
The states of a pass lie side by side in memory, so they are sent, and found, as one piece.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.workloads.pipes.job import ComputeStep, JobTime
from penstock.workloads.pipes.wire.counters import Refused
from penstock.workloads.pipes.wire.frames import BadFrame

VERSION = 1
HASH_BYTES = 16
SIZES = {1: 4, 2: 2, 3: 2}
"""Bytes of a number by the code of its dtype: float32, bfloat16, float16."""
_PREFIX = struct.Struct("<BBHI")
_HEAD = struct.Struct("<16sHH16sIIIIIIBBBB")
_ALIGN = 16
_MAX_JOBS = 0xFFFF
_MAX_POSITION = 1 << 31
_decoder = msgspec.msgpack.Decoder(tuple[JobTime, ...])
_encoder = msgspec.msgpack.Encoder()

Bytes = bytes | memoryview
Report = Callable[[BadFrame], None]


class StepHead(msgspec.Struct, frozen=True, kw_only=True):
    """A pass of one job, without its hidden states."""

    job_id: bytes
    pipe_id: str
    origin_node_id: str
    current_layer: int
    compute_step: ComputeStep
    sequence: int
    start: int
    count: int
    returns: int = 1
    times: tuple[JobTime, ...] = ()

    @property
    def rows(self) -> int:
        """How many hidden states travel: to the head, only those that the origin needs."""
        return self.returns if self.compute_step == ComputeStep.HEAD else self.count


class ParsedStep(msgspec.Struct, frozen=True):
    """One job of a frame, and where its numbers lie in the payload."""

    head: StepHead
    digest: bytes
    dtype: int
    width: int
    offset: int


def pack_head(head: StepHead, dtype: int, width: int, numbers: Bytes) -> bytes:
    """A job's header. Raises ValueError for what no receiver would take."""
    pipe, origin = head.pipe_id.encode(), head.origin_node_id.encode()
    times = _encoder.encode(head.times)
    if len(numbers) != head.rows * width * SIZES[dtype] or not numbers:
        raise ValueError(f"{len(numbers)} bytes are not {head.rows} rows of {width}")
    try:
        fixed = _HEAD.pack(
            b"",
            _HEAD.size + len(pipe) + len(origin) + len(times),
            head.current_layer,
            head.job_id,
            head.sequence,
            head.start,
            head.count,
            head.returns,
            width,
            len(numbers),
            head.compute_step,
            dtype,
            len(pipe),
            len(origin),
        )
    except struct.error as error:
        raise ValueError(f"a step does not fit its header: {error}") from None
    rest = b"".join((fixed[HASH_BYTES:], pipe, origin, times))
    return _digest(rest, numbers) + rest


def pack_front(heads: Sequence[bytes]) -> bytes:
    """All that comes before the numbers."""
    if not 0 < len(heads) <= _MAX_JOBS:
        raise ValueError(f"{len(heads)} jobs in one frame")
    size = sum(map(len, heads))
    padding = -(_PREFIX.size + size) % _ALIGN
    return b"".join((_PREFIX.pack(VERSION, 0, len(heads), size + padding), *heads, bytes(padding)))


def unpack(payload: memoryview, report: Report | None = None) -> list[ParsedStep]:
    """The jobs of a frame. What is wrong with one job alone is told to `report`, and the others
    are given; without it, and for all else, BadFrame is raised."""
    found: list[ParsedStep] = []
    # First the whole frame: nothing is taken of one that does not add up.
    for at, offset, fields in list(_walk(payload)):
        try:
            found.append(_read(payload, at, offset, fields))
        except BadFrame as bad:
            if report is None:
                raise
            report(bad)
    return found


def _walk(payload: memoryview) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    if len(payload) < _PREFIX.size:
        raise BadFrame("STEPS of no length", Refused.TRUNCATED)
    version, zero, jobs, headers = _PREFIX.unpack_from(payload)
    if version != VERSION:
        raise BadFrame(f"STEPS of version {version}: {VERSION} is spoken here")
    at, offset = _PREFIX.size, _PREFIX.size + headers
    end_of_headers = offset
    for _ in range(jobs):
        if at + _HEAD.size > min(end_of_headers, len(payload)):
            raise BadFrame("STEPS: the headers are cut off", Refused.TRUNCATED)
        fields = _HEAD.unpack_from(payload, at)
        length, size = fields[1], fields[9]
        yield at, offset, fields
        at, offset = at + length, offset + size
        if length < _HEAD.size + fields[12] + fields[13]:
            raise BadFrame("STEPS: a header shorter than what is in it")
    padding = end_of_headers - at
    if not jobs or not 0 <= padding < _ALIGN or offset != len(payload):
        raise BadFrame("STEPS: more or fewer bytes than its headers say", Refused.TRUNCATED)
    if zero or any(payload[at:end_of_headers]):
        raise BadFrame("STEPS: something is where nothing should be")


def _read(payload: memoryview, at: int, offset: int, fields: tuple[Any, ...]) -> ParsedStep:
    (digest, length, layer, job_id, sequence, start, count, returns, width, size, step, dtype) = (
        fields[:12]
    )
    if digest != _digest(payload[at + HASH_BYTES : at + length], payload[offset : offset + size]):
        raise BadFrame("the job's hash is wrong", Refused.BAD_HASH, job_id)
    if step not in (ComputeStep.LAYER, ComputeStep.HEAD):
        raise BadFrame(f"compute step {step} never travels", Refused.BAD_FRAME, job_id)
    if dtype not in SIZES:
        raise BadFrame(f"dtype {dtype} is not known", Refused.BAD_DTYPE, job_id)
    pipe = at + _HEAD.size
    origin = pipe + fields[12]
    times = origin + fields[13]
    try:
        head = StepHead(
            job_id=job_id,
            pipe_id=str(payload[pipe:origin], "utf-8"),
            origin_node_id=str(payload[origin:times], "utf-8"),
            current_layer=layer,
            compute_step=ComputeStep(step),
            sequence=sequence,
            start=start,
            count=count,
            returns=returns,
            times=_decoder.decode(payload[times : at + length]),
        )
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise BadFrame(f"the job's header: {error}", Refused.BAD_FRAME, job_id) from None
    if not 0 < count < _MAX_POSITION or start + count > _MAX_POSITION or returns > count:
        raise BadFrame(
            f"positions {start} and {count} more, {returns} back", Refused.BAD_SHAPE, job_id
        )
    if not size or size != head.rows * width * SIZES[dtype]:
        raise BadFrame(
            f"{size} bytes are not {head.rows} rows of {width}", Refused.BAD_SHAPE, job_id
        )
    return ParsedStep(head, digest, dtype, width, offset)


def _digest(head: Bytes, numbers: Bytes) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(numbers)
    return digest.digest()[:HASH_BYTES]
