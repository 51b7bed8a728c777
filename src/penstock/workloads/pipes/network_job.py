"""A job on its way to another node: its header (`wire.steps`) and its hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from penstock.workloads.pipes.job import ComputeStep, Job
from penstock.workloads.pipes.wire.counters import Refused
from penstock.workloads.pipes.wire.frames import BadFrame
from penstock.workloads.pipes.wire.steps import (
    SIZES,
    Bytes,
    ParsedStep,
    Report,
    StepHead,
    pack_front,
    pack_head,
    unpack,
)

_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


class NetworkJob(StepHead, frozen=True, kw_only=True):
    """One pass of a job. Positions, masks and rotary tables follow from `start` and `count`."""

    data: torch.Tensor | None = None
    """Hidden states, [rows, hidden]; always there in what was unpacked."""
    data_hash: bytes = b""
    """As it came; checked already."""


def of_job(job: Job) -> NetworkJob:
    """What is sent of a job. To the head go only the positions that the origin needs."""
    data = job.data
    if data is not None and job.compute_step == ComputeStep.HEAD:
        data = data[data.shape[0] - job.returns :]
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


def pack_steps(jobs: Sequence[NetworkJob]) -> list[Bytes]:
    """A STEPS frame in parts, to be written in this order. The hidden states are not copied, so
    they must not change until they are written. Raises ValueError for what nobody would take."""
    tensors = [_sendable(job.data) for job in jobs]
    views = parts = _parts(tensors)
    if len(parts) < len(jobs):
        views, begin = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            views.append(parts[0][begin : begin + size])
            begin += size
    heads = [
        pack_head(job, _CODES[tensor.dtype], tensor.shape[1], view)
        for job, tensor, view in zip(jobs, tensors, views, strict=True)
    ]
    return [pack_front(heads), *parts]


def unpack_steps(
    payload: memoryview, hidden: int = 0, report: Report | None = None
) -> list[NetworkJob]:
    """The jobs of a frame, with hidden states that lie in `payload`, which has to be writable.

    What is wrong with one job alone (its hash, dtype or shape) is told to `report`, and the others
    are given; without a report, and if the frame itself is broken, BadFrame is raised. `hidden` is
    the width that is expected, 0 any.
    """
    jobs: list[NetworkJob] = []
    found = unpack(payload, report)
    for job, data in zip(found, _tensors(payload, found), strict=True):
        if hidden and job.width != hidden:
            bad = BadFrame(
                f"hidden states {job.width} wide, not {hidden}", Refused.BAD_SHAPE, job.head.job_id
            )
            if report is None:
                raise bad
            report(bad)
            continue
        head = job.head
        jobs.append(
            NetworkJob(
                job_id=head.job_id,
                pipe_id=head.pipe_id,
                origin_node_id=head.origin_node_id,
                current_layer=head.current_layer,
                compute_step=head.compute_step,
                sequence=head.sequence,
                start=head.start,
                count=head.count,
                returns=head.returns,
                times=head.times,
                data=data,
                data_hash=job.digest,
            )
        )
    return jobs


def finite(tensor: torch.Tensor) -> bool:
    """Whether there is no infinity and no NaN in it."""
    # One pass and one number: all of it is looked at only if the sum is in doubt.
    if math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return True
    return bool(torch.isfinite(tensor).all())


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


def _tensors(payload: memoryview, found: Sequence[ParsedStep]) -> list[torch.Tensor]:
    """Where they lie in the payload."""
    return [
        torch.frombuffer(
            payload, dtype=_DTYPES[job.dtype], count=job.head.rows * job.width, offset=job.offset
        ).view(-1, job.width)
        for job in found
    ]


assert set(_DTYPES) == set(SIZES)
