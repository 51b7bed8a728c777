"""The safety kernel: which rule speaks, what it says, and what it tells of its reasons."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.rows import every

from penstock.control.safety import ALLOW_ALL, Rule, RuleSet, SafetyKernel
from penstock.core.job import JobRequest, Priority
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate
from penstock.testing.samples import a_request

ALLOW, DENY = Decision.ALLOW, Decision.DENY
ASK, THROTTLE = Decision.REQUIRE_APPROVAL, Decision.THROTTLE
CONSTRAIN = Decision.ALLOW_WITH_CONSTRAINTS


def kernel_of(*rules: Rule, default: Decision = DENY) -> SafetyKernel:
    return SafetyKernel(RuleSet(default, rules, "v1"))


def matches(conditions: dict[str, Any], request: JobRequest) -> bool:
    return kernel_of(Rule("r", ALLOW, **conditions)).decide(request).rule_id == "r"


# -- which rule speaks ----------------------------------------------------------------------


def test_without_rules_everything_is_allowed() -> None:
    kernel = SafetyKernel()
    verdict = kernel.decide(a_request())
    assert verdict.allows
    assert (verdict.rule_id, verdict.snapshot) == ("default", "built-in")
    assert kernel.built_in


def test_rules_that_allow_everything_are_still_somebodys_rules() -> None:
    assert not kernel_of(default=ALLOW).built_in


def test_the_first_rule_that_matches_speaks() -> None:
    kernel = kernel_of(
        Rule("one", DENY, topics=("job.bad*",), reason="bad"),
        Rule("two", ALLOW, topics=("job.*",)),
        Rule("three", DENY),
    )
    denied = kernel.decide(a_request(topic="job.bad.one"))
    assert (denied.allows, denied.rule_id, denied.reason) == (False, "one", "bad")
    assert denied.snapshot == "v1"
    assert kernel.decide(a_request(topic="job.good")).rule_id == "two"


def test_where_no_rule_matches_the_default_speaks() -> None:
    kernel = kernel_of(Rule("one", ALLOW, tenants=("a*",)))
    assert kernel.decide(a_request(tenant="a1")).allows
    verdict = kernel.decide(a_request(tenant="b"))
    assert (verdict.allows, verdict.rule_id) == (False, "default")


@every(
    "conditions, fields, matched",
    [
        ({}, {}, True),
        ({"topics": ("job.test",)}, {}, True),
        ({"topics": ("job.a", "job.t?st")}, {}, True),
        ({"topics": ("job.a", "job.b.*")}, {"topic": "job.a"}, True),
        ({"topics": ("job.a", "job.b.*")}, {"topic": "job.b.c.d"}, True),
        ({"topics": ("job.a", "job.b.*")}, {"topic": "job.ax"}, False),
        ({"topics": ("job.[ab]",)}, {"topic": "job.b"}, True),
        ({"topics": ("job.[!ab]",)}, {"topic": "job.b"}, False),
        ({"topics": ("JOB.TEST",)}, {}, False),
        ({"tenants": ("default",)}, {}, True),
        ({"tenants": ("guest*",)}, {"tenant": "guest-7"}, True),
        ({"tenants": ("guest*",)}, {}, False),
        ({"principals": ("ci-*",)}, {"principal": "ci-7"}, True),
        ({"principals": ("ci-*",)}, {"principal": "ada"}, False),
        ({"principals": ("*",)}, {}, False),
        ({"labels": {"k": "v*"}}, {"labels": {"k": "v1", "x": "y"}}, True),
        ({"labels": {"k": ("w", "v*")}}, {"labels": {"k": "v1"}}, True),
        ({"labels": {"k": "v*"}}, {"labels": {"k": "w"}}, False),
        ({"labels": {"k": "*"}}, {"labels": {"k": ""}}, True),
        ({"labels": {"k": "*"}}, {}, False),
        ({"labels": {"k": "*", "l": "*"}}, {"labels": {"k": "1"}}, False),
        ({"env_keys": ("AWS_*",)}, {"env": {"AWS_SECRET": "s"}}, True),
        ({"env_keys": ("AWS_*", "HOME")}, {"env": {"AWS_SECRET": "s"}}, False),
        ({"env_keys": ("s",)}, {"env": {"AWS_SECRET": "s"}}, False),
        ({"env_keys": ("*",)}, {}, False),
        ({"capabilities": ("repo.*",)}, {"capability": "repo.write"}, True),
        ({"capabilities": ("repo.*",)}, {"capability": "mail"}, False),
        ({"capabilities": ("*",)}, {}, False),
        ({"risk_tags": ("money", "pii*")}, {"risk_tags": ("safe", "pii.eu")}, True),
        ({"risk_tags": ("money",)}, {"risk_tags": ("safe",)}, False),
        ({"risk_tags": ("*",)}, {}, False),
        ({"priorities": (Priority.CRITICAL,)}, {"priority": Priority.CRITICAL}, True),
        ({"priorities": (Priority.CRITICAL,)}, {}, False),
        ({"min_cost": 5.0}, {"estimated_cost": 5.0}, True),
        ({"min_cost": 5.0}, {"estimated_cost": 4.9}, False),
        ({"max_cost": 5.0}, {"estimated_cost": 5.0}, True),
        ({"max_cost": 5.0}, {"estimated_cost": 5.1}, False),
        ({"max_cost": 0.0}, {"estimated_cost": 0.0}, True),
        ({"topics": ("job.test",), "tenants": ("other",)}, {}, False),
    ],
)
def test_a_rule_matches_when_every_condition_does(
    conditions: dict[str, Any], fields: dict[str, Any], matched: bool
) -> None:
    assert matches(conditions, a_request(**fields)) is matched


def test_who_leaves_out_the_cost_is_not_let_in_as_cheap_and_is_asked_as_dear() -> None:
    kernel = kernel_of(
        Rule("cheap", ALLOW, max_cost=10.0),
        Rule("dear", ASK, min_cost=10.0),
    )
    assert kernel.decide(a_request()).rule_id == "dear"
    assert not matches({"min_cost": 1.0, "max_cost": 10.0}, a_request())


def test_a_topic_that_was_judged_is_judged_again_by_the_rest_of_the_job() -> None:
    kernel = kernel_of(
        Rule("guests", DENY, topics=("job.*",), tenants=("guest",)),
        Rule("all", ALLOW, topics=("job.test",)),
    )
    said = [kernel.decide(a_request(tenant=name)).rule_id for name in ("a", "guest", "a")]
    assert said == ["all", "guests", "all"]


def test_topics_beyond_those_known_by_heart_are_judged_the_same() -> None:
    kernel = kernel_of(Rule("even", ALLOW, topics=("job.*[02468]",)))
    requests = [a_request(topic=f"job.t{n}") for n in range(2500)]
    for _ in range(2):
        assert [kernel.decide(r).allows for r in requests] == [n % 2 == 0 for n in range(2500)]


# -- what it says ---------------------------------------------------------------------------


def test_a_verdict_carries_what_its_rule_demands() -> None:
    terms = ApprovalTerms(needed=2, approvers=("ops-*",))
    kernel = kernel_of(
        Rule("ask", ASK, topics=("job.ask",), approval=terms),
        Rule("slow", THROTTLE, topics=("job.slow",), rate=Rate(10, 60.0)),
        Rule("small", CONSTRAIN, topics=("job.small",), constraints=Constraints(max_retries=0)),
    )
    asked = kernel.decide(a_request(topic="job.ask"))
    assert (asked.allows, asked.approval) == (False, terms)
    slowed = kernel.decide(a_request(topic="job.slow"))
    assert (slowed.allows, slowed.rate) == (True, Rate(10, 60.0))
    bounded = kernel.decide(a_request(topic="job.small"))
    assert (bounded.allows, bounded.constraints) == (True, Constraints(max_retries=0))


def test_an_approval_without_terms_has_the_usual_ones() -> None:
    assert kernel_of(Rule("ask", ASK)).decide(a_request()).approval == ApprovalTerms()


@pytest.mark.parametrize(
    "rule",
    [
        Rule("r", THROTTLE),
        Rule("r", CONSTRAIN),
        Rule("r", DENY, rate=Rate(1, 1.0)),
        Rule("r", ALLOW, approval=ApprovalTerms()),
        Rule("r", THROTTLE, rate=Rate(1, 1.0), constraints=Constraints()),
    ],
)
def test_rules_whose_effect_is_not_their_decisions_are_not_taken(rule: Rule) -> None:
    kernel = kernel_of(Rule("former", ALLOW))
    with pytest.raises(ValueError, match="rule r"):
        kernel.use(RuleSet(ALLOW, (rule,)))
    assert kernel.decide(a_request()).rule_id == "former"


def test_other_rules_hold_from_the_next_question_on() -> None:
    kernel = kernel_of(Rule("old", ALLOW, topics=("job.*",)))
    assert kernel.decide(a_request()).rule_id == "old"
    kernel.use(RuleSet(DENY, (Rule("new", DENY, topics=("job.*",)),), "v2"))
    verdict = kernel.decide(a_request())
    assert (verdict.rule_id, verdict.snapshot) == ("new", "v2")
    kernel.use(ALLOW_ALL)
    assert kernel.decide(a_request()).snapshot == "built-in"


# -- its reasons ----------------------------------------------------------------------------


def test_a_trace_tells_of_every_rule_up_to_the_one_that_spoke() -> None:
    kernel = kernel_of(
        Rule("one", DENY, topics=("job.x",), tenants=("default",)),
        Rule("two", ALLOW),
        Rule("three", DENY),
    )
    verdict, (one, two) = kernel.trace(a_request())
    assert verdict == kernel.decide(a_request())
    assert (one.rule_id, one.matched) == ("one", False)
    told = [(c.field, c.wanted, c.found, c.matched) for c in one.conditions]
    assert told == [
        ("topics", "job.x", "job.test", False),
        ("tenants", "default", "default", True),
    ]
    assert (two.rule_id, two.matched, two.conditions) == ("two", True, ())


def test_a_trace_that_ends_with_the_default_shows_every_rule_in_vain() -> None:
    verdict, tried = kernel_of(Rule("one", ALLOW, tenants=("x",))).trace(a_request())
    assert (verdict.rule_id, [rule.matched for rule in tried]) == ("default", [False])


@pytest.mark.parametrize(
    ("conditions", "fields", "said"),
    [
        ({"principals": ("a", "b*")}, {}, ("principals", "a, b*", "nothing")),
        ({"labels": {"k": ("v", "w")}}, {}, ("labels.k", "v, w", "nothing")),
        ({"labels": {"k": "v"}}, {"labels": {"k": ""}}, ("labels.k", "v", '""')),
        ({"env_keys": ("X",)}, {"env": {"B": "1", "A": "2"}}, ("env_keys", "X", "A, B")),
        ({"risk_tags": ("x",)}, {"risk_tags": ("a", "b")}, ("risk_tags", "x", "a, b")),
        ({"priorities": (Priority.CRITICAL,)}, {}, ("priorities", "critical", "batch")),
        ({"min_cost": 5.0}, {"estimated_cost": 2.5}, ("min_cost", "5 or more", "2.5")),
        ({"max_cost": 5.0}, {"estimated_cost": 7.0}, ("max_cost", "5 or less", "7")),
        (
            {"max_cost": 5.0},
            {},
            ("max_cost", "5 or less", "no estimate, which counts as the highest"),
        ),
    ],
)
def test_a_condition_in_vain_tells_what_it_wanted_and_found(
    conditions: dict[str, Any], fields: dict[str, Any], said: tuple[str, str, str]
) -> None:
    _, (rule,) = kernel_of(Rule("r", DENY, **conditions)).trace(a_request(**fields))
    (condition,) = rule.conditions
    assert (condition.field, condition.wanted, condition.found) == said
    assert not condition.matched


def test_a_trace_never_shows_a_value_of_the_environment() -> None:
    kernel = kernel_of(Rule("r", DENY, env_keys=("AWS_*", "NONE")))
    _, tried = kernel.trace(a_request(env={"AWS_SECRET": "hush-hush"}))
    assert "AWS_SECRET" in str(tried)
    assert "hush" not in str(tried)


def test_a_trace_of_a_long_value_is_cut_short() -> None:
    kernel = kernel_of(Rule("r", DENY, labels={"k": "x"}))
    _, (rule,) = kernel.trace(a_request(labels={"k": "y" * 4000}))
    assert len(rule.conditions[0].found) == 200
