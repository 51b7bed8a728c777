"""What a second attempt tells a reader: never the same twice, and never another answer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Conflict
from penstock.workloads.llm.splice import StreamSplice
from penstock.workloads.llm.values import (
    Choice,
    Delta,
    TokenLogprob,
    ToolCall,
    ToolDelta,
    ToolFunction,
)

FIRST, SECOND = ("job", 1), ("job", 2)


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces."""
    marks = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(marks)]


PLACES = st.lists(st.integers(0, 100), max_size=6)


@given(st.text(max_size=40), st.integers(0, 40), PLACES, PLACES)
def test_however_an_answer_is_cut_and_broken_off_it_is_told_once(
    text: str, heard: int, first: list[int], second: list[int]
) -> None:
    told, listener = "", StreamSplice()
    for part in cut(text[:heard], first):
        told += listener.take(FIRST, Delta(text=part)).text
    for part in cut(text, second):
        told += listener.take(SECOND, Delta(text=part)).text
    (rest,) = listener.finish(SECOND, [Choice(text=text)])
    assert told + rest.text == text


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_an_answer_that_is_another_one_is_noticed(first: str, second: str) -> None:
    listener = StreamSplice()
    listener.take(FIRST, Delta(text=first))
    if second.startswith(first):
        assert listener.take(SECOND, Delta(text=second)).text == second[len(first) :]
        return
    with pytest.raises(Conflict):
        listener.take(SECOND, Delta(text=second))
        listener.finish(SECOND, [Choice(text=second)])


def test_answers_tools_thoughts_and_logprobs_are_kept_apart() -> None:
    token = TokenLogprob("a", -1.0)
    listener = StreamSplice()

    def pieces() -> list[Delta]:
        return [
            Delta(choice=0, text="a", logprobs=(token,)),
            Delta(choice=1, reasoning="b"),
            Delta(choice=1, tool_calls=(ToolDelta(index=0, id="c", name="f", arguments="{"),)),
        ]

    assert [listener.take(FIRST, piece) for piece in pieces()] == pieces()
    again = [listener.take(SECOND, piece) for piece in pieces()]
    assert [(p.text, p.reasoning, p.logprobs) for p in again] == [("", "", ())] * 3
    assert again[2].tool_calls == (ToolDelta(index=0),)
    call = ToolCall(id="c", function=ToolFunction("f", "{}"))
    rest = listener.finish(
        SECOND,
        [Choice(text="ab", logprobs=(token, token)), Choice(reasoning="bc", tool_calls=(call,))],
    )
    assert (rest[0].text, rest[0].logprobs) == ("b", (token,))
    assert (rest[1].reasoning, rest[1].tool_calls) == ("c", (ToolDelta(index=0, arguments="}"),))


def test_an_end_of_another_job_is_compared_as_a_whole() -> None:
    listener = StreamSplice()
    listener.take(FIRST, Delta(text="ab"))
    (rest,) = listener.finish(("its retry", 1), [Choice(text="abc")])
    assert rest.text == "c"
