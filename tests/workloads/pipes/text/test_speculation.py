"""Speculative decoding: what is proposed, and when it pays."""

from __future__ import annotations

import pytest

from penstock.workloads.pipes.text.speculation import SIZES, Lookup, Speculation, StepTimes

LOOP = [5, 6, 7, 8] * 4


def test_what_followed_the_same_tokens_is_proposed() -> None:
    assert Lookup()([1, 2, 3, 4, 9, 1, 2], 3) == [3, 4, 9]


def test_the_longer_match_counts_and_then_the_later() -> None:
    assert Lookup()([1, 2, 3, 4, 8, 7, 3, 4, 9, 1, 2, 3, 4], 1) == [8]
    assert Lookup()([3, 4, 8, 3, 4, 9, 3, 4], 1) == [9]


def test_what_never_came_before_has_no_proposal() -> None:
    assert Lookup()([1, 2, 3, 4, 5], 8) == []


def test_a_loop_goes_on_beyond_what_was_said() -> None:
    assert Lookup()([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_no_token_that_ends_an_answer_is_proposed() -> None:
    assert Lookup({4})([1, 2, 3, 4, 9, 1, 2], 8) == [3]


def test_tokens_that_were_taken_back_are_forgotten() -> None:
    lookup = Lookup()
    lookup([1, 2, 3, 4, 5, 6, 4, 5], 1)
    assert lookup([1, 2, 3, 1, 2], 9) == [3, 1, 2, 3, 1, 2, 3, 1, 2]


class Steps:
    """Steps that take as long as they are told to, on a clock of their own."""

    def __init__(self, step: float, token: float) -> None:
        self.now, self.step, self.token = 1.0, step, token
        self.times = StepTimes()

    def answer(self, ids: list[int], wanted: list[int]) -> list[int]:
        """The sizes of the steps in which an answer is made."""
        speculation = Speculation(self.times, Lookup(), lambda: self.now)
        sizes, ids, wanted = [], list(ids), list(wanted)
        while wanted:
            proposed = speculation.propose(ids, len(wanted) - 1)
            self.now += self.step + self.token * len(proposed)
            right = next((n for n, t in enumerate(proposed) if t != wanted[n]), len(proposed))
            chosen, wanted = wanted[: right + 1], wanted[right + 1 :]
            speculation.compare(chosen)
            ids += chosen
            sizes.append(len(proposed))
        return sizes


def test_over_a_slow_link_text_that_repeats_takes_fewer_steps() -> None:
    sizes = Steps(step=0.06, token=0.002).answer(LOOP, LOOP * 6)
    assert len(sizes) < 20
    assert max(sizes) == SIZES[-1]


@pytest.mark.parametrize(
    ("token", "answer"),
    [(0.1, LOOP * 6), (0.02, [n * 7 % 31 + 100 * (n % 2) for n in range(96)])],
    ids=["each token costs as much as a step", "nothing repeats"],
)
def test_where_it_does_not_pay_it_is_as_good_as_off(token: float, answer: list[int]) -> None:
    steps = Steps(step=0.05, token=token)
    steps.answer(LOOP, answer)
    assert steps.now - 1 < 1.1 * len(answer) * 0.05


def test_it_is_taken_up_again_when_links_become_slow() -> None:
    steps = Steps(step=0.01, token=0.1)
    assert steps.answer(LOOP, LOOP * 12).count(0) > 180
    steps.step, steps.token = 0.1, 0.001
    steps.answer(LOOP, LOOP * 99)
    assert max(steps.answer(LOOP, LOOP * 12)) == SIZES[-1]
