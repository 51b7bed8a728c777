"""What a rule file may say, and where a wrong one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.rows import every

from penstock.control.reach import warnings_of
from penstock.control.rule_fields import APPROVAL, CONSTRAINTS, RULE
from penstock.control.rules import LARGEST, load_rules, parse_rules
from penstock.control.safety import Rule, RuleSet
from penstock.control.toml_lines import line_of
from penstock.core.errors import Misconfigured
from penstock.core.job import Priority
from penstock.core.quantity import (
    parse_duration,
    parse_rate,
    parse_size,
    say_duration,
    say_size,
)
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate

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


def test_every_field_of_a_rule_and_its_effects_can_be_written() -> None:
    assert {*RULE} == {*Rule.__struct_fields__}
    assert {*APPROVAL} == {*ApprovalTerms.__struct_fields__}
    assert {*CONSTRAINTS} == {*Constraints.__struct_fields__}


def test_the_snapshot_names_the_text() -> None:
    one, same = parse_rules(GOOD, "x"), parse_rules(GOOD, "y")
    other = parse_rules(GOOD + b"\n# changed", "x")
    assert one.snapshot == same.snapshot != other.snapshot


def refusal(text: str) -> str:
    with pytest.raises(Misconfigured) as refused:
        parse_rules(text.encode(), "my.toml")
    return str(refused.value)


HEAD = 'default = "allow"\n\n[[rules]]\nid = "a"\ndecision = "deny"\n'
"""What comes after it begins in line 6."""


@every(
    "text, said",
    [
        ("", "line 1: default: is missing"),
        ('default = "deny"\nx = \n', "line 2, column 5: is not valid TOML: Invalid value"),
        ('default = "deny"\nx = """', "line 2: is not valid TOML"),
        ('# top\ndefault = "maybe"', "line 2: default: 'maybe' is not known"),
        ("default = 1", "line 1: default: is a number, not a string"),
        ('default = "throttle"', "line 1: default: can't be 'throttle', only 'allow' or 'deny'"),
        ('default = "deny"\nextra = 1', "line 2: extra: there is no such key"),
        ('default = "deny"\nrule = 1', "did you mean 'rules'?"),
        ('default = "deny"\nrules = 5', "line 2: rules: is a number, not a list"),
        ('default = "deny"\nrules = [\n  5\n]', "line 3: rule 1 (without an id): is a number"),
        (
            'default = "deny"\n[[rules]]\n[[rules]]\n',
            "line 2: rule 1 (without an id): id: is missing",
        ),
        (HEAD + '[[rules]]\nid = "b"', "line 6: rule 2 (b): decision: is missing"),
    ],
)
def test_a_wrong_file_is_refused_naming_line_and_key(text: str, said: str) -> None:
    assert said in refusal(text)


def test_a_refusal_begins_with_the_file() -> None:
    assert refusal("").startswith("rules my.toml, line 1: ")
    assert refusal("?").startswith("rules my.toml, line 1, column 1: ")


@every(
    "text, said",
    [
        ('topic = ["job.x"]', "line 6: rule 1 (a): topic: there is no such key"),
        ('topic = ["job.x"]', "did you mean 'topics'?"),
        ("colour = 1", "known are approval, "),
        ('topics = "job.x"', "line 6: rule 1 (a): topics: is a string, not a list"),
        ("topics = []", "topics: is empty, and would match nothing"),
        ('topics = [\n"job.x",\n7]', "line 8: rule 1 (a): topics[1]: is a number, not a string"),
        ('topics = ["job.[ab"]', "topics[0]: 'job.[ab' opens a '[' that is never closed"),
        ('topics = ["job.[]"]', "never closed"),
        ('tenants = [""]', "tenants[0]: '' is no glob"),
        ('tenants = ["a\\u0000b"]', "tenants[0]: has a control character"),
        ("labels = 1", "labels: is a number, not a table"),
        ("labels = {}", "labels: is empty"),
        ("labels = { k = 1 }", "line 6: rule 1 (a): labels.k: is a number, not a string"),
        ('labels.k = "v"\nlabels.l = [1]', "line 7: rule 1 (a): labels.l[0]: is a number"),
        ("[rules.labels]\nk = []", "line 7: rule 1 (a): labels.k: is empty"),
        ("env_keys = []", "env_keys: is empty"),
        ('priorities = ["urgent"]', "priorities[0]: 'urgent' is not known"),
        ('priorities = ["bathc"]', "did you mean 'batch'?"),
        ("min_cost = -1", "line 6: rule 1 (a): min_cost: -1 is out of range"),
        ("min_cost = nan", "min_cost: nan is not a number"),
        ('min_cost = "1"', "min_cost: is a string, not a number"),
        ("max_cost = true", "max_cost: is a boolean, not a number"),
        ("min_cost = 2\nmax_cost = 1", "line 7: rule 1 (a): max_cost: is less than min_cost"),
        ("reason = 1979-05-27", "reason: is a date, not a string"),
        ('rate = "10/m"', "line 6: rule 1 (a): rate: goes with decision 'throttle' only"),
        ("approval = {}", "approval: goes with decision 'require_approval' only"),
        ("constraints = { max_retries = 1 }", "goes with decision 'allow_with_constraints' only"),
        ('[[rules]]\nid = "a"\ndecision = "deny"', "line 7: rule 2 (a): id: rule 1 has this id"),
        ('[[rules]]\nid = "a b"\ndecision = "deny"', "line 7: rule 2 (a b): id: 'a b' is not"),
        ('[[rules]]\nid = "default"\ndecision = "deny"', "line 7: rule 2 (default): id: 'default'"),
        ('[[rules]]\nid = "b"\ndecision = "denny"', "line 8: rule 2 (b): decision: 'denny'"),
    ],
)
def test_a_wrong_rule_is_refused_naming_line_rule_and_key(text: str, said: str) -> None:
    assert said in refusal(HEAD + text)


@every(
    "decision, text, said",
    [
        ("throttle", "", "line 5: rule 1 (a): decision: 'throttle' also needs 'rate'"),
        ("throttle", 'rate = "0/m"', "line 6: rule 1 (a): rate: '0/m' lets nothing through"),
        ("throttle", 'rate = "5/0s"', "rate: '5/0s' lets nothing through"),
        ("throttle", 'rate = "10"', "rate: '10' is not a rate; write 10/s"),
        ("throttle", 'rate = "10/y"', "rate: '10/y' is not a rate"),
        ("throttle", 'rate = "-1/m"', "rate: '-1/m' is not a rate"),
        ("throttle", "rate = 10", "rate: is a number, not a string"),
        ("throttle", 'rate = "1/900d"', "rate: 7.776e+07 is out of range"),
        ("allow_with_constraints", "", "decision: 'allow_with_constraints' also needs"),
        ("allow_with_constraints", "constraints = {}", "constraints: sets no limit"),
        ("allow_with_constraints", "constraints = { read_only = false }", "sets no limit"),
        (
            "allow_with_constraints",
            'constraints = { max_retries = 1, max_runtime = "10x" }',
            "line 6: rule 1 (a): constraints.max_runtime: '10x' is not a duration",
        ),
        (
            "allow_with_constraints",
            "[rules.constraints]\nmax_retries = -1",
            "line 7: rule 1 (a): constraints.max_retries: -1 is out of range",
        ),
        ("allow_with_constraints", "constraints = { max_runtime = 0 }", "max_runtime: 0 is out"),
        ("allow_with_constraints", "constraints = { max_concurrent = 0 }", "max_concurrent: 0 is"),
        ("allow_with_constraints", "constraints = { max_retries = 1.5 }", "not a whole number"),
        ("allow_with_constraints", 'constraints = { max_memory = "5 bananas" }', "not a size"),
        ("allow_with_constraints", 'constraints = { max_output = "0b" }', "max_output: 0 is out"),
        ("allow_with_constraints", 'constraints = { network = "x" }', "network: is a string"),
        ("allow_with_constraints", 'constraints = { network = ["a b"] }', "network[0]: 'a b' is"),
        ("allow_with_constraints", "constraints = { read_only = 1 }", "not true or false"),
        ("allow_with_constraints", "constraints = { max_memry = 1 }", "did you mean 'max_memory'?"),
        ("require_approval", "approval = 1", "approval: is a number, not a table"),
        ("require_approval", "approval = { needed = 0 }", "approval.needed: 0 is out of range"),
        ("require_approval", "approval = { approvers = [] }", "approval.approvers: is empty"),
        ("require_approval", 'approval = { expires = "1y" }', "approval.expires: '1y' is not"),
        (
            "require_approval",
            '[rules.approval]\napprovers = ["ada", "ada"]\nneeded = 2',
            "line 8: rule 1 (a): approval.needed: 2 are needed, but there are only 1 approvers",
        ),
    ],
)
def test_a_wrong_effect_is_refused_naming_line_rule_and_key(
    decision: str, text: str, said: str
) -> None:
    assert said in refusal(HEAD.replace("deny", decision) + text)


def test_an_approval_may_be_asked_for_without_saying_how() -> None:
    text = HEAD.replace("deny", "require_approval") + "approval = {}"
    assert parse_rules(text.encode(), "x").rules[0].approval == ApprovalTerms()


def test_a_file_that_is_no_text_is_refused_naming_the_line() -> None:
    with pytest.raises(Misconfigured, match="line 2: is not UTF-8"):
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


# -- lines ----------------------------------------------------------------------------------

ODD = '''# a comment with [[rules]] and x = 1
"quoted key" = """
[[rules]]
x = 1 \\""" still
"""
time = 1979-05-27 07:32:00
'single' = \'\'\'
y = 2\'\'\'
[[rules]] # one
a.b = [1, [2,
  # not = this
  3], { c = "]", d = '}' }]
[rules.sub]
deep = {x = {y = "#"},
z = 1}
[[rules.more]]
k = 1
[[rules.more]]
k = 2
[[rules]]
a = "\\"[[rules]]"
'''


@every(
    "path, line",
    [
        (("quoted key",), 2),
        (("time",), 6),
        (("single",), 7),
        (("rules", 0), 9),
        (("rules", 0, "a", "b"), 10),
        (("rules", 0, "a", "b", 1), 10),
        (("rules", 0, "a", "b", 1, 1), 12),
        (("rules", 0, "a", "b", 2, "d"), 12),
        (("rules", 0, "sub"), 13),
        (("rules", 0, "sub", "deep", "x", "y"), 14),
        (("rules", 0, "sub", "deep", "z"), 15),
        (("rules", 0, "more", 0, "k"), 17),
        (("rules", 0, "more", 1, "k"), 19),
        (("rules", 1), 20),
        (("rules", 1, "a"), 21),
        (("rules", 1, "nowhere", "at", "all"), 20),
        (("nowhere",), 1),
    ],
)
def test_a_key_is_found_however_it_is_written(path: tuple[str | int, ...], line: int) -> None:
    assert line_of(ODD, path) == line
    assert line_of(ODD.replace("\n", "\r\n"), path) == line


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


# -- rules in vain --------------------------------------------------------------------------

DENY = Decision.DENY


@every(
    "first, second, reached",
    [
        (Rule("a", DENY), Rule("b", DENY, topics=("job.x",)), False),
        (Rule("a", DENY, topics=("job.*",)), Rule("b", DENY, topics=("job.x.*",)), False),
        (Rule("a", DENY, topics=("job.*",)), Rule("b", DENY), True),
        (Rule("a", DENY, topics=("job.?",)), Rule("b", DENY, topics=("job.*",)), True),
        (Rule("a", DENY, topics=("job.?",)), Rule("b", DENY, topics=("job.x",)), False),
        (Rule("a", DENY, topics=("*b*",)), Rule("b", DENY, topics=("job.[ab]c",)), True),
        (Rule("a", DENY, labels={"k": "v*"}), Rule("b", DENY, labels={"k": "v"}), False),
        (Rule("a", DENY, labels={"k": "v*"}), Rule("b", DENY, labels={"l": "v"}), True),
        (Rule("a", DENY, env_keys=("A",)), Rule("b", DENY, env_keys=("B", "A")), False),
        (Rule("a", DENY, env_keys=("A", "B")), Rule("b", DENY, env_keys=("A",)), True),
        (Rule("a", DENY, min_cost=1), Rule("b", DENY, min_cost=2), False),
        (Rule("a", DENY, min_cost=2), Rule("b", DENY, min_cost=1), True),
        (Rule("a", DENY, max_cost=2), Rule("b", DENY, max_cost=1), False),
        (Rule("a", DENY, max_cost=2), Rule("b", DENY), True),
    ],
)
def test_a_rule_behind_one_that_takes_all_its_jobs_is_warned_of(
    first: Rule, second: Rule, reached: bool
) -> None:
    warned = [name for name, why in warnings_of(RuleSet(DENY, (first, second))) if "reached" in why]
    assert warned == ([] if reached else ["b"])


@pytest.mark.parametrize(
    ("glob", "warned"),
    [
        ("text.*", True),
        ("job", True),
        ("job.x", False),
        ("*", False),
        ("j*", False),
        ("[j]ob.x", False),
        ("jab*", True),
    ],
)
def test_a_topic_that_cannot_be_is_warned_of(glob: str, warned: bool) -> None:
    rules = RuleSet(DENY, (Rule("a", DENY, topics=(glob,)),))
    assert [name for name, _ in warnings_of(rules)] == ["a"] * warned
