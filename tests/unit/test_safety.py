"""The safety kernel's answers, and what a rule file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.control.rules import load_rules, parse_rules
from penstock.control.safety import Rule, RuleSet, SafetyKernel
from penstock.core.errors import Misconfigured
from penstock.core.verdict import Decision
from penstock.testing.samples import a_request

ALLOW, DENY = Decision.ALLOW, Decision.DENY


def test_without_rules_everything_is_allowed() -> None:
    verdict = SafetyKernel().decide(a_request())
    assert verdict.allows
    assert (verdict.rule_id, verdict.snapshot) == ("default", "built-in")


def test_the_first_rule_that_matches_speaks() -> None:
    rules = (
        Rule("one", DENY, topics=("job.bad*",), reason="bad"),
        Rule("two", ALLOW, topics=("job.*",)),
        Rule("three", DENY),
    )
    kernel = SafetyKernel(RuleSet(DENY, rules, "v1"))
    denied = kernel.decide(a_request(topic="job.bad.one"))
    assert (denied.allows, denied.rule_id, denied.reason) == (False, "one", "bad")
    assert denied.snapshot == "v1"
    assert kernel.decide(a_request(topic="job.good")).rule_id == "two"


def test_where_no_rule_matches_the_default_speaks() -> None:
    rules = (Rule("one", ALLOW, tenants=("a*",)),)
    assert SafetyKernel(RuleSet(DENY, rules)).decide(a_request(tenant="a1")).allows
    verdict = SafetyKernel(RuleSet(DENY, rules)).decide(a_request(tenant="b"))
    assert (verdict.allows, verdict.rule_id) == (False, "default")


@pytest.mark.parametrize(
    ("conditions", "fields", "matches"),
    [
        ({}, {}, True),
        ({"topics": ("job.test",)}, {}, True),
        ({"topics": ("job.a", "job.t?st")}, {}, True),
        ({"topics": ("JOB.TEST",)}, {}, False),
        ({"tenants": ("default",)}, {}, True),
        ({"tenants": ("guest*",)}, {"tenant": "guest-7"}, True),
        ({"tenants": ("guest*",)}, {}, False),
        ({"labels": {"k": "v*"}}, {"labels": {"k": "v1", "x": "y"}}, True),
        ({"labels": {"k": "v*"}}, {"labels": {"k": "w"}}, False),
        ({"labels": {"k": "*"}}, {}, False),
        ({"topics": ("job.test",), "tenants": ("other",)}, {}, False),
    ],
)
def test_a_rule_matches_when_every_condition_does(
    conditions: dict[str, Any], fields: dict[str, Any], matches: bool
) -> None:
    assert Rule("r", ALLOW, **conditions).matches(a_request(**fields)) is matches


GOOD = b"""
default = "deny"

[[rules]]
id = "public"
decision = "allow"
topics = ["job.text.*"]
tenants = ["a", "b"]
labels = { source = "web" }
reason = "why not"
"""


def test_a_rule_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(GOOD)
    rules = load_rules(path)
    (rule,) = rules.rules
    assert rules.default is DENY
    assert (rule.id, rule.decision, rule.reason) == ("public", ALLOW, "why not")
    assert (rule.topics, rule.tenants, rule.labels) == (
        ("job.text.*",),
        ("a", "b"),
        {"source": "web"},
    )


def test_the_snapshot_names_the_text() -> None:
    one, same = parse_rules(GOOD, "x"), parse_rules(GOOD, "y")
    other = parse_rules(GOOD + b"\n# changed", "x")
    assert one.snapshot == same.snapshot != other.snapshot


RULE = 'default = "allow"\n[[rules]]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "default"),
        ("default = ", "Invalid value"),
        ('default = "maybe"', "maybe"),
        ('default = "allow"\nextra = 1', "extra"),
        ('default = "allow"\nrules = 5', "array"),
        (RULE + 'decision = "deny"', "rule 1 (without an id)"),
        (RULE + 'id = "a"', "rule 1 (a)"),
        (RULE + 'id = "a"\ndecision = "perhaps"', "perhaps"),
        (RULE + 'id = "a"\ndecision = "deny"\ntopic = "job.x"', "topic"),
        (RULE + 'id = "a"\ndecision = "deny"\ntopics = "job.x"', "array"),
        (RULE + 'id = "a"\ndecision = "deny"\nlabels = { k = 1 }', "str"),
        (RULE + 'id = "a"\ndecision = "deny"\n[[rules]]\nid = "a"\ndecision = "deny"', "rule 2"),
    ],
)
def test_a_wrong_rule_file_is_refused_naming_the_place(text: str, said: str) -> None:
    with pytest.raises(Misconfigured) as refusal:
        parse_rules(text.encode(), "rules.toml")
    assert said in str(refusal.value)
    assert "rules.toml" in str(refusal.value)


def test_a_rule_file_that_is_no_text_is_refused() -> None:
    with pytest.raises(Misconfigured):
        parse_rules(b'default = "\xff"', "rules.toml")


def test_a_missing_rule_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"nowhere\.toml"):
        load_rules(tmp_path / "nowhere.toml")
    with pytest.raises(Misconfigured):
        load_rules(tmp_path)
