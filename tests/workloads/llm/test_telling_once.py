"""Whoever reads an answer while it is made reads each part of it once."""

from __future__ import annotations

import msgspec
import pytest

from penstock.core.errors import Conflict
from penstock.ports.engine_api import Streamed
from penstock.workloads.llm.answers import Answer, TextStream
from penstock.workloads.llm.splice import StreamSplice
from penstock.workloads.llm.values import Choice, Delta


def streamed(attempt: int, n: int, text: str) -> Streamed:
    return Streamed("j", attempt, n, msgspec.json.encode(Delta(text=text)).decode())


def answer(text: str) -> Answer:
    return Answer(job_id="j", model="m", text=text, finish_reason="stop")


@pytest.mark.parametrize(
    ("updates", "whole", "heard"),
    [
        ([(1, 1, "one"), (1, 2, " two")], "one two", ["one", " two"]),
        ([(1, 1, "one"), (2, 1, "one"), (2, 2, " two")], "one two", ["one", " two"]),
        ([(1, 1, "one two"), (2, 1, "one")], "one two three", ["one two", " three"]),
        ([(1, 1, "one")], "one two", ["one", " two"]),
        ([], "one", ["one"]),
        ([(1, 1, "one"), (2, 1, "two"), (2, 2, " one")], "two one", ["one"]),
    ],
    ids=["plain", "again", "ended-before-all-was-told", "rest", "nothing", "another"],
)
def test_a_text_is_told_once_whoever_says_it(
    updates: list[tuple[int, int, str]], whole: str, heard: list[str]
) -> None:
    told: list[str] = []
    stream = TextStream(told.append)
    for update in updates:
        stream.add(streamed(*update))
    stream.finished(answer(whole))

    assert told == heard


def test_a_second_attempt_may_end_before_it_has_told_what_the_first_one_did() -> None:
    heard = StreamSplice()
    heard.take(("j", 1), Delta(text="one two"))
    heard.take(("j", 2), Delta(text="one"))
    (rest,) = heard.finish(("j", 2), [Choice(text="one two three")])

    assert rest.text == " three"


def test_a_second_attempt_that_says_less_is_another_answer() -> None:
    heard = StreamSplice()
    heard.take(("j", 1), Delta(text="one two"))
    heard.take(("j", 2), Delta(text="one"))
    with pytest.raises(Conflict):
        heard.finish(("j", 2), [Choice(text="one")])
