from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.pipes.job import ComputeStep, Job, JobTime
from penstock.workloads.pipes.network_job import (
    NetworkJob,
    finite,
    of_job,
    pack_steps,
    unpack_steps,
)
from penstock.workloads.pipes.wire.messages import BadFrame, Refused

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def job(data: torch.Tensor | None, **fields: Any) -> NetworkJob:
    ready: dict[str, Any] = {
        "job_id": bytes(range(16)),
        "pipe_id": "pipe",
        "origin_node_id": "origin",
        "current_layer": 3,
        "compute_step": ComputeStep.LAYER,
        "sequence": 7,
        "start": 5,
        "count": 1 if data is None else data.shape[0],
        "times": (JobTime("node", 0, 3, 10, 20),),
    }
    return NetworkJob(data=data, **{**ready, **fields})


def sent(jobs: list[NetworkJob]) -> memoryview:
    return memoryview(bytearray(b"".join(pack_steps(jobs))))


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    assert one is not None
    assert other is not None
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.seed("000", "6.2", "11.1")
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
)
def test_jobs_come_out_as_they_went_in(rows: list[int], width: int, dtype: torch.dtype) -> None:
    jobs = [
        job(torch.randn(count, width).to(dtype), sequence=n, start=n * 3)
        for n, count in enumerate(rows)
    ]
    got = unpack_steps(sent(jobs), width)
    for before, after in zip(jobs, got, strict=True):
        assert same(before.data, after.data)
        assert len(after.data_hash) == 16
        for name in set(NetworkJob.__struct_fields__) - {"data", "data_hash"}:
            assert getattr(before, name) == getattr(after, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_jobs_of_one_pass_are_sent_from_where_they_were_computed(dtype: torch.dtype) -> None:
    packed = torch.randn(7, 576).to(dtype)
    parts = pack_steps([job(data) for data in packed.split([1, 2, 4])])
    assert len(parts) == 2
    assert numpy.frombuffer(parts[1], numpy.uint8).ctypes.data == packed.data_ptr()
    assert len(parts[1]) == packed.numel() * packed.element_size()


def test_jobs_of_several_tensors_are_sent_from_where_each_lies() -> None:
    tensors = [torch.randn(1, 576), torch.randn(2, 576)]
    _, *parts = pack_steps([job(data) for data in tensors])
    assert [numpy.frombuffer(part, numpy.uint8).ctypes.data for part in parts] == [
        data.data_ptr() for data in tensors
    ]


def test_jobs_out_of_order_in_memory_or_apart_come_out_right() -> None:
    packed = torch.randn(6, 8)
    for rows in ([4, 0], [0, 2, 3], [3, 3]):
        got = unpack_steps(sent([job(packed[row : row + 1]) for row in rows]), 8)
        assert torch.equal(
            torch.cat([one.data for one in got if one.data is not None]), packed[rows]
        )


def test_a_tensor_that_is_not_in_one_piece_is_sent_all_the_same() -> None:
    data = torch.randn(8, 3).T
    assert same(unpack_steps(sent([job(data)]), 8)[0].data, data)


def test_jobs_of_different_dtypes_can_share_a_frame() -> None:
    jobs = [job(torch.randn(1, 8).to(dtype)) for dtype in DTYPES]
    got = unpack_steps(sent(jobs), 8)
    assert all(same(one.data, other.data) for one, other in zip(jobs, got, strict=True))


def test_what_was_received_is_not_copied() -> None:
    payload = sent([job(torch.zeros(2, 8)), job(torch.zeros(1, 8))])
    first, second = unpack_steps(payload, 8)
    assert first.data is not None
    assert second.data is not None
    begin = numpy.frombuffer(payload, numpy.uint8).ctypes.data
    assert begin < first.data.data_ptr() < begin + len(payload)
    assert second.data.data_ptr() == first.data.data_ptr() + 2 * 8 * 4


def test_what_is_computed_in_inference_mode_can_be_sent() -> None:
    with torch.inference_mode():
        data = torch.ones(2, 8) * 2
        payload = sent([job(data)])
    assert same(unpack_steps(payload, 8)[0].data, torch.full((2, 8), 2.0))


def test_another_width_is_refused_and_the_other_jobs_are_given() -> None:
    payload = sent([job(torch.zeros(1, 8), job_id=bytes([1]) * 16), job(torch.zeros(1, 9))])
    bad: list[BadFrame] = []
    assert [one.sequence for one in unpack_steps(payload, 9, bad.append)] == [7]
    assert [(one.what, one.job_id) for one in bad] == [(Refused.BAD_SHAPE, bytes([1]) * 16)]
    with pytest.raises(BadFrame, match="hidden states 8 wide, not 9"):
        unpack_steps(payload, 9)


def test_hidden_states_that_were_changed_on_the_way_are_refused() -> None:
    payload = sent([job(torch.ones(1, 8))])
    payload[-1] ^= 1
    with pytest.raises(BadFrame, match="hash is wrong"):
        unpack_steps(payload, 8)


@pytest.mark.parametrize(
    "data",
    [None, torch.zeros(1, 8, dtype=torch.float64), torch.zeros(8), torch.zeros(1, 1, 8)],
)
def test_what_are_no_hidden_states_is_not_sent(data: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="not hidden states"):
        pack_steps([job(data, count=1)])


def test_a_count_that_is_not_that_of_the_rows_is_not_sent() -> None:
    with pytest.raises(ValueError, match="are not 3 rows of 8"):
        pack_steps([job(torch.zeros(2, 8), count=3)])


def made(step: ComputeStep, returns: int) -> Job:
    return Job(
        job_id=bytes(16),
        pipe_id="pipe",
        model_id="model",
        origin_node_id="origin",
        compute_step=step,
        current_layer=4,
        sequence=3,
        start=10,
        count=5,
        returns=returns,
        data=torch.arange(40.0).view(5, 8),
        times=[JobTime("a", 0, 4, 1, 2)],
    )


@pytest.mark.seed("000", "6.2")
def test_all_of_a_job_goes_to_the_next_layers() -> None:
    told = of_job(made(ComputeStep.LAYER, 1))
    assert same(told.data, torch.arange(40.0).view(5, 8))
    assert (told.current_layer, told.sequence, told.start, told.count) == (4, 3, 10, 5)
    assert told.times == (JobTime("a", 0, 4, 1, 2),)
    assert unpack_steps(sent([told]), 8)[0].start == 10


@pytest.mark.seed("000", "6.3")
@pytest.mark.parametrize("returns", [1, 2, 5])
def test_only_what_the_origin_needs_goes_back_to_the_head(returns: int) -> None:
    told = of_job(made(ComputeStep.HEAD, returns))
    assert same(told.data, torch.arange(40.0).view(5, 8)[5 - returns :])
    got = unpack_steps(sent([told]), 8)[0]
    assert got.data is not None
    assert got.data.shape == (returns, 8)
    assert got.count == 5


def test_what_was_cut_for_the_head_already_is_not_cut_again() -> None:
    ready = made(ComputeStep.HEAD, 2)
    assert ready.data is not None
    ready.data = ready.data[-2:]
    assert same(of_job(ready).data, torch.arange(40.0).view(5, 8)[3:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_none_is_found(dtype: torch.dtype, value: float) -> None:
    data = torch.randn(3, 576).to(dtype)
    assert finite(data)
    data[1, 300] = value
    assert not finite(data)


def test_infinities_do_not_cancel_out() -> None:
    assert not finite(torch.tensor([[float("inf"), float("-inf")]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_numbers_are_numbers(dtype: torch.dtype) -> None:
    assert finite(torch.full((4, 576), torch.finfo(dtype).max, dtype=dtype))
