"""What is computed is what transformers computes, however a model is split and jobs are packed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.support.pipes.random_models import FAMILIES, RandomSource, generated, tiny
from tests.support.pipes.walking import Split

PROMPT = [5, 17, 40, 3, 88, 21, 9, 60, 33, 71, 12, 50, 4, 29, 66, 81, 7, 90, 45, 23]
CUTS: dict[int, tuple[int, ...]] = {1: (), 2: (2,), 3: (1, 4), 5: (1, 2, 3, 4)}


@cache
def model_of(family: str) -> tuple[Any, RandomSource, list[int]]:
    model, source = tiny(family)
    return model, source, generated(model, PROMPT, 16)


@pytest.mark.seed("000", "3.1", "3.7")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_in_any_number_of_segments(family: str) -> None:
    _, source, expected = model_of(family)
    for cuts in CUTS.values():
        assert Split(source, cuts).greedy(PROMPT, 16) == expected


@pytest.mark.seed("000", "13.2", "18.9")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_in_chunks_gives_the_same_tokens(family: str) -> None:
    _, source, expected = model_of(family)
    split = Split(source, (3,))
    for chunk in (1, 3, 8, 19):
        assert split.greedy(PROMPT, 16, chunk) == expected


@pytest.mark.seed("000", "5.1", "5.4", "5.5", "10.5")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    model, source, _ = model_of(family)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    split = Split(source)
    torch.testing.assert_close(
        split.step((split.job(), PROMPT, 0))[0], expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.seed("000", "18.9")
@pytest.mark.parametrize("family", FAMILIES)
def test_jobs_packed_together_compute_what_each_computes_alone(family: str) -> None:
    model, source, _ = model_of(family)
    prompts = [PROMPT, PROMPT[:1], PROMPT[3:9], PROMPT[::-1]]
    expected = [generated(model, prompt, 8) for prompt in prompts]
    split = Split(source, (2,))
    jobs = [split.job() for _ in prompts]
    ids = [list(prompt) for prompt in prompts]
    # One joins at each step, so that prompts and single tokens share a pass.
    sent = [0] * len(jobs)
    for step in range(len(jobs) + 8):
        going = [n for n in range(min(step + 1, len(jobs))) if len(ids[n]) < len(prompts[n]) + 8]
        parts = [(jobs[n], ids[n][sent[n] :], sent[n]) for n in going]
        if not parts:
            break
        for n, logits in zip(going, split.step(*parts), strict=True):
            sent[n] = len(ids[n])
            ids[n].append(int(logits[-1].argmax()))
    assert [tokens[len(prompt) :] for tokens, prompt in zip(ids, prompts, strict=True)] == expected
