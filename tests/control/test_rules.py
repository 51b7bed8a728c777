"""What a rule file may say, and where a wrong one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rows import every

from penstock.control.policy import LARGEST, load_rules, parse_rules
from penstock.control.safety import Rule
from penstock.core.errors import Misconfigured
from penstock.core.job import Priority
from penstock.core.verdict import (
    ApprovalTerms,
    Constraints,
    Decision,
    Rate,
    parse_duration,
    parse_rate,
    parse_size,
    say_duration,
    say_size,
)

GOOD = b"""
default = "deny"

[[rules]]
id = "public"
decision = "allow"
topics = ["job.text.*"]
tenants = ["a", "b"]
principals = ["ci-*"]
labels = { source = "web", stage = ["test", "dev*"] }
env_keys = ["AWS_*"]
capabilities = ["repo.*"]
risk_tags = ["pii", "money*"]
priorities = ["batch", "critical"]
min_cost = 1
max_cost = 2.5
reason = "why not"

[[rules]]
id = "ask"
decision = "require_approval"

[rules.approval]
needed = 2
approvers = ["ops-*"]
expires = "4h"
self_approval = true

[[rules]]
id = "slow"
decision = "throttle"
rate = "5/30s"

[[rules]]
id = "small"
decision = "allow_with_constraints"

[rules.constraints]
max_runtime = "10m"
max_retries = 0
max_concurrent = 3
max_memory = "512MiB"
max_output = 1000
network = []
read_only = true
"""


def test_a_rule_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(GOOD)
    rules = load_rules(path)
    assert rules.default is Decision.DENY
    public, ask, slow, small = rules.rules
    assert public == Rule(
        "public",
        Decision.ALLOW,
        topics=("job.text.*",),
        tenants=("a", "b"),
        principals=("ci-*",),
        labels={"source": "web", "stage": ("test", "dev*")},
        env_keys=("AWS_*",),
        capabilities=("repo.*",),
        risk_tags=("pii", "money*"),
        priorities=(Priority.BATCH, Priority.CRITICAL),
        min_cost=1.0,
        max_cost=2.5,
        reason="why not",
    )
    assert ask.approval == ApprovalTerms(2, ("ops-*",), 14_400.0, True)
    assert slow.rate == Rate(5, 30.0)
    assert small.constraints == Constraints(600.0, 0, 3, 512 << 20, 1000, (), True)


def test_the_snapshot_names_the_text() -> None:
    one, same = parse_rules(GOOD, "x"), parse_rules(GOOD, "y")
    other = parse_rules(GOOD + b"\n# changed", "x")
    assert one.snapshot == same.snapshot != other.snapshot


def refusal(text: str) -> str:
    with pytest.raises(Misconfigured) as refused:
        parse_rules(text.encode(), "my.toml")
    return str(refused.value)


HEAD = 'default = "allow"\n\n[[rules]]\nid = "a"\ndecision = "deny"\n'


@every(
    "text, said",
    [
        ("", "default: missing"),
        ('default = "deny"\nx = \n', "not valid TOML: Invalid value (at line 2, column 5)"),
        ('default = "deny"\nx = """', "not valid TOML"),
        ('# top\ndefault = "maybe"', "default: must be 'allow' or 'deny', not 'maybe'"),
        ("default = 1", "default: must be 'allow' or 'deny', not 1"),
        ('default = "throttle"', "default: must be 'allow' or 'deny', not 'throttle'"),
        ('default = "deny"\nextra = 1', "extra: unknown key (known are default, rules)"),
        ('default = "deny"\nrule = 1', "did you mean rules?"),
        ('default = "deny"\nrules = 5', "rules: must be a list"),
        ('default = "deny"\nrules = [\n  5\n]', "rule 1 (no id): must be a table"),
        ('default = "deny"\n[[rules]]\n[[rules]]\n', "rule 1 (no id): missing required key id"),
        (HEAD + '[[rules]]\nid = "b"', "rule 2 (b): missing required key decision"),
    ],
)
def test_a_wrong_file_is_refused_naming_the_key(text: str, said: str) -> None:
    assert said in refusal(text)


def test_a_refusal_begins_with_the_file() -> None:
    assert refusal("").startswith("rules my.toml: ")
    assert refusal("?").startswith("rules my.toml: ")


@every(
    "text, said",
    [
        ('topic = ["job.x"]', "my.toml: rule 1 (a): topic: unknown key"),
        ('topic = ["job.x"]', "did you mean topics?"),
        ("colour = 1", "known are approval, "),
        ('topics = "job.x"', "my.toml: rule 1 (a): topics: expected array, got string"),
        ("topics = []", "topics: empty: leave it out"),
        (
            'topics = [\n"job.x",\n7]',
            "my.toml: rule 1 (a): topics[1]: expected string, got integer",
        ),
        ('topics = ["job.[ab"]', "topics[0]: 'job.[ab' has a '[' that is not closed"),
        ('topics = ["job.[]"]', "not closed"),
        ('tenants = [""]', "tenants[0]: '' is not a valid glob"),
        ('tenants = ["a\\u0000b"]', "tenants[0]: has a control character"),
        ("labels = 1", "labels: expected table, got integer"),
        ("labels = {}", "labels: empty"),
        (
            "labels = { k = 1 }",
            "my.toml: rule 1 (a): labels.k: expected string or array, got integer",
        ),
        (
            'labels.k = "v"\nlabels.l = [1]',
            "my.toml: rule 1 (a): labels.l[0]: expected string, got integer",
        ),
        ("[rules.labels]\nk = []", "my.toml: rule 1 (a): labels.k: empty"),
        ("env_keys = []", "env_keys: empty"),
        ('priorities = ["urgent"]', "priorities[0]: invalid enum value 'urgent'"),
        ('priorities = ["bathc"]', "did you mean batch?"),
        ("min_cost = -1", "my.toml: rule 1 (a): min_cost: -1 is out of range"),
        ("min_cost = nan", "min_cost: nan is not a number"),
        ('min_cost = "1"', "min_cost: expected number, got string"),
        ("max_cost = true", "max_cost: expected number, got boolean"),
        ("min_cost = 2\nmax_cost = 1", "my.toml: rule 1 (a): max_cost: less than min_cost"),
        ("reason = 1979-05-27", "reason: expected string, got date"),
        (
            'rate = "10/m"',
            "my.toml: rule 1 (a): decision: rate is only allowed with decision 'throttle'",
        ),
        ("approval = {}", "decision: approval is only allowed with decision 'require_approval'"),
        (
            "constraints = { max_retries = 1 }",
            "only allowed with decision 'allow_with_constraints'",
        ),
        (
            '[[rules]]\nid = "a"\ndecision = "deny"',
            "my.toml: rule 2 (a): id: also the id of rule 1",
        ),
        ('[[rules]]\nid = "a b"\ndecision = "deny"', "my.toml: rule 2 (a b): id: 'a b' is not"),
        (
            '[[rules]]\nid = "default"\ndecision = "deny"',
            "my.toml: rule 2 (default): id: 'default'",
        ),
        (
            '[[rules]]\nid = "b"\ndecision = "denny"',
            "my.toml: rule 2 (b): decision: invalid enum value 'denny'",
        ),
    ],
)
def test_a_wrong_rule_is_refused_naming_rule_and_key(text: str, said: str) -> None:
    assert said in refusal(HEAD + text)


@every(
    "decision, text, said",
    [
        ("throttle", "", "my.toml: rule 1 (a): decision: decision 'throttle' requires rate"),
        ("throttle", 'rate = "0/m"', "my.toml: rule 1 (a): rate: '0/m' lets nothing through"),
        ("throttle", 'rate = "5/0s"', "rate: '5/0s' lets nothing through"),
        ("throttle", 'rate = "10"', "rate: '10' is not a rate; write 10/s"),
        ("throttle", 'rate = "10/y"', "rate: '10/y' is not a rate"),
        ("throttle", 'rate = "-1/m"', "rate: '-1/m' is not a rate"),
        ("throttle", "rate = 10", "rate: expected string"),
        ("throttle", 'rate = "1/900d"', "rate.per: 7.776e+07 is out of range"),
        ("allow_with_constraints", "", "decision 'allow_with_constraints' requires"),
        ("allow_with_constraints", "constraints = {}", "constraints: sets no limit"),
        ("allow_with_constraints", "constraints = { read_only = false }", "sets no limit"),
        (
            "allow_with_constraints",
            'constraints = { max_retries = 1, max_runtime = "10x" }',
            "my.toml: rule 1 (a): constraints.max_runtime: '10x' is not a duration",
        ),
        (
            "allow_with_constraints",
            "[rules.constraints]\nmax_retries = -1",
            "my.toml: rule 1 (a): constraints.max_retries: -1 is out of range",
        ),
        ("allow_with_constraints", "constraints = { max_runtime = 0 }", "max_runtime: 0 is out"),
        ("allow_with_constraints", "constraints = { max_concurrent = 0 }", "max_concurrent: 0 is"),
        (
            "allow_with_constraints",
            "constraints = { max_retries = 1.5 }",
            "expected integer, got number",
        ),
        ("allow_with_constraints", 'constraints = { max_memory = "5 bananas" }', "not a size"),
        ("allow_with_constraints", 'constraints = { max_output = "0b" }', "max_output: 0 is out"),
        (
            "allow_with_constraints",
            'constraints = { network = "x" }',
            "network: expected array, got string",
        ),
        ("allow_with_constraints", 'constraints = { network = ["a b"] }', "network[0]: 'a b' is"),
        (
            "allow_with_constraints",
            "constraints = { read_only = 1 }",
            "expected boolean, got integer",
        ),
        ("allow_with_constraints", "constraints = { max_memry = 1 }", "did you mean max_memory?"),
        ("require_approval", "approval = 1", "approval: expected table, got integer"),
        ("require_approval", "approval = { needed = 0 }", "approval.needed: 0 is out of range"),
        ("require_approval", "approval = { approvers = [] }", "approval.approvers: empty"),
        ("require_approval", 'approval = { expires = "1y" }', "approval.expires: '1y' is not"),
        (
            "require_approval",
            '[rules.approval]\napprovers = ["ada", "ada"]\nneeded = 2',
            "my.toml: rule 1 (a): approval.needed: 2 needed, but approvers lists 1",
        ),
    ],
)
def test_a_wrong_effect_is_refused_naming_rule_and_key(decision: str, text: str, said: str) -> None:
    assert said in refusal(HEAD.replace("deny", decision) + text)


def test_an_approval_may_be_asked_for_without_saying_how() -> None:
    text = HEAD.replace("deny", "require_approval") + "approval = {}"
    assert parse_rules(text.encode(), "x").rules[0].approval == ApprovalTerms()


def test_a_file_that_is_no_text_is_refused_naming_the_line() -> None:
    with pytest.raises(Misconfigured, match="line 2 is not UTF-8"):
        parse_rules(b'default = "deny"\n# \xff', "my.toml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"nowhere\.toml"):
        load_rules(tmp_path / "nowhere.toml")
    with pytest.raises(Misconfigured):
        load_rules(tmp_path)


def test_a_file_that_is_far_too_large_or_deep_is_refused() -> None:
    with pytest.raises(Misconfigured, match="larger than"):
        parse_rules(b"#" * (LARGEST + 1), "my.toml")
    with pytest.raises(Misconfigured, match="nested too deeply"):
        parse_rules(b"x = " + b"[" * 100_000, "my.toml")


# -- quantities -----------------------------------------------------------------------------


def test_durations_sizes_and_rates_are_read_as_people_write_them() -> None:
    assert [parse_duration(t) for t in ("500ms", "1.5h", " 2 d ")] == [0.5, 5400.0, 172_800.0]
    assert [parse_size(t) for t in ("1KiB", "2 MB", "0.5gib")] == [1024, 2_000_000, 1 << 29]
    assert [parse_rate(t) for t in ("10/m", "5 / 30s")] == [Rate(10, 60.0), Rate(5, 30.0)]
    assert [str(parse_rate(t)) for t in ("10/s", "1/2h")] == ["10/s", "1/7200s"]


@pytest.mark.parametrize("text", ["30s", "90s", "10m", "4h", "7d", "0.25s", "0s"])
def test_a_duration_is_said_as_it_is_written(text: str) -> None:
    assert say_duration(parse_duration(text)) == text


@pytest.mark.parametrize("text", ["1000B", "64KiB", "512MiB", "3GiB", "1TiB"])
def test_a_size_is_said_as_it_is_written(text: str) -> None:
    assert say_size(parse_size(text)) == text
