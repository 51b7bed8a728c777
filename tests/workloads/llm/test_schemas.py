"""Which keywords of a JSON schema an answer is held to, and by what."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.workloads.llm.schemas import guided_grammar, hold_of


def holding(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


PLAIN = {
    "text": holding(type="string", maxLength=3),
    "integers": holding(type="integer", minimum=1, maximum=5),
    "anchored": holding(type="string", pattern="^[a-z]{2}$"),
    "dates": holding(type="string", format="date"),
}
GUIDED = {
    "numbers": holding(type="number", minimum=0.5, exclusiveMaximum=2),
    "multiples": holding(type="integer", multipleOf=7),
    "classes": holding(type="string", pattern=r"^\d{3}$"),
    "not-anchored": holding(type="string", pattern="abc"),
    "properties": holding(type="object", minProperties=1, patternProperties={"^x": {}}),
    "within": {"$defs": {"x": {"minimum": 1}}, **holding(**{"$ref": "#/$defs/x"})},
    **{
        format: holding(type="string", format=format)
        for format in ("duration", "email", "hostname", "ipv4", "ipv6", "uri")
    },
}


@pytest.mark.parametrize("case", PLAIN)
def test_llama_cpp_holds_answers_to_the_usual_schemas_itself(case: str) -> None:
    hold = hold_of(PLAIN[case])

    assert (hold.guided, hold.loose) == (False, ())


@pytest.mark.parametrize("case", GUIDED)
def test_llguidance_holds_what_its_grammars_can_not(case: str) -> None:
    hold = hold_of(GUIDED[case])

    assert (hold.guided, hold.loose) == (True, ())
    assert LLMatcher.validate_grammar_with_warnings(guided_grammar(GUIDED[case])) == (False, [])


@pytest.mark.parametrize(
    "keyword",
    ["not", "if", "then", "contains", "propertyNames", "dependentSchemas", "unevaluatedItems"],
)
def test_what_neither_holds_is_named_and_the_rest_is_held(keyword: str) -> None:
    schema = {"properties": {"a": {keyword: {}}, "b": {"multipleOf": 3}}}
    hold = hold_of(schema)

    assert (hold.guided, hold.loose) == (True, (f"a.{keyword}",))
    failed, warned = LLMatcher.validate_grammar_with_warnings(guided_grammar(schema))
    assert not failed
    assert keyword in warned[0]


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)b", r"\bfoo\b"])
def test_a_pattern_that_llguidance_can_not_read_leaves_llama_cpps_own_grammar(pattern: str) -> None:
    schema = {"properties": {"a": {"pattern": pattern}, "b": {"multipleOf": 3}}}
    hold = hold_of(schema)

    assert (hold.guided, hold.loose) == (False, ("a.pattern", "b.multipleOf"))


def test_only_some_of_many_places_are_named() -> None:
    hold = hold_of({"properties": {str(n): {"uniqueItems": True} for n in range(20)}})

    assert len(hold.loose) == 9
    assert hold.loose[-1] == "..."
