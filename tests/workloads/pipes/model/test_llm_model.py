"""A segment: what it loads, and what it does to jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.pipes.random_models import RandomSource, tiny
from tests.support.pipes.walking import Split, ends_of

from penstock.workloads.llm.values import LlmCode, LlmFailure
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.job import ComputeStep, Hop, Job
from penstock.workloads.pipes.llm_model import LlmModel
from penstock.workloads.pipes.weights.source import architecture_of

PROMPT = [5, 17, 40, 3, 88, 21, 9, 60, 33, 71, 12, 50]


@pytest.fixture(scope="module")
def source() -> RandomSource:
    return tiny("llama")[1]


@pytest.fixture
def split(source: RandomSource) -> Split:
    return Split(source, (2,))


# -- loading ------------------------------------------------------------------------


def load(source: Any, layers: LayerRange, dtype: str = "float32", **more: Any) -> LlmModel:
    return LlmModel.load(architecture_of(source), source, layers, dtype, **more)


def test_only_the_layers_that_are_asked_for_are_read() -> None:
    source = tiny("llama")[1]
    told: list[tuple[int, int]] = []
    model = load(source, LayerRange(1, 4), on_progress=lambda *how: told.append(how))
    assert source.layers_read == [1, 2, 3]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert model.layers == LayerRange(1, 4)


def test_a_layer_has_the_same_fingerprint_in_any_segment(source: RandomSource) -> None:
    whole = load(source, LayerRange(0, 5))
    part = load(source, LayerRange(2, 4), "int8")
    assert part.fingerprints == whole.fingerprints[2:4]
    assert len(set(whole.fingerprints)) == 5


@pytest.mark.parametrize(("start", "end"), [(0, 6), (3, 3), (-1, 2)])
def test_layers_that_the_model_has_not_are_refused(
    source: RandomSource, start: int, end: int
) -> None:
    with pytest.raises(LlmFailure) as caught:
        load(source, LayerRange(start, end))
    assert caught.value.code == LlmCode.MODEL_INVALID


def changed(source: RandomSource, **tensors: torch.Tensor | None) -> Any:
    """The same, with other tensors in its first layer; None leaves one out."""

    class Changed(RandomSource):
        def __init__(self) -> None:
            self.path, self.config = source.path, source.config

        def layer(self, n: int) -> Mapping[str, torch.Tensor]:
            names = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
            found = {**source.layer(n), **names}
            return {name: tensor for name, tensor in found.items() if tensor is not None}

    return Changed()


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"self_attn__o_proj__weight": None}, LlmCode.MODEL_INVALID),
        ({"self_attn__q_proj__weight": None}, LlmCode.MODEL_INVALID),
        ({"self_attn__q_proj__weight": torch.ones(32, 31)}, LlmCode.MODEL_INVALID),
        ({"self_attn__q_proj__bias": torch.ones(32)}, LlmCode.NOT_SUPPORTED),
        ({"mlp__down_proj__weight": torch.ones(31, 48)}, LlmCode.MODEL_INVALID),
        ({"mlp__down_proj__bias": torch.ones(31)}, LlmCode.NOT_SUPPORTED),
        ({"input_layernorm__weight": torch.ones(31)}, LlmCode.MODEL_INVALID),
        ({"input_layernorm__weight": None}, LlmCode.MODEL_INVALID),
        ({"self_attn__sinks": torch.ones(4)}, LlmCode.NOT_SUPPORTED),
    ],
)
def test_a_layer_with_other_tensors_is_refused(
    source: RandomSource, tensors: dict[str, torch.Tensor | None], code: LlmCode
) -> None:
    with pytest.raises(LlmFailure, match="layer 0") as caught:
        load(changed(source, **tensors), LayerRange(0, 1))
    assert caught.value.code == code


def test_ends_that_lack_something_are_refused(source: RandomSource) -> None:
    class Headless(RandomSource):
        def __init__(self) -> None:
            self.path, self.config = source.path, source.config

        def ends(self) -> Mapping[str, torch.Tensor]:
            name = "model.embed_tokens.weight"
            return {name: source.ends()[name]}

    with pytest.raises(LlmFailure, match="the end model lacks lm_head") as caught:
        ends_of(Headless())
    assert caught.value.code == LlmCode.MODEL_INVALID


# -- computing ----------------------------------------------------------------------


@pytest.mark.seed("000", "4.3", "4.5", "10.1")
def test_a_job_that_went_through_knows_where_it_stands(split: Split) -> None:
    job = started(split, split.job())
    first, second = split.segments
    first.process_job(job)
    assert (job.current_layer, job.compute_step) == (2, ComputeStep.LAYER)
    second.process_job(job)
    assert (job.current_layer, job.compute_step) == (5, ComputeStep.HEAD)
    assert job.cache is not None
    assert set(job.cache.filled.values()) == {len(PROMPT)}


def test_a_job_leaves_a_segment_where_its_way_goes_elsewhere(split: Split) -> None:
    job = started(split, split.job())
    job.hops = (Hop("here", 0, 1), Hop("there", 1, 5))
    split.segments[0].process_job(job)
    assert job.current_layer == 1


def test_parts_of_a_segment_compute_what_the_whole_computes(split: Split) -> None:
    whole, parted = started(split, split.job()), started(split, split.job())
    model = split.segments[1]
    for job in (whole, parted):
        split.segments[0].process_job(job)
    model.process_jobs([whole], 5)
    model.process_jobs([parted], 3)
    model.process_jobs([parted], 5)
    torch.testing.assert_close(whole.data, parted.data)


def test_what_a_job_brings_is_not_written_over(split: Split) -> None:
    job = started(split, split.job())
    brought = job.data
    assert brought is not None
    before = brought.clone()
    split.segments[0].process_job(job)
    assert torch.equal(brought, before)


def test_a_step_that_begins_earlier_writes_over_what_was_there(split: Split) -> None:
    job, fresh = split.job(), split.job()
    split.step((job, PROMPT, 0))
    split.step((job, [7, 8, 9], len(PROMPT)))
    again = split.step((job, [30, 31], 6))[0]
    assert job.cache is not None
    assert set(job.cache.filled.values()) == {8}
    expected = split.step((fresh, [*PROMPT[:6], 30, 31], 0))[0]
    torch.testing.assert_close(again, expected[-2:], rtol=1e-4, atol=1e-4)
    following = split.step((job, [44], 8))[0]
    torch.testing.assert_close(following, split.step((fresh, [44], 8))[0], rtol=1e-4, atol=1e-4)


def test_a_step_after_a_gap_is_refused_and_changes_nothing(split: Split) -> None:
    job = split.job()
    split.step((job, PROMPT, 0))
    with pytest.raises(LlmFailure, match="gap"):
        split.step((job, [1], len(PROMPT) + 1))
    split.step((job, [1], len(PROMPT)))


def test_a_step_beyond_a_jobs_room_is_refused(split: Split) -> None:
    job = split.job(tokens=64)
    with pytest.raises(LlmFailure) as caught:
        split.step((job, [1] * 65, 0))
    assert caught.value.code == LlmCode.CONTEXT_EXCEEDED


def test_a_job_whose_room_was_given_back_is_refused_and_others_can_go_on(split: Split) -> None:
    job, other = split.job(), split.job()
    assert job.cache is not None
    job.cache.free()
    with pytest.raises(LlmFailure, match="ended"):
        split.step((job, PROMPT, 0), (other, PROMPT, 0))
    split.step((other, PROMPT, 0))


@pytest.mark.parametrize("shape", [(12, 31), (11, 32), (12,), (0, 32)])
def test_hidden_states_of_another_shape_are_refused(split: Split, shape: tuple[int, ...]) -> None:
    job = started(split, split.job())
    job.data = torch.zeros(shape)
    with pytest.raises(LlmFailure) as caught:
        split.segments[0].process_job(job)
    assert caught.value.code == LlmCode.WRONG_COMPUTATION


def test_a_segment_does_not_compute_what_it_does_not_hold(split: Split) -> None:
    job = started(split, split.job())
    with pytest.raises(LlmFailure):
        split.segments[1].process_jobs([job], 5)
    with pytest.raises(LlmFailure):
        split.segments[0].process_jobs([job], 3)


def test_after_a_failure_half_way_the_same_step_can_be_tried_again(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, fresh = split.job(), split.job()
    split.step((job, PROMPT, 0))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(split.segments[1]._modules[3], "forward", fail)
        with pytest.raises(RuntimeError):
            split.step((job, [30], 6))
    assert job.cache is not None
    assert job.cache.filled[4] == 6
    again = split.step((job, [30], 6))[0]
    expected = split.step((fresh, [*PROMPT[:6], 30], 0))[0]
    torch.testing.assert_close(again[-1], expected[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_job_of_numbers_that_are_none_disturbs_no_other(
    source: RandomSource, dtype: str, bad: float
) -> None:
    split = Split(source, dtype=dtype)
    sick, well, alone = (started(split, split.job()) for _ in range(3))
    assert sick.data is not None
    sick.data = sick.data.clone()
    sick.data[3, 5] = bad
    split.segments[0].process_jobs([sick, well], 5)
    split.segments[0].process_jobs([alone], 5)
    assert sick.data is not None
    assert not torch.isfinite(sick.data[3]).all()
    torch.testing.assert_close(well.data, alone.data, rtol=1e-4, atol=1e-4)


def started(split: Split, job: Job) -> Job:
    job.start, job.count, job.data = 0, len(PROMPT), split.embed(PROMPT)
    job.current_layer, job.compute_step = 0, ComputeStep.LAYER
    return job
