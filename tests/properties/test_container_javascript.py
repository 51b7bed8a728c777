"""What a container reads on its standard input is what JavaScript would have written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workloads.container.protocol.javascript import as_string, stringify

ECHO = """
require('readline').createInterface({input: process.stdin}).on('line', line => {
  const value = JSON.parse(line);
  process.stdout.write(JSON.stringify([JSON.stringify(value), String(value)]) + '\\n');
});
"""


class Node:
    """A JavaScript engine that reads JSON and tells how it would write it."""

    def __init__(self, program: str) -> None:
        self.process = subprocess.Popen(
            [program, "-e", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def writes(self, text: str) -> tuple[str, str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()
        stringified, plain = json.loads(self.process.stdout.readline())
        return stringified, plain

    def close(self) -> None:
        self.process.communicate(timeout=10)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    program = shutil.which("node")
    if program is None:
        message = "node is not installed: the table of pairs in tests/unit is what was compared"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    engine = Node(program)
    yield engine
    engine.close()


KEYS = (
    st.text(max_size=6)
    | st.integers(0, 2**33).map(str)
    | st.sampled_from(
        [
            "__proto__",
            "constructor",
            "toJSON",
            "length",
            "01",
            "-1",
            "1.5",
            "4294967294",
            "4294967295",
            "4294967296",
            "9007199254740991",
            "",
            "0",
            " 1",
        ]
    )
)
TEXTS = st.text() | st.text(st.characters(categories=["Cs", "Cc", "Zl", "Zp", "So"]))
# Longer ones are written as they were read, which JavaScript can't do.
NUMBERS = st.integers(-(2**53), 2**53)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=12,
)


@settings(max_examples=400)
@given(value=VALUES)
def test_a_value_is_written_as_javascript_writes_it(node: Node, value: object) -> None:
    assert stringify(value) == node.writes(json.dumps(value))[0]


@settings(max_examples=200)
@given(value=NUMBERS | st.booleans())
def test_a_plain_value_becomes_the_text_that_javascript_makes_of_it(
    node: Node, value: float
) -> None:
    assert as_string(value) == node.writes(json.dumps(value))[1]


@given(VALUES)
def test_what_was_written_is_read_and_written_the_same(value: object) -> None:
    written = stringify(value)
    assert stringify(json.loads(written)) == written
    written.encode()
