"""The events of a streamed response."""

from __future__ import annotations

import json
from typing import Any

from penstock.api.openai.answers import JobOrigin
from penstock.api.openai.responses import ResponseBody, ResponseStream
from penstock.workloads.llm.values import Choice, Delta, LlmResult


def events(data: bytes) -> list[dict[str, Any]]:
    lines = (line for line in data.splitlines() if line.startswith(b"data: "))
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def test_an_item_that_is_not_in_the_result_does_not_shift_those_after_it() -> None:
    stream = ResponseStream(ResponseBody(model="m", input="hi"), JobOrigin("j", 0.0, "m"))
    stream.begin()
    stream.piece(Delta(reasoning="hm"))
    stream.piece(Delta(text="yes"))
    result = LlmResult(model="m", engine="e", choices=(Choice(text="yes"),))
    told = events(stream.finish([], result))
    (done,) = [event for event in told if event["type"] == "response.output_item.done"]
    assert (done["output_index"], done["item"]["type"]) == (1, "message")
    assert [item["type"] for item in told[-1]["response"]["output"]] == ["message"]
