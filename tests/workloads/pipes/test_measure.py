"""What is chosen of what was measured."""

from __future__ import annotations

import pytest
from tests.support.pipes.random_models import tiny

from penstock.workloads.pipes.measure import Measurement, choose, cores, thread_counts
from penstock.workloads.pipes.weights.source import architecture_of


def found(dtype: str, threads: int, milliseconds: float) -> Measurement:
    return Measurement(dtype, threads, milliseconds, milliseconds)


@pytest.mark.seed("000", "17.9")
def test_the_fastest_is_chosen() -> None:
    fastest = found("float32", 4, 1.0)
    assert choose([found("float32", 1, 3.0), fastest, found("float32", 8, 2.0)]) == fastest


def test_more_threads_are_only_taken_for_a_clear_gain() -> None:
    one = found("float32", 1, 1.0)
    assert choose([found("float32", 2, 0.95), one]) == one
    assert choose([found("float32", 2, 0.6), one]).threads == 2


def test_less_precision_is_only_taken_for_a_clear_gain() -> None:
    exact = found("float32", 1, 1.0)
    assert choose([found("bfloat16", 1, 0.85), exact]) == exact
    assert choose([found("bfloat16", 1, 0.5), exact]).dtype == "bfloat16"


def test_answers_and_prompts_both_count() -> None:
    exact = Measurement("float32", 1, 1.0, 10.0)
    slow_with_prompts = Measurement("bfloat16", 1, 0.7, 60.0)
    assert choose([exact, slow_with_prompts]) == exact
    slow_with_answers = Measurement("bfloat16", 1, 1.4, 8.0)
    assert choose([exact, slow_with_answers]) == exact


def test_one_half_and_all_cores_are_tried() -> None:
    assert thread_counts(1) == (1,)
    assert thread_counts(2) == (1, 2)
    assert thread_counts(16) == (1, 8, 16)
    assert cores() >= 1


def test_what_is_multiplied_is_what_a_layer_has() -> None:
    _, source = tiny("llama")
    weights = sum(one.numel() for one in source.layer(0).values() if one.dim() == 2)
    assert sum(out * inner for out, inner in architecture_of(source).linears) == weights
