"""The next token: likeliest or drawn, in llama.cpp's order, and the same again from a seed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.llm.values import CompletionRequest, LlmCode, LlmFailure, Sampling
from penstock.workloads.pipes.text.sampler import (
    DEFAULTS,
    LAST,
    Sampler,
    candidates,
    completed,
    gumbel,
    penalised,
    seed_of,
)

GREEDY = Sampling(temperature=0)
WIDE = Sampling(temperature=1, top_k=0, top_p=1, min_p=0)
SEVEN = torch.tensor([0.1, 2.0, -1.0, 2.5, 0.0, 1.0, -3.0])
LOGITS = st.lists(
    st.floats(-10, 10, width=32, allow_subnormal=False), min_size=1, max_size=40, unique=True
)
"""Different from each other: the order of equal ones is not defined. Subnormal numbers may count as
zero, because torch can set the processor so."""


def drawn(logits: torch.Tensor, sampling: Sampling, seed: int, count: int = 1) -> list[int]:
    """At as many positions, with the same logits at each."""
    sampler = Sampler(sampling, seed)
    return [sampler.choose(logits, [0] * position).token for position in range(count)]


# -- greedy -------------------------------------------------------------------------


@given(LOGITS)
def test_without_temperature_the_likeliest_is_taken(values: list[float]) -> None:
    row = torch.tensor(values)
    for sampling in (GREEDY, Sampling(temperature=5, top_k=1)):
        assert drawn(row, sampling, seed=3) == [int(row.argmax())]


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_narrow_sampling_at_any_temperature_is_greedy(narrow: dict[str, Any]) -> None:
    assert set(drawn(SEVEN, Sampling(temperature=5, **narrow), seed=1, count=50)) == {3}


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, WIDE], ids=["greedy", "drawn"])
def test_logits_that_are_no_numbers_are_refused(bad: float, sampling: Sampling) -> None:
    row = SEVEN.clone()
    row[2] = bad
    with pytest.raises(LlmFailure) as refused:
        drawn(row, sampling, seed=1)

    assert refused.value.code is LlmCode.WRONG_COMPUTATION


def test_the_logits_are_left_as_they_were() -> None:
    row = SEVEN.clone()
    Sampler(Sampling(repeat_penalty=2), 1, logprobs=3).choose(row, [1, 3])
    assert torch.equal(row, SEVEN)


# -- what is drawn ------------------------------------------------------------------


def test_what_is_left_open_is_as_in_llama_cpp() -> None:
    assert completed(Sampling()) == DEFAULTS
    assert completed(Sampling(top_k=3), {"top_k": 9, "min_p": 0.2, "top_p": None}) == completed(
        Sampling(top_k=3, min_p=0.2)
    )


@given(
    values=LOGITS,
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 0.99) | st.just(1.0),
    min_p=st.floats(0, 1),
)
def test_who_may_be_drawn_follows_the_order_of_the_filters(
    values: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    row = np.array(values, np.float32)
    tokens, below = candidates(row, float(row.max()), top_k, top_p, min_p)

    assert set(tokens.tolist()) == _filtered(row, top_k, top_p, min_p)
    assert below.tolist() == [float(row[token]) - float(row.max()) for token in tokens]


def _filtered(row: np.ndarray[Any, Any], top_k: int, top_p: float, min_p: float) -> set[int]:
    """One after the other, as llama.cpp describes them."""
    order = sorted(range(len(row)), key=lambda token: -float(row[token]))
    order = order[:top_k] if top_k else order
    weights = [math.exp(float(row[token]) - float(row.max())) for token in order]
    if top_p < 1:
        mass = np.cumsum(np.array(weights))
        target = top_p * float(np.array(weights).sum())
        order = order[: 1 + next((n for n, sum_ in enumerate(mass) if sum_ >= target), len(order))]
    least = math.log(min_p) if min_p > 0 else -math.inf
    return {token for token in order if float(row[token]) - float(row.max()) >= least}


@pytest.mark.parametrize("top_p", [0.5, 0.999999], ids=str)
def test_a_flat_distribution_is_cut_at_the_same_place_as_a_short_one(top_p: float) -> None:
    row = np.random.default_rng(5).normal(size=5000).astype(np.float32)
    tokens, _ = candidates(row, float(row.max()), 0, top_p, 0.0)

    assert set(tokens.tolist()) == _filtered(row, 0, top_p, 0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float) -> None:
    count = 20_000
    sampling = Sampling(temperature=temperature, top_k=0, top_p=1, min_p=0)
    found = Counter(drawn(SEVEN, sampling, seed=11, count=count))
    expected = torch.softmax(SEVEN.double() / temperature, 0) * count
    surprise = sum(
        (found[token] - float(expected[token])) ** 2 / float(expected[token])
        for token in range(len(SEVEN))
    )

    assert surprise < 22.5  # of chi-square with 6 degrees of freedom, one in a thousand is above


def test_noise_is_gumbels_and_of_no_kin_to_its_neighbours() -> None:
    tokens = np.arange(50_000)
    here, next_to_it, other = gumbel(5, 9, tokens), gumbel(5, 10, tokens), gumbel(6, 9, tokens)

    assert abs(here.mean() - 0.57722) < 0.02
    assert abs(here.var() - math.pi**2 / 6) < 0.05
    for neighbour in (next_to_it, other, np.roll(here, 1)):
        assert abs(np.corrcoef(here, neighbour)[0, 1]) < 0.02


# -- seeds --------------------------------------------------------------------------


@pytest.mark.seed("000", "10.6")
def test_the_same_seed_draws_the_same_and_another_one_something_else() -> None:
    first = drawn(SEVEN, WIDE, seed=7, count=40)
    assert first == drawn(SEVEN, WIDE, seed=7, count=40)
    assert first != drawn(SEVEN, WIDE, seed=8, count=40)


def test_a_draw_depends_on_its_position_and_not_on_those_before() -> None:
    whole = drawn(SEVEN, WIDE, seed=7, count=20)
    later = Sampler(WIDE, 7)
    assert [later.choose(SEVEN, [0] * position).token for position in (19, 4, 11)] == [
        *(whole[19], whole[4], whole[11]),
    ]


def test_a_difference_in_the_last_bits_changes_no_draw() -> None:
    row = torch.randn(500, generator=torch.Generator().manual_seed(1))
    nearly = torch.nextafter(row, torch.full_like(row, 9))
    sampling = Sampling(temperature=1.5)
    assert drawn(row, sampling, 3, count=200) == drawn(nearly, sampling, 3, count=200)


def test_each_answer_has_a_seed_of_its_own_and_without_one_a_random_one() -> None:
    ask = CompletionRequest(prompts=("x", "y"), n=3, sampling=Sampling(seed=(1 << 32) - 2))
    assert [seed_of(ask, choice) for choice in range(4)] == [(1 << 32) - 2, 0, 1, (1 << 32) - 2]
    unseeded = CompletionRequest(prompts=("x",))
    assert seed_of(unseeded, 0) != seed_of(unseeded, 0)


# -- penalties ----------------------------------------------------------------------


def test_penalties_are_llama_cpps() -> None:
    how = completed(Sampling(repeat_penalty=2, frequency_penalty=0.5, presence_penalty=0.25))
    row = penalised(SEVEN.numpy(), [1, 2, 1, 4], how)

    assert row.tolist() == pytest.approx(
        [0.1, 2.0 / 2 - 2 * 0.5 - 0.25, -1.0 * 2 - 0.75, 2.5, 0.0 - 0.75, 1.0, -3.0]
    )


def test_only_the_last_tokens_are_penalised() -> None:
    how = Sampling(temperature=0, presence_penalty=2)
    assert Sampler(how, 0).choose(SEVEN, [3] + [6] * (LAST - 1)).token == 1
    assert Sampler(how, 0).choose(SEVEN, [3] + [6] * LAST).token == 3


@pytest.mark.parametrize(
    "penalty",
    [{"repeat_penalty": 5}, {"presence_penalty": 2}, {"frequency_penalty": 2}],
    ids=str,
)
def test_any_penalty_changes_what_repeats(penalty: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(temperature=0, **penalty), 0)
    assert sampler.choose(SEVEN, []).token == 3
    assert sampler.choose(SEVEN, [3]).token == 1


# -- logprobs -----------------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_the_sampling() -> None:
    sampling = Sampling(temperature=0.3, top_k=2, presence_penalty=2)
    chosen = Sampler(sampling, 4, logprobs=3).choose(SEVEN, [3])
    expected = torch.log_softmax(SEVEN.double(), 0)

    assert chosen.logprobs is not None
    assert chosen.logprobs.logprob == pytest.approx(float(expected[chosen.token]))
    assert [token for token, _ in chosen.logprobs.top] == [3, 1, 5]
    assert [value for _, value in chosen.logprobs.top] == pytest.approx(
        [float(expected[token]) for token in (3, 1, 5)]
    )


@pytest.mark.parametrize(("asked", "told"), [(None, None), (0, 0), (2, 2), (20, 7)])
def test_as_many_alternatives_are_told_as_asked(asked: int | None, told: int | None) -> None:
    logprobs = Sampler(GREEDY, 0, asked).choose(SEVEN, []).logprobs
    assert (None if logprobs is None else len(logprobs.top)) == told


def test_no_logprob_is_infinite() -> None:
    row = SEVEN.clone()
    row[6] = -math.inf
    logprobs = Sampler(GREEDY, 0, 20).choose(row, []).logprobs
    assert logprobs is not None
    assert logprobs.top[-1] == (6, -9999.0)


# -- held answers -------------------------------------------------------------------


class Odd:
    """Only odd tokens may come."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self, row: Any) -> Any:
        return np.where(np.arange(len(row)) % 2 == 1, row, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize("sampling", [GREEDY, WIDE], ids=["greedy", "drawn"])
def test_only_what_is_allowed_is_chosen_and_it_is_told(sampling: Sampling) -> None:
    odd = Odd()
    row = torch.tensor([9.0, 1.0, 9.0, 1.1, 9.0])
    sampler = Sampler(sampling, 2, constraint=odd)
    chosen = [sampler.choose(row, [0] * n).token for n in range(30)]

    assert set(chosen) <= {1, 3}
    assert odd.accepted == chosen
