from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.workloads.pipes import network_job
from penstock.workloads.pipes.job import ComputeStep, JobTime
from penstock.workloads.pipes.network_job import DTYPES, NetworkJob, pack_steps, unpack_steps
from penstock.workloads.pipes.wire.messages import BadFrame, Refused

WIDTH = 3
names = st.text(st.characters(codec="utf-8"), max_size=40)
small = st.integers(0, 1 << 20)
times = st.builds(JobTime, names, small, small, small, small, small, small, small)


@st.composite
def packets(draw: st.DrawFn) -> NetworkJob:
    count = draw(st.integers(1, 5))
    return packet(
        job_id=draw(st.binary(min_size=16, max_size=16)),
        pipe_id=draw(names),
        origin_node_id=draw(names),
        current_layer=draw(st.integers(0, 65535)),
        compute_step=draw(st.sampled_from([ComputeStep.LAYER, ComputeStep.HEAD])),
        sequence=draw(st.integers(0, (1 << 32) - 1)),
        start=draw(st.integers(0, 1 << 30)),
        count=count,
        returns=draw(st.integers(1, count)),
        times=tuple(draw(st.lists(times, max_size=4))),
    )


def packet(**fields: Any) -> NetworkJob:
    ready: dict[str, Any] = {
        "job_id": bytes(range(16)),
        "pipe_id": "pipe",
        "origin_node_id": "origin",
        "current_layer": 3,
        "compute_step": ComputeStep.LAYER,
        "sequence": 7,
        "start": 5,
        "count": 2,
        "times": (JobTime("node", 0, 3, 10, 20),),
    }
    return NetworkJob(**{**ready, **fields})


def packed(*jobs: NetworkJob, dtype: torch.dtype = torch.float32) -> bytearray:
    """With numbers that tell which job they are of."""
    ready = [
        replace(job, data=torch.full((job.rows, WIDTH), n + 1.0, dtype=dtype))
        for n, job in enumerate(jobs)
    ]
    return bytearray(b"".join(pack_steps(ready)))


def unpacked(data: bytearray) -> list[NetworkJob]:
    return unpack_steps(memoryview(data))


@pytest.mark.seed("000", "17.8")
@given(
    st.lists(packets(), min_size=1, max_size=4),
    st.sampled_from([one for one in DTYPES.values() if one.is_floating_point]),
)
def test_what_is_packed_comes_out_the_same(jobs: list[NetworkJob], dtype: torch.dtype) -> None:
    found = unpacked(packed(*jobs, dtype=dtype))
    assert [replace(job, data=None, data_hash=b"") for job in found] == jobs
    for n, job in enumerate(found):
        assert job.data is not None
        assert (job.data.dtype, job.data.shape) == (dtype, (job.rows, WIDTH))
        assert bool((job.data == n + 1).all())


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack_steps(memoryview(bytearray(data)))


@given(st.binary(min_size=1, max_size=300), st.integers(0, 300), st.integers(0, 3))
def test_random_bytes_over_a_good_frame_raise_bad_frames_only(
    noise: bytes, at: int, many: int
) -> None:
    data = packed(*[packet(sequence=n) for n in range(many + 1)])
    data[at : at + len(noise)] = noise
    with suppress(BadFrame):
        unpack_steps(memoryview(data), report=lambda bad: None)


@pytest.mark.seed("000", "11.2", "16.6")
def test_no_bit_can_be_turned_unnoticed() -> None:
    data = packed(packet())
    for bit in range(len(data) * 8):
        turned = bytearray(data)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            unpacked(turned)


def test_no_byte_can_be_cut_off_or_added() -> None:
    data = packed(packet(), packet(sequence=8))
    for end in range(len(data)):
        with pytest.raises(BadFrame):
            unpacked(data[:end])
    for more in (1, 16, 100):
        with pytest.raises(BadFrame):
            unpacked(data + bytes(more))


def test_a_bad_job_is_told_and_the_others_are_given() -> None:
    jobs = [packet(job_id=bytes([n]) * 16) for n in range(3)]
    data = packed(*jobs)
    data[-2 * WIDTH * 4 - 1] ^= 1  # of the middle one: each has two rows
    bad: list[BadFrame] = []
    found = unpack_steps(memoryview(data), report=bad.append)
    assert [job.job_id[0] for job in found] == [0, 2]
    assert [(one.what, one.job_id) for one in bad] == [(Refused.BAD_HASH, bytes([1]) * 16)]


def forged(**changes: Any) -> BadFrame:
    """What is said of a header that is wrong, though its hash is right."""
    at = {"step": 10, "dtype": 11, "count": 6, "returns": 7, "width": 8, "start": 5}
    front, prefix = network_job._HEAD, network_job._PREFIX
    fields = list(front.unpack_from(packed(packet()), prefix.size))
    for name, value in changes.items():
        fields[at[name]] = value
    rest = front.pack(*fields)[16:] + b"pipe" + b"origin" + b"\x90"
    rest = (len(rest) + 16).to_bytes(2, "little") + rest[2:]
    numbers = bytes(fields[9])
    header = network_job._digest(rest, numbers) + rest
    padding = -(prefix.size + len(header)) % 16
    start = prefix.pack(network_job.VERSION, 0, 1, len(header) + padding)
    data = bytearray(start + header + bytes(padding) + numbers)
    with pytest.raises(BadFrame) as bad:
        unpacked(data)
    return bad.value


@pytest.mark.seed("000", "10.5")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"step": ComputeStep.TOKENIZE}, Refused.BAD_FRAME),
        ({"step": ComputeStep.EMBED}, Refused.BAD_FRAME),
        ({"step": ComputeStep.NORM}, Refused.BAD_FRAME),
        ({"step": 9}, Refused.BAD_FRAME),
        ({"dtype": 0}, Refused.BAD_DTYPE),
        ({"dtype": 4}, Refused.BAD_SHAPE),
        ({"dtype": 5}, Refused.BAD_DTYPE),
        ({"dtype": 2}, Refused.BAD_SHAPE),
        ({"count": 0}, Refused.BAD_SHAPE),
        ({"count": 3}, Refused.BAD_SHAPE),
        ({"returns": 3}, Refused.BAD_SHAPE),
        ({"width": 4}, Refused.BAD_SHAPE),
        ({"width": 0}, Refused.BAD_SHAPE),
        ({"start": (1 << 32) - 1}, Refused.BAD_SHAPE),
        ({"step": ComputeStep.HEAD, "returns": 0}, Refused.BAD_SHAPE),
    ],
)
def test_a_job_that_can_not_be_is_refused(changes: dict[str, Any], what: Refused) -> None:
    bad = forged(**changes)
    assert (bad.what, bad.job_id) == (what, bytes(range(16)))


def test_to_the_head_go_only_the_rows_that_are_needed() -> None:
    assert packet(count=5, returns=2).rows == 5
    assert packet(count=5, returns=2, compute_step=ComputeStep.HEAD).rows == 2


@pytest.mark.parametrize(
    "wrong",
    [
        packet(pipe_id="x" * 256),
        packet(origin_node_id="x" * 256),
        packet(job_id=bytes(16), sequence=1 << 32),
        packet(current_layer=1 << 16),
        packet(times=(JobTime("x" * 70_000, 0, 1, 1, 1),)),
    ],
)
def test_what_no_header_can_hold_is_not_sent(wrong: NetworkJob) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        packed(wrong)


def test_a_frame_of_no_jobs_is_not_sent() -> None:
    with pytest.raises(ValueError, match="0 jobs"):
        pack_steps([])
