"""What a node computes on."""

from __future__ import annotations

import pytest
import torch
from tests.support.pipes.random_models import tiny
from tests.support.pipes.walking import Split

from penstock.core.errors import Misconfigured
from penstock.workloads.llm.values import LlmFailure
from penstock.workloads.pipes.device import (
    Linears,
    device_dtype,
    device_of,
    fastest,
    layer_seconds,
    there,
)

META, CPU = torch.device("meta"), torch.device("cpu")
GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
LAYER = ((96, 32), (32, 96))


def test_a_device_is_taken_by_its_name() -> None:
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu:x", "my gpu"])
def test_a_device_that_is_not_there_is_refused_with_what_could_be_said(name: str) -> None:
    with pytest.raises(Misconfigured, match=f"node.device '{name}' can't be used here") as caught:
        device_of(name)
    assert "cuda:0" in str(caught.value.hint)


def test_without_a_word_it_is_one_that_is_there() -> None:
    torch.empty(1, device=device_of(""))


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [((3, 2, 9), OTHER), ((2, 2, 9), GPU), ((5, 6, 4), CPU)],
    ids=["the fastest", "the first of two", "a cpu that is faster"],
)
def test_without_a_word_it_is_the_one_on_which_a_layer_is_fastest(
    seconds: tuple[int, ...], chosen: torch.device
) -> None:
    times = dict(zip((GPU, OTHER, CPU), seconds, strict=True))
    asked: list[tuple[str, str]] = []

    def timed(device: torch.device, dtype: str, linears: Linears) -> float:
        assert linears == LAYER
        asked.append((str(device), dtype))
        return times[device]

    assert fastest((GPU, OTHER, CPU), LAYER, "float16", timed) == chosen
    assert asked == [("cuda:0", "float16"), ("cuda:1", "float16"), ("cpu", "float32")]
    assert fastest((GPU, CPU), LAYER, "int8", timed) == CPU


def test_a_layer_is_timed_on_any_device_and_one_that_can_not_compute_it_is_never_chosen() -> None:
    assert there()[-1] == CPU
    assert 0 < layer_seconds(CPU, "float32", LAYER) < float("inf")
    assert 0 < layer_seconds(META, "float16", LAYER) < float("inf")
    gone = torch.device("cuda", 99)
    assert layer_seconds(gone, "float16", LAYER) == float("inf")
    assert fastest((gone, CPU), LAYER, "float16") == CPU


def test_an_accelerator_computes_in_what_was_said() -> None:
    assert device_dtype(torch.device("cuda"), "bfloat16") == "bfloat16"
    assert device_dtype(torch.device("mps"), "auto") == "float16"
    with pytest.raises(LlmFailure, match="int8 need a CPU, not cuda"):
        device_dtype(torch.device("cuda"), "int8")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_nothing_is_made_on_another_device_than_the_segments(family: str) -> None:
    """Whatever forgets to say where it is made is on `meta` here, and can't be computed with."""
    split = Split(tiny(family)[1], (2,))
    prompt = [5, 17, 40, 3, 88, 21, 9, 60, 33, 71]
    one, other = split.job(), split.job()
    expected = split.step((split.job(), prompt, 0))[0]
    with META:
        found = split.step((one, prompt[:6], 0), (other, prompt[3:], 0))[0]
        rest = split.step((one, prompt[6:], 6))[0]
    torch.testing.assert_close(torch.cat((found, rest)), expected, rtol=1e-4, atol=1e-4)
