"""What a node computes on."""

from __future__ import annotations

import pytest
import torch
from tests.support.pipes.random_models import tiny
from tests.support.pipes.walking import Split

from penstock.core.errors import Misconfigured
from penstock.workloads.llm.values import LlmFailure
from penstock.workloads.pipes.device import device_dtype, device_of

META = torch.device("meta")


def test_a_device_is_taken_by_its_name() -> None:
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "cpu:x", "my gpu"])
def test_a_device_that_is_not_there_is_refused_with_what_could_be_said(name: str) -> None:
    with pytest.raises(Misconfigured, match=f"node.device '{name}' can't be used here") as caught:
        device_of(name)
    assert "cuda:0" in str(caught.value.hint)


def test_without_a_word_it_is_one_that_is_there() -> None:
    torch.empty(1, device=device_of(""))


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
