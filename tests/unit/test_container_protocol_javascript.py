"""How JavaScript writes values: pairs that a real engine (node 20) answered."""

from __future__ import annotations

import json

import pytest

from penstock.workloads.container.protocol.javascript import as_string, stringify

PAIRS = [
    ('{"a": 1.0, "b" : [ 1 , 2 ] }', '{"a":1,"b":[1,2]}'),
    ("1.0", "1"),
    ("1e21", "1e+21"),
    ("1e20", "100000000000000000000"),
    ("123456789012345680000", "123456789012345680000"),
    ("1e-7", "1e-7"),
    ("1e-6", "0.000001"),
    ("0.000001", "0.000001"),
    ("1.5e-9", "1.5e-9"),
    ("-0", "0"),
    ("-0.0", "0"),
    ("0.1", "0.1"),
    ("1e400", "null"),
    ("-1e400", "null"),
    ("[1e400]", "[null]"),
    ("9007199254740991", "9007199254740991"),
    ("9007199254740993", "9007199254740992"),
    ("12345678901234567890", "12345678901234567000"),
    ("1e0", "1"),
    ("100", "100"),
    ("5e-324", "5e-324"),
    ("1.7976931348623157e308", "1.7976931348623157e+308"),
    ("0.30000000000000004", "0.30000000000000004"),
    ("4.35", "4.35"),
    ("-1.5e+300", "-1.5e+300"),
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


@pytest.mark.parametrize(("given", "written"), PAIRS)
def test_a_value_is_written_as_javascript_would(given: str, written: str) -> None:
    assert stringify(json.loads(given)) == written


def test_two_halves_side_by_side_are_one_character() -> None:
    assert stringify("\ud83d\ude00") == '"\U0001f600"'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "x"),
        (True, "true"),
        (False, "false"),
        (1.0, "1"),
        (-0.0, "0"),
        (1e21, "1e+21"),
        (10**400, "Infinity"),
        (-(10**400), "-Infinity"),
        (float("nan"), "NaN"),
        (0.5, "0.5"),
    ],
)
def test_a_plain_value_becomes_text_as_javascript_makes_it(value: float, text: str) -> None:
    assert as_string(value) == text


def test_an_integer_too_large_for_a_double_is_null() -> None:
    assert stringify([10**400, -(10**400), float("nan")]) == "[null,null,null]"


@pytest.mark.parametrize("value", [b"x", {1: 2}, {"a": object()}, (1,), {1, 2}])
def test_what_is_not_json_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not JSON"):
        stringify(value)
