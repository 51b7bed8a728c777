"""A job on its way to another node, and the binary form of STEPS: some jobs' headers, then their
hidden states one after the other.

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
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch.nn import functional as F

from penstock.workloads.pipes.config import WireFormat
from penstock.workloads.pipes.job import ComputeStep, Job, JobTime
from penstock.workloads.pipes.wire.messages import BadFrame, Refused

VERSION = 1
HASH_BYTES = 16
DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16, 4: torch.uint8}
"""The last for numbers of eight bits with their scales (`model.wire_format`)."""
_EIGHT = 4
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_SIZES = {code: dtype.itemsize for code, dtype in DTYPES.items()}
_STEPS = {int(step): step for step in (ComputeStep.LAYER, ComputeStep.HEAD)}
"""Those that travel."""
_PREFIX = struct.Struct("<BBHI")
_HEAD = struct.Struct("<16sHH16sIIIIIIBBBB")
_ALIGN = 16
_MAX_JOBS = 0xFFFF
_MAX_POSITION = 1 << 31
_decoder = msgspec.msgpack.Decoder(tuple[JobTime, ...])
_encoder = msgspec.msgpack.Encoder()

Bytes = bytes | memoryview
Report = Callable[[BadFrame], None]


class NetworkJob(msgspec.Struct, frozen=True, kw_only=True):
    """One pass of a job. Positions, masks and rotary tables follow from `start` and `count`."""

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
    data: torch.Tensor | None = None
    """Hidden states, [rows, hidden], or as `encoded` made them; always there in what was
    unpacked."""
    data_hash: bytes = b""
    """As it came; checked already."""

    @property
    def rows(self) -> int:
        """How many hidden states travel: to the head, only those that the origin needs."""
        return self.returns if self.compute_step is ComputeStep.HEAD else self.count


def of_job(job: Job) -> NetworkJob:
    """What is sent of a job. To the head go only the positions that the origin needs."""
    data = job.data
    if data is not None and job.compute_step is ComputeStep.HEAD and data.shape[0] != job.returns:
        data = data[data.shape[0] - job.returns :]
    if data is not None and job.wire != "exact":
        data, error = encoded(data, job.wire)
        job.times[-1] = msgspec.structs.replace(job.times[-1], wire_error=error)
    return NetworkJob(
        job_id=job.job_id,
        pipe_id=job.pipe_id,
        origin_node_id=job.origin_node_id,
        current_layer=job.current_layer,
        compute_step=job.compute_step,
        sequence=job.sequence,
        start=job.start,
        count=job.count,
        returns=job.returns,
        times=tuple(job.times),
        data=data,
    )


def finite(tensor: torch.Tensor) -> bool:
    """Whether there is no infinity and no NaN in it."""
    # One pass and one number: all of it is looked at only if the sum is in doubt.
    if math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return True
    return bool(torch.isfinite(tensor).all())


# -- packing ------------------------------------------------------------------------


def pack_steps(jobs: Sequence[NetworkJob]) -> list[Bytes]:
    """A STEPS frame in parts, to be written in this order. The hidden states are not copied, so
    they must not change until they are written. Raises ValueError for what nobody would take."""
    if not 0 < len(jobs) <= _MAX_JOBS:
        raise ValueError(f"{len(jobs)} jobs in one frame")
    tensors = [_sendable(job.data) for job in jobs]
    views = parts = _parts(tensors)
    if len(parts) < len(jobs):
        views, begin = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            views.append(parts[0][begin : begin + size])
            begin += size
    heads = b"".join(map(_pack_head, jobs, tensors, views))
    padding = -(_PREFIX.size + len(heads)) % _ALIGN
    prefix = _PREFIX.pack(VERSION, 0, len(jobs), len(heads) + padding)
    return [b"".join((prefix, heads, bytes(padding))), *parts]


def _sendable(data: torch.Tensor | None) -> torch.Tensor:
    if data is None or data.ndim != 2 or data.dtype not in _CODES:
        raise ValueError(f"these are not hidden states: {data if data is None else data.dtype}")
    return data if data.is_contiguous() else data.contiguous()


def _parts(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Their bytes, as one piece where they follow each other in the memory of one tensor."""
    first = tensors[0]
    if len(tensors) == 1:
        return [_bytes_of(first)]
    adjoin = all(
        one.dtype == other.dtype
        and one.shape[1] == other.shape[1]
        and one.data_ptr() + one.numel() * one.element_size() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in pairwise(tensors)
    )
    if adjoin:
        rows, width = sum(tensor.shape[0] for tensor in tensors), first.shape[1]
        return [_bytes_of(first.as_strided((rows, width), (width, 1)))]
    return [_bytes_of(tensor) for tensor in tensors]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # numpy does not know bfloat16.
    known = tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor
    return memoryview(known.numpy()).cast("B")


def _pack_head(job: NetworkJob, tensor: torch.Tensor, numbers: Bytes) -> bytes:
    pipe, origin = job.pipe_id.encode(), job.origin_node_id.encode()
    times = _encoder.encode(job.times)
    rows, width = tensor.shape
    if tensor.dtype is torch.uint8:
        width = width_of(width)
    if rows != job.rows or not len(numbers):
        raise ValueError(f"{len(numbers)} bytes are not {job.rows} rows of {width}")
    try:
        fixed = _HEAD.pack(
            b"",
            _HEAD.size + len(pipe) + len(origin) + len(times),
            job.current_layer,
            job.job_id,
            job.sequence,
            job.start,
            job.count,
            job.returns,
            width,
            len(numbers),
            job.compute_step,
            _CODES[tensor.dtype],
            len(pipe),
            len(origin),
        )
    except struct.error as error:
        raise ValueError(f"a step does not fit its header: {error}") from None
    rest = b"".join((fixed[HASH_BYTES:], pipe, origin, times))
    return _digest(rest, numbers) + rest


def _digest(head: Bytes, numbers: Bytes) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(numbers)
    return digest.digest()[:HASH_BYTES]


# -- unpacking ----------------------------------------------------------------------


def unpack_steps(
    payload: memoryview, hidden: int = 0, report: Report | None = None
) -> list[NetworkJob]:
    """The jobs of a frame, with hidden states that lie in `payload`, which has to be writable.

    What is wrong with one job alone (its hash, dtype or shape) is told to `report`, and the others
    are given; without a report, and if the frame itself is broken, BadFrame is raised. `hidden` is
    the width that is expected, 0 any.
    """
    jobs: list[NetworkJob] = []
    # First the whole frame: nothing is taken of one that does not add up.
    for at, offset, fields in list(_walk(payload)):
        try:
            jobs.append(_read(payload, at, offset, fields, hidden))
        except BadFrame as bad:
            if report is None:
                raise
            report(bad)
    return jobs


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


def _read(
    payload: memoryview, at: int, offset: int, fields: tuple[Any, ...], hidden: int
) -> NetworkJob:
    (digest, length, layer, job_id, sequence, start, count, returns, width, size, step, dtype) = (
        fields[:12]
    )
    if digest != _digest(payload[at + HASH_BYTES : at + length], payload[offset : offset + size]):
        raise BadFrame("the job's hash is wrong", Refused.BAD_HASH, job_id)
    if step not in _STEPS:
        raise BadFrame(f"compute step {step} never travels", Refused.BAD_FRAME, job_id)
    if dtype not in DTYPES:
        raise BadFrame(f"dtype {dtype} is not known", Refused.BAD_DTYPE, job_id)
    if not 0 < count < _MAX_POSITION or start + count > _MAX_POSITION or returns > count:
        raise BadFrame(
            f"positions {start} and {count} more, {returns} back", Refused.BAD_SHAPE, job_id
        )
    rows = returns if step == ComputeStep.HEAD else count
    row = row_bytes(width) if dtype == _EIGHT else width * _SIZES[dtype]
    if not size or size != rows * row:
        raise BadFrame(f"{size} bytes are not {rows} rows of {width}", Refused.BAD_SHAPE, job_id)
    if hidden and width != hidden:
        raise BadFrame(f"hidden states {width} wide, not {hidden}", Refused.BAD_SHAPE, job_id)
    data = torch.frombuffer(
        payload, dtype=DTYPES[dtype], count=size // _SIZES[dtype], offset=offset
    ).view(rows, -1)
    origin = at + _HEAD.size + fields[12]
    times = origin + fields[13]
    try:
        return NetworkJob(
            job_id=job_id,
            pipe_id=str(payload[at + _HEAD.size : origin], "utf-8"),
            origin_node_id=str(payload[origin:times], "utf-8"),
            current_layer=layer,
            compute_step=_STEPS[step],
            sequence=sequence,
            start=start,
            count=count,
            returns=returns,
            times=_decoder.decode(payload[times : at + length]),
            data=from_bytes(data, width) if dtype == _EIGHT else data,
            data_hash=digest,
        )
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError) as error:
        raise BadFrame(f"the job's header: {error}", Refused.BAD_FRAME, job_id) from None


# -- hidden states in fewer bits for slow links, on request -------------------------------
# - `16bit`: float16, or bfloat16 where a number does not fit that.
# - `8bit`: integers of eight bits with a scale for each block of 64 numbers, so that a few that are
#   large do not cost the others their precision. A row is its integers, then its scales (float32).

BLOCK = 64
_SCALE = 4
_MOST_HALF = 65504.0


def encoded(states: torch.Tensor, wire: WireFormat) -> tuple[torch.Tensor, float]:
    """[rows, hidden] as they are sent, and how far they are from what they were, as a share of
    their size. Integers of eight bits are bytes of another width."""
    if wire == "exact" or (wire == "16bit" and states.itemsize <= 2):
        return states, 0.0
    if wire == "16bit":
        fits = float(states.abs().max()) <= _MOST_HALF
        sent = decoded = states.to(torch.float16 if fits else torch.bfloat16)
    else:
        sent = _to_bytes(states)
        decoded = from_bytes(sent, states.shape[1])
    size = float(states.float().norm())
    return sent, float((decoded.float() - states.float()).norm()) / size if size else 0.0


def row_bytes(width: int) -> int:
    """Of a row of so many numbers in eight bits."""
    return width + _SCALE * -(-width // BLOCK)


def width_of(row: int) -> int:
    """The numbers in a row of so many bytes."""
    return row - _SCALE * -(-row // (BLOCK + _SCALE))


def from_bytes(rows: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, width] in float32."""
    scales = rows[:, width:].contiguous().view(torch.float32)
    numbers = rows[:, :width].view(torch.int8).float()
    return numbers * scales.repeat_interleave(BLOCK, 1)[:, :width]


def _to_bytes(states: torch.Tensor) -> torch.Tensor:
    count, width = states.shape
    blocks = F.pad(states.float(), (0, -width % BLOCK)).view(count, -1, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True).clamp_min_(1e-30).div_(127)
    small = (blocks / scales).round_().to(torch.int8).view(count, -1)[:, :width]
    parts = (small.contiguous().view(torch.uint8), scales.view(count, -1).view(torch.uint8))
    return torch.cat(parts, 1)
