"""What holds for all rules and all requests."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from penstock.control.policy import parse_rules
from penstock.control.safety import Rule, RuleSet, SafetyKernel
from penstock.core.errors import Misconfigured
from penstock.core.job import JobRequest, Priority
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate

WORDS = st.text("ab.", min_size=1, max_size=3)
GLOBS = st.one_of(
    WORDS,
    st.text("ab.*?", min_size=1, max_size=4),
    st.sampled_from(["*", "[ab]", "[!a]*", "a[a-b]", "*b*", "job.*"]),
)
COSTS = st.sampled_from([0.0, 1.0, 2.0, 3.0])


def some(values: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, min_size=least, max_size=2).map(tuple)


EFFECTS: dict[Decision, dict[str, Any]] = {
    Decision.ALLOW: {},
    Decision.DENY: {},
    Decision.REQUIRE_APPROVAL: {"approval": ApprovalTerms(needed=2)},
    Decision.THROTTLE: {"rate": Rate(1, 60.0)},
    Decision.ALLOW_WITH_CONSTRAINTS: {"constraints": Constraints(max_retries=1)},
}
CONDITIONS: dict[str, st.SearchStrategy[Any]] = {
    "topics": some(GLOBS),
    "tenants": some(GLOBS),
    "principals": some(GLOBS),
    "labels": st.dictionaries(WORDS, st.one_of(GLOBS, some(GLOBS, least=1)), max_size=2),
    "env_keys": some(GLOBS),
    "capabilities": some(GLOBS),
    "risk_tags": some(GLOBS),
    "priorities": some(st.sampled_from(Priority)),
    "min_cost": st.none() | COSTS,
    "max_cost": st.none() | COSTS,
}


@st.composite
def rule_sets(draw: st.DrawFn) -> RuleSet:
    rules = []
    for number in range(draw(st.integers(0, 5))):
        decision = draw(st.sampled_from(Decision))
        stated = draw(st.sets(st.sampled_from([*CONDITIONS]), max_size=3))
        conditions = {name: draw(CONDITIONS[name]) for name in sorted(stated)}
        rules.append(Rule(f"r{number}", decision, **conditions, **EFFECTS[decision]))
    return RuleSet(draw(st.sampled_from([Decision.ALLOW, Decision.DENY])), tuple(rules), "s")


REQUESTS = st.builds(
    JobRequest,
    job_id=st.just("j"),
    topic=WORDS.map("job.".__add__) | WORDS,
    tenant=WORDS,
    principal=st.just("") | WORDS,
    labels=st.dictionaries(WORDS, st.just("") | WORDS, max_size=2),
    env=st.dictionaries(WORDS, st.just("value"), max_size=2),
    capability=st.none() | WORDS,
    risk_tags=some(WORDS),
    priority=st.sampled_from(Priority),
    estimated_cost=st.none() | COSTS,
)


def matches(rule: Rule, request: JobRequest) -> bool:
    """What a rule means, written a second time and without haste."""

    def fits(value: str | None, globs: tuple[str, ...]) -> bool:
        return not globs or (bool(value) and any(fnmatchcase(value or "", g) for g in globs))

    cost = float("inf") if request.estimated_cost is None else request.estimated_cost
    wanted = {k: (v,) if isinstance(v, str) else v for k, v in rule.labels.items()}
    return all(
        (
            fits(request.topic, rule.topics),
            fits(request.tenant, rule.tenants),
            fits(request.principal, rule.principals),
            fits(request.capability, rule.capabilities),
            not rule.risk_tags or any(fits(tag, rule.risk_tags) for tag in request.risk_tags),
            all(
                any(k == key and any(fnmatchcase(v, g) for g in globs) for k, v in labels)
                for labels in [request.labels.items()]
                for key, globs in wanted.items()
            ),
            all(any(fnmatchcase(k, glob) for k in request.env) for glob in rule.env_keys),
            not rule.priorities or request.priority in rule.priorities,
            rule.min_cost is None or cost >= rule.min_cost,
            rule.max_cost is None or cost <= rule.max_cost,
        )
    )


@given(rule_sets(), st.lists(REQUESTS, max_size=4))
def test_the_first_rule_that_matches_speaks_and_says_what_it_states(
    rules: RuleSet, requests: list[JobRequest]
) -> None:
    kernel = SafetyKernel(rules)
    for request in requests:
        verdict = kernel.decide(request)
        speaker = next((rule for rule in rules.rules if matches(rule, request)), None)
        assert verdict.rule_id == ("default" if speaker is None else speaker.id)
        assert verdict.decision is (rules.default if speaker is None else speaker.decision)
        for effect in ("approval", "rate", "constraints"):
            assert getattr(verdict, effect) == (speaker and getattr(speaker, effect))


@given(rule_sets(), REQUESTS)
def test_the_trace_says_what_is_decided(rules: RuleSet, request: JobRequest) -> None:
    kernel = SafetyKernel(rules)
    verdict, tried = kernel.trace(request)
    assert verdict == kernel.decide(request)
    assert [rule.rule_id for rule in tried] == [rule.id for rule in rules.rules[: len(tried)]]
    for seen in tried:
        assert seen.matched is all(condition.matched for condition in seen.conditions)
    spoke = [seen.rule_id for seen in tried if seen.matched]
    assert spoke == ([] if verdict.rule_id == "default" else [verdict.rule_id])
    assert spoke == [seen.rule_id for seen in tried[-1:] if seen.matched]


@given(rule_sets(), rule_sets(), st.lists(REQUESTS, max_size=6))
def test_an_answer_depends_on_nothing_but_rules_and_request(
    rules: RuleSet, former: RuleSet, requests: list[JobRequest]
) -> None:
    alone = [SafetyKernel(rules).decide(request) for request in requests]
    used = SafetyKernel(former)
    for request in requests:
        used.decide(request)
    used.use(rules)
    assert [used.decide(request) for request in reversed(requests)] == alone[::-1]
    assert [used.decide(request) for request in requests] == alone


@given(rule_sets(), REQUESTS)
def test_only_what_rules_look_at_counts(rules: RuleSet, request: JobRequest) -> None:
    kernel = SafetyKernel(rules)
    other = replace(
        request,
        job_id="other",
        context_ptr="data:,x",
        timeout=5.0,
        deadline=9.0,
        idempotent=True,
        env=dict.fromkeys(request.env, "another value"),
    )
    assert kernel.trace(other) == kernel.trace(request)


@given(rule_sets(), REQUESTS)
def test_leaving_out_the_cost_is_as_good_as_claiming_the_highest(
    rules: RuleSet, request: JobRequest
) -> None:
    kernel = SafetyKernel(rules)
    silent = replace(request, estimated_cost=None)
    assert kernel.decide(silent) == kernel.decide(replace(request, estimated_cost=1e12))


# -- files ----------------------------------------------------------------------------------


def written(value: Any) -> str:
    match value:
        case Priority() | str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(map(written, value))}]"
        case dict():
            return "{ " + ", ".join(f'"{k}" = {written(v)}' for k, v in value.items()) + " }"
        case _:
            return str(value)


def as_file(rules: RuleSet) -> str:
    lines = [f'default = "{rules.default}"']
    for rule in rules.rules:
        lines.append("[[rules]]")
        for key, value in asdict(rule).items():
            if value not in (None, (), {}, "") and key not in ("approval", "rate", "constraints"):
                lines.append(f"{key} = {written(value)}")
        if rule.approval:
            lines.append("approval = { needed = 2 }")
        if rule.rate:
            lines.append('rate = "1/m"')
        if rule.constraints:
            lines += ["[rules.constraints]", "max_retries = 1"]
    return "\n".join(lines)


def possible(rules: RuleSet) -> bool:
    return all(
        rule.min_cost is None or rule.max_cost is None or rule.min_cost <= rule.max_cost
        for rule in rules.rules
    )


@given(rule_sets().filter(possible), REQUESTS)
def test_a_file_is_read_as_the_rules_that_were_written(rules: RuleSet, request: JobRequest) -> None:
    read = parse_rules(as_file(rules).encode(), "x")
    assert replace(read, snapshot="s") == rules
    assert SafetyKernel(read).decide(request).rule_id == SafetyKernel(rules).decide(request).rule_id


@given(rule_sets().filter(lambda rules: possible(rules) and bool(rules.rules)), st.data())
def test_the_rule_and_name_of_a_wrong_key_are_found(rules: RuleSet, data: st.DataObject) -> None:
    lines = as_file(rules).split("\n")
    heads = [number for number, line in enumerate(lines, 1) if line == "[[rules]]"]
    number = data.draw(st.sampled_from(heads))
    lines.insert(number, "topcis = []")
    with pytest.raises(Misconfigured) as refusal:
        parse_rules("\n".join(lines).encode(), "x")
    place = rf"rules x: rule {heads.index(number) + 1} \(r\d\): topcis: unknown key"
    assert re.match(place, str(refusal.value))
    assert refusal.value.hint == "did you mean topics?"


@given(st.binary(max_size=60) | st.text("[]{}=\"'\\.,#\n ar1", max_size=40).map(str.encode))
def test_whatever_a_file_says_it_is_read_or_refused(text: bytes) -> None:
    for document in (text, b'default = "deny"\n[[rules]]\n' + text):
        said = ""
        try:
            parse_rules(document, "x")
        except Misconfigured as refusal:
            said = str(refusal)
        assert not said or said.startswith("rules x: ")
