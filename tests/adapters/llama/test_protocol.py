"""Between our values and llama.cpp's JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.llama import protocol
from penstock.workloads.llm.values import (
    AudioPart,
    ChatRequest,
    CompletionRequest,
    Delta,
    ImagePart,
    ImageUrl,
    LlmCode,
    LlmFailure,
    Message,
    Sampling,
    TextPart,
    ToolCall,
    ToolFunction,
    Usage,
)

HI = (Message(role="user", content="Hi"),)
TOOL = {"type": "function", "function": {"name": "look"}}


def body(ask: ChatRequest | CompletionRequest, choice: int = 0) -> dict[str, Any]:
    return dict(json.loads(protocol.request_of(ask, choice)[1]))


def test_what_is_not_said_is_left_to_the_engine() -> None:
    assert body(ChatRequest(messages=HI)) == {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
        "messages": [{"role": "user", "content": "Hi"}],
    }


def test_everything_that_is_said_is_passed_on() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repeat_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=9,
    )
    said = body(
        ChatRequest(
            messages=HI,
            sampling=sampling,
            max_tokens=3,
            stop=("a",),
            logprobs=2,
            grammar="root ::= 'x'",
            tools=(TOOL,),
            tool_choice="auto",
        )
    )

    expected = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 9,
        "max_tokens": 3,
        "stop": ["a"],
        "logprobs": True,
        "top_logprobs": 2,
        "grammar": "root ::= 'x'",
        "tools": [TOOL],
        "tool_choice": "auto",
    }
    assert said.items() >= expected.items()


def test_each_choice_has_its_prompt_and_its_seed() -> None:
    ask = CompletionRequest(prompts=("a", (1, 2)), n=2, sampling=Sampling(seed=(1 << 32) - 2))

    sent = [(one["prompt"], one["seed"]) for one in (body(ask, choice) for choice in range(4))]
    assert sent == [("a", (1 << 32) - 2), ("a", 0), ([1, 2], (1 << 32) - 2), ([1, 2], 0)]
    with pytest.raises(ValueError, match="no choice 4"):
        body(ask, 4)


def test_an_image_is_never_fetched() -> None:
    image = ImagePart(ImageUrl("http://localhost/secret.png"))
    ask = ChatRequest(messages=(Message(role="user", content=(TextPart("See"), image)),))

    with pytest.raises(LlmFailure) as refused:
        body(ask)
    assert refused.value.code is LlmCode.INVALID_PROMPT
    assert protocol.has_part(ask, ImagePart)
    assert not protocol.has_part(ask, AudioPart)


def test_tools_are_dropped_where_none_may_be_used() -> None:
    ask = ChatRequest(messages=HI, tools=(TOOL,), tool_choice="none")

    assert "tools" not in body(ask)


# -- what comes back ----------------------------------------------------------------


def event(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}


def stream(*events: dict[str, Any]) -> bytes:
    lines = [b"data: " + json.dumps(one, ensure_ascii=False).encode() for one in events]
    return b"\n\n".join([b": ping", *lines, b"data: [DONE]", b""])


END = {
    "choices": [],
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
    "timings": {"prompt_ms": 1.5, "predicted_ms": 2.5},
}


@given(st.lists(st.text(), min_size=1), st.data())
def test_events_come_whole_however_they_were_cut(texts: list[str], data: st.DataObject) -> None:
    sent = stream(*(event(text) for text in texts), END)
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=8).map(sorted))
    events, answer = protocol.EventParser(), protocol.AnswerReader(ChatRequest(messages=HI), 0)

    told: list[Delta] = []
    for start, stop in zip([0, *cuts], [*cuts, len(sent)], strict=True):
        for one in events.feed(sent[start:stop]):
            if (piece := answer.add(one)) is not None:
                told.append(piece)

    assert answer.is_done
    said = answer.said()
    assert said.choice.text == "".join(texts) == "".join(piece.text for piece in told)
    assert said.usage == Usage(5, 2, 3)
    assert said.timings.predicted_ms == 2.5


def test_tool_calls_are_put_together() -> None:
    answer = protocol.AnswerReader(ChatRequest(messages=HI), 2)
    parts: list[dict[str, Any]] = [
        {"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"at":'}},
        {"index": 1, "id": "c2", "function": {"name": "run", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": "1}"}},
    ]
    for part in parts:
        answer.add({"choices": [{"delta": {"tool_calls": [part], "reasoning_content": "m"}}]})
    answer.add({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})

    choice = answer.said().choice
    assert choice.tool_calls == (
        ToolCall(id="c1", function=ToolFunction("look", '{"at":1}')),
        ToolCall(id="c2", function=ToolFunction("run", "{}")),
    )
    assert (choice.index, choice.finish_reason, choice.reasoning) == (2, "tool_calls", "mmmm")


def test_progress_is_no_piece() -> None:
    answer = protocol.AnswerReader(ChatRequest(messages=HI), 0)
    start = {"choices": [{"delta": {"role": "assistant", "content": None}}], "prompt_progress": {}}

    assert answer.add(start) is None
    assert not answer.is_done
