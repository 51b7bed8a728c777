from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.pipes.job import ComputeStep, JobTime
from penstock.workloads.pipes.wire import steps
from penstock.workloads.pipes.wire.counters import Refused
from penstock.workloads.pipes.wire.frames import BadFrame
from penstock.workloads.pipes.wire.steps import (
    SIZES,
    ParsedStep,
    StepHead,
    pack_front,
    pack_head,
    unpack,
)

WIDTH = 3
names = st.text(st.characters(codec="utf-8"), max_size=40)
small = st.integers(0, 1 << 20)
times = st.builds(JobTime, names, small, small, small, small, small, small, small)


@st.composite
def heads(draw: st.DrawFn) -> StepHead:
    count = draw(st.integers(1, 5))
    return StepHead(
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


def head(**fields: Any) -> StepHead:
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
    return StepHead(**{**ready, **fields})


def packed(*jobs: StepHead, dtype: int = 1) -> bytearray:
    numbers = [bytes([n + 1]) * (job.rows * WIDTH * SIZES[dtype]) for n, job in enumerate(jobs)]
    front = pack_front(
        [pack_head(job, dtype, WIDTH, part) for job, part in zip(jobs, numbers, strict=True)]
    )
    return bytearray(front + b"".join(numbers))


def unpacked(data: bytearray) -> list[ParsedStep]:
    return unpack(memoryview(data))


@pytest.mark.seed("000", "17.8")
@given(st.lists(heads(), min_size=1, max_size=4), st.sampled_from(sorted(SIZES)))
def test_what_is_packed_comes_out_the_same(jobs: list[StepHead], dtype: int) -> None:
    data = packed(*jobs, dtype=dtype)
    found = unpacked(data)
    assert [job.head for job in found] == jobs
    assert {(job.dtype, job.width) for job in found} == {(dtype, WIDTH)}
    for n, job in enumerate(found):
        size = job.head.rows * WIDTH * SIZES[dtype]
        assert data[job.offset : job.offset + size] == bytes([n + 1]) * size
    assert found[0].offset % 16 == 0


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(memoryview(data))


@given(st.binary(min_size=1, max_size=300), st.integers(0, 300), st.integers(0, 3))
def test_random_bytes_over_a_good_frame_raise_bad_frames_only(
    noise: bytes, at: int, many: int
) -> None:
    data = packed(*[head(sequence=n) for n in range(many + 1)])
    data[at : at + len(noise)] = noise
    with suppress(BadFrame):
        unpack(memoryview(data), report=lambda bad: None)


@pytest.mark.seed("000", "11.2", "16.6")
def test_no_bit_can_be_turned_unnoticed() -> None:
    data = packed(head())
    for bit in range(len(data) * 8):
        turned = bytearray(data)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            unpacked(turned)


def test_no_byte_can_be_cut_off_or_added() -> None:
    data = packed(head(), head(sequence=8))
    for end in range(len(data)):
        with pytest.raises(BadFrame):
            unpacked(data[:end])
    for more in (1, 16, 100):
        with pytest.raises(BadFrame):
            unpacked(data + bytes(more))


def test_a_bad_job_is_told_and_the_others_are_given() -> None:
    jobs = [head(job_id=bytes([n]) * 16) for n in range(3)]
    data = packed(*jobs)
    middle = unpacked(data)[1]
    data[middle.offset] ^= 1
    bad: list[BadFrame] = []
    found = unpack(memoryview(data), bad.append)
    assert [job.head.job_id[0] for job in found] == [0, 2]
    assert [(one.what, one.job_id) for one in bad] == [(Refused.BAD_HASH, bytes([1]) * 16)]


def forged(**changes: Any) -> BadFrame:
    """What is said of a header that is wrong, though its hash is right."""
    at = {"step": 10, "dtype": 11, "count": 6, "returns": 7, "width": 8, "start": 5}
    fields = list(steps._HEAD.unpack_from(packed(head()), steps._PREFIX.size))
    for name, value in changes.items():
        fields[at[name]] = value
    rest = steps._HEAD.pack(*fields)[16:] + b"pipe" + b"origin" + b"\x90"
    rest = (len(rest) + 16).to_bytes(2, "little") + rest[2:]
    numbers = bytes(fields[9])
    data = pack_front([steps._digest(rest, numbers) + rest]) + numbers
    with pytest.raises(BadFrame) as bad:
        unpack(memoryview(data))
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
        ({"dtype": 4}, Refused.BAD_DTYPE),
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
    assert head(count=5, returns=2).rows == 5
    assert head(count=5, returns=2, compute_step=ComputeStep.HEAD).rows == 2


@pytest.mark.parametrize(
    "wrong",
    [
        head(pipe_id="x" * 256),
        head(origin_node_id="x" * 256),
        head(job_id=bytes(16), sequence=1 << 32),
        head(current_layer=1 << 16),
        head(times=(JobTime("x" * 70_000, 0, 1, 1, 1),)),
    ],
)
def test_what_no_header_can_hold_is_not_sent(wrong: StepHead) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        packed(wrong)


def test_numbers_that_are_not_all_there_are_not_sent() -> None:
    with pytest.raises(ValueError, match="11 bytes are not 2 rows of 3"):
        pack_head(head(), 1, WIDTH, bytes(11))
    with pytest.raises(ValueError, match="0 jobs"):
        pack_front([])
