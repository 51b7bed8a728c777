"""Thoughts are told apart from what is said, wherever the text is cut."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.pipes.small_tokenizers import TEMPLATE, byte_level

from penstock.workloads.llm.values import ChatRequest, Delta, Message
from penstock.workloads.pipes.text.tokenizing import Text
from penstock.workloads.pipes.text.writer import Thinking

USER = Message(role="user", content="Hi")
AWARE = TEMPLATE + "{# knows <think> and </think> #}"
BEGUN = AWARE + "{% if add_generation_prompt %}<think>\n{% endif %}"


def told(parts: list[str], *, begun: bool = False) -> tuple[str, str]:
    thinking = Thinking(begun=begun)
    pieces = [thinking.add(part) for part in parts] + [thinking.add("", is_last=True)]
    return "".join(one for one, _ in pieces), "".join(one for _, one in pieces)


def whole(text: str) -> tuple[str, str]:
    if found := re.fullmatch(r"\s*<think>(.*?)(?:</think>(.*))?", text, re.S):
        return found[1].strip(), (found[2] or "").lstrip()
    return "", text


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a"]))


@given(parts=PARTS, cuts=st.lists(st.integers(0, 60), max_size=20), begun=st.booleans())
def test_it_does_not_matter_where_the_text_is_cut(
    parts: list[str], cuts: list[int], begun: bool
) -> None:
    text = "".join(parts)
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    pieces = [text[start:end] for start, end in pairwise(places)]

    assert told(pieces, begun=begun) == whole("<think>" + text if begun else text)


def test_each_part_is_told_as_soon_as_it_is_known() -> None:
    thinking = Thinking()
    assert [
        thinking.add(part)
        for part in (" <th", "ink>\n", "One", ", two ", "<b> </", "think>", "\n\n", "So", " be")
    ] == [
        *(("", ""), ("", ""), ("One", ""), (", two", ""), (" <b>", "")),
        *(("", ""), ("", ""), ("", "So"), ("", " be")),
    ]


def pieces_of(template: str, said: str, **more: object) -> tuple[list[Delta], str, str]:
    text = Text(byte_level(chat_template=template), {"vocab_size": 422})
    writer = text.writer(ChatRequest(messages=(USER,), **more), 1000)  # type: ignore[arg-type]
    tokens = [*text.tokenize(said), 2]
    pieces = [piece for token in tokens if (piece := writer.add(token))]
    assert "".join(piece.text for piece in pieces) == writer.said().text
    assert "".join(piece.reasoning for piece in pieces) == writer.said().reasoning
    return pieces, writer.said().reasoning, writer.said().text


@pytest.mark.parametrize(
    ("template", "said", "expected"),
    [
        (AWARE, "<think>\nHm 日本</think>\n\nYes", ("Hm 日本", "Yes")),
        (BEGUN, "Hm </think>Yes", ("Hm", "Yes")),
        (AWARE, "Yes", ("", "Yes")),
        (AWARE, "<think>Hm", ("Hm", "")),
        (TEMPLATE, "<think>Hm</think>Yes", ("", "<think>Hm</think>Yes")),
    ],
    ids=["thinks", "begun", "does-not", "never-ends", "unaware"],
)
def test_thoughts_of_a_model_whose_template_knows_them_are_its_reasoning(
    template: str, said: str, expected: tuple[str, str]
) -> None:
    assert pieces_of(template, said)[1:] == expected


def test_an_answer_that_is_held_to_a_schema_is_no_thought() -> None:
    assert pieces_of(BEGUN, '{"a": 1}', json_object=True)[1:] == ("", '{"a": 1}')


def test_a_stop_string_in_a_thought_ends_the_answer() -> None:
    text = Text(byte_level(chat_template=AWARE), {"vocab_size": 422})
    writer = text.writer(ChatRequest(messages=(USER,), stop=("two",)), 1000)
    for token in text.tokenize("<think>one, two, three"):
        writer.add(token)
        if writer.finished:
            break
    assert (writer.finished, writer.said().reasoning) == ("stop", "one,")
