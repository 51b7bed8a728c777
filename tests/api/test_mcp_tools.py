"""How topics become tools: names, schemas, checks of input."""

from __future__ import annotations

import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.mcp_tools import check_input, tool_name, tool_of
from penstock.cli.exits import Exit
from penstock.cli.program import run
from penstock.core.errors import InvalidRequest
from penstock.ports.engine_api import TopicView

words = st.text("ab_-19", min_size=1, max_size=5)
topics = st.lists(words, min_size=1, max_size=4).map(lambda parts: ".".join(["job", *parts]))


@pytest.mark.parametrize(
    ("topic", "name"),
    [
        ("job.text.shout", "text__shout"),
        ("job.report.make_pdf", "report__make_pdf"),
        ("job.llm.qwen3-0-6b", "llm__qwen3-0-6b"),
        ("job.container", "container"),
        ("job.a__b", "a__b-7485d285"),
        ("job.job_wait", "job_wait-eeef4f35"),
    ],
)
def test_a_tool_is_named_after_its_topic(topic: str, name: str) -> None:
    assert tool_name(topic) == name


@given(st.lists(topics, unique=True, min_size=2, max_size=20))
def test_no_two_topics_have_the_same_tool(topics: list[str]) -> None:
    assert len({tool_name(topic) for topic in topics}) == len(topics)


@given(topics)
def test_a_name_is_one_that_every_client_takes(topic: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool_name(topic))


def test_a_long_topic_has_a_short_name_of_its_own() -> None:
    first, second = (tool_name(f"job.{'x' * 150}.{end}") for end in "ab")
    assert first != second
    assert len(first) == 64


def test_a_result_keeps_its_definitions() -> None:
    view = TopicView(
        topic="job.a",
        output_schema={"$ref": "#/$defs/JobState", "$defs": {"JobState": {"type": "integer"}}},
    )
    schema = tool_of(view).output_schema
    assert schema is not None
    assert schema["$defs"] == {"JobState": {"type": "integer"}}
    assert schema["properties"]["result"] == {"$ref": "#/$defs/JobState"}
    assert "SUCCEEDED" in schema["properties"]["state"]["enum"]


def test_a_topic_without_a_schema_takes_any_object() -> None:
    assert tool_of(TopicView(topic="job.a")).input_schema == {"type": "object"}
    check_input({"whatever": 1}, None)


def test_further_fields_pass_where_the_schema_lets_them() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    check_input({"a": 1, "b": 2}, schema)
    with pytest.raises(InvalidRequest, match=r"input\.a: expected integer, got string"):
        check_input({"a": "1", "b": 2}, schema)
    with pytest.raises(InvalidRequest, match=r"input\.b: unknown field"):
        check_input({"a": 1, "b": 2}, {**schema, "additionalProperties": False})


def test_without_the_extra_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "penstock.api.mcp", None)
    assert run(["mcp"]) != Exit.OK
    said = capsys.readouterr().err
    assert "MCP is not installed" in said
    assert "pip install 'penstock[mcp]'" in said
