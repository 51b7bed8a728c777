"""How the lines of an input file are read, wherever its parts happen to end."""

from __future__ import annotations

import json
import time
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.openai.batches import OpenAiBatchFormat
from penstock.core.errors import InvalidRequest
from penstock.testing.aio import run_async
from penstock.workloads.llm import batch_lines
from penstock.workloads.llm.batch_lines import LineCheck, RawLine, Read, raw_lines, read_line

CHAT = "/v1/chat/completions"
URL = CHAT.encode()
TEXT = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b" ", b"\n\n"]), max_size=20)


def reader(content: bytes) -> Read:
    async def read(start: int, length: int) -> bytes:
        return content[start : start + length]

    return read


async def lines(content: bytes, longest: int = 100) -> list[RawLine]:
    return [line async for line in raw_lines(reader(content), longest)]


@given(TEXT.map(b"".join), st.integers(1, 7))
@run_async
async def test_lines_are_the_same_wherever_a_part_ends(content: bytes, part: int) -> None:
    with patch.object(batch_lines, "_PART", part):
        found = await lines(content)
    there = list(enumerate(content.split(b"\n"), 1))
    assert [line for line in found if line[1]] == [line for line in there if line[1].strip()]
    blank = [number for number, line in found if not line]
    last = max((number for number, line in there if line.strip()), default=0)
    assert blank == [
        number
        for number, line in there
        if not line.strip() and number < last and (number == 1 or there[number - 2][1].strip())
    ]


@pytest.mark.parametrize("content", [b"x" * 101, b"a\n" + b"x" * 101, b"x" * 300])
@run_async
async def test_a_line_without_end_is_refused_before_it_is_whole(content: bytes) -> None:
    with patch.object(batch_lines, "_PART", 50), pytest.raises(InvalidRequest, match="longer than"):
        await lines(content)


@given(st.binary(max_size=200))
def test_no_line_does_worse_than_being_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_line(1, raw, CHAT)


@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_body_that_is_nested_too_deep_is_one_more_wrong_line(depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    body = b'{"model": "fake", "messages": ' + deep + b"}"
    check = LineCheck(CHAT, OpenAiBatchFormat())
    check.look(7, b'{"custom_id": "a", "method": "POST", "url": "%b", "body": %b}' % (URL, body))
    (error,) = check.conclude()
    assert error.line == 7


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
HOSTILE: dict[str, dict[str, Any]] = {
    "structured outputs as text": {"structured_outputs": "x"},
    "a deep schema as text": {"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000},
    "an image by URL": {"messages": [{"role": "user", "content": [IMAGE]}]},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_body_that_can_not_be_asked_is_one_more_wrong_line(kind: str) -> None:
    """Any other error would be tried again for ever."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], **HOSTILE[kind]}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    check = LineCheck(CHAT, OpenAiBatchFormat())
    check.look(7, json.dumps(line).encode())
    (error,) = check.conclude()
    assert error.line == 7


def test_a_line_that_breaks_the_format_is_one_more_wrong_line() -> None:
    batch_format = OpenAiBatchFormat()
    check = LineCheck(CHAT, batch_format)
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {}}
    with patch.object(batch_format, "ask", side_effect=RuntimeError("oh")):
        check.look(7, json.dumps(line).encode())
    (error,) = check.conclude()
    assert (error.line, error.param, error.code) == (7, "body", "invalid_request")


@run_async
async def test_one_long_line_takes_time_in_proportion_to_its_length() -> None:
    content = b"x" * (60 << 20)
    began = time.process_time()
    (line,) = await lines(content, len(content))
    assert len(line.data) == len(content)
    assert time.process_time() - began < 3, "it took 10 s when each part copied all before it"
