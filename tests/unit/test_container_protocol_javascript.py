"""How values are written: as JavaScript does (pairs that node 20 answered), numbers as given."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.rows import every

from penstock.workloads.container.protocol.body import read_body, read_input
from penstock.workloads.container.protocol.javascript import Literal, as_string, stringify

PAIRS = [
    ('{"a": 1, "b" : [ 1 , 2 ] }', '{"a":1,"b":[1,2]}'),
    ("100", "100"),
    ("9007199254740991", "9007199254740991"),
    ("0.30000000000000004", "0.30000000000000004"),
    ("4.35", "4.35"),
    ('{"b":1,"a":2,"2":3,"10":4,"1":5}', '{"1":5,"2":3,"10":4,"b":1,"a":2}'),
    ('{"01":1,"1":2,"-1":3,"1.5":4,"0":5}', '{"0":5,"1":2,"01":1,"-1":3,"1.5":4}'),
    (
        '{"x":1,"4294967294":2,"4294967295":3,"4294967293":4}',
        '{"4294967293":4,"4294967294":2,"x":1,"4294967295":3}',
    ),
    (
        '{"__proto__":1,"constructor":{"prototype":2}}',
        '{"__proto__":1,"constructor":{"prototype":2}}',
    ),
    ('{"a":{"__proto__":{"x":1}}}', '{"a":{"__proto__":{"x":1}}}'),
    ('{"toJSON":1}', '{"toJSON":1}'),
    ('{"":0}', '{"":0}'),
    ('"\\u0000\\u001f\\b\\t\\n\\f\\r\\"\\\\\\/"', '"\\u0000\\u001f\\b\\t\\n\\f\\r\\"\\\\/"'),
    ('"\\u007f\\u0080\\u2028\\u2029"', '"\x7f\x80\u2028\u2029"'),
    ('"\\ud800"', '"\\ud800"'),
    ('"\\udc00\\ud800x"', '"\\udc00\\ud800x"'),
    ('"\\ud83d\\ude00"', '"\U0001f600"'),
    ('"\U0001f600\xe9"', '"\U0001f600\xe9"'),
    ("[]", "[]"),
    ("{}", "{}"),
    ("[[],{},null,true,false]", "[[],{},null,true,false]"),
    ('"</script>"', '"</script>"'),
]
"""What JSON.stringify(JSON.parse(first)) is."""


@every("given, written", PAIRS)
def test_a_value_is_written_as_javascript_would(given: str, written: str) -> None:
    assert stringify(json.loads(given)) == written


def test_two_halves_side_by_side_are_one_character() -> None:
    assert stringify("\ud83d\ude00") == '"\U0001f600"'


NUMBERS = [
    *("0", "-0", "1", "1.0", "-0.0", "1e0", "1E+2", "1e20", "1e-7", "5e-324", "0.10"),
    *("1e400", "-1e400", "9007199254740993", "1790847362514948097", "-12345678901234567890"),
    *("3.14159265358979323846264338327950288", "9" * 5000),
]


@every("number", NUMBERS)
@every("read", [read_body, read_input])
def test_a_number_is_written_as_it_was_read(number: str, read: Callable[[bytes], Any]) -> None:
    assert stringify(read(f'{{"a":[{number}]}}'.encode())) == f'{{"a":[{number}]}}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (True, "true"),
        (False, "false"),
        (1790847362514948097, "1790847362514948097"),
        (Literal("1.0"), "1.0"),
        (0.5, "0.5"),
    ],
)
def test_a_plain_value_becomes_text(value: float, text: str) -> None:
    assert as_string(value) == text


@pytest.mark.parametrize(
    "value", [b"x", {1: 2}, {"a": object()}, (1,), {1, 2}, float("nan"), float("inf")]
)
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        stringify(value)
