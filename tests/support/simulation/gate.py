"""The rules and limits that a simulated engine is given, and that change while it runs."""

from __future__ import annotations

import random

from penstock.control.safety import ALLOW_ALL, Rule, RuleSet
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate
from penstock.ports.engine_api import Limit

VOTERS = ("ann", "bob", "cat")
COLOURS = ("red", "blue")
TOPICS = (
    *["job.a"] * 3,
    *["job.b"] * 2,
    "job.denied",
    *["job.asked"] * 2,
    "job.slow",
    "job.few",
)

_DENIED = Rule("no-denied", Decision.DENY, topics=("job.denied",))
_ASKED = Rule(
    "ask",
    Decision.REQUIRE_APPROVAL,
    topics=("job.asked",),
    approval=ApprovalTerms(needed=1, expires=4.0),
)
_ASKED_TWICE = Rule(
    "ask",
    Decision.REQUIRE_APPROVAL,
    topics=("job.asked", "job.b"),
    approval=ApprovalTerms(needed=2, expires=6.0),
)
_SLOW = Rule("slow", Decision.THROTTLE, topics=("job.slow",), rate=Rate(1, 2.0))
_FEW = Rule(
    "few",
    Decision.ALLOW_WITH_CONSTRAINTS,
    topics=("job.few",),
    constraints=Constraints(max_concurrent=1, max_retries=1),
)

RULES = (
    RuleSet(Decision.ALLOW, (_DENIED, _ASKED, _SLOW, _FEW), "s1"),
    RuleSet(Decision.ALLOW, (_DENIED, _ASKED, _SLOW, _FEW), "s2"),
    RuleSet(Decision.ALLOW, (_DENIED, _ASKED_TWICE, _FEW), "s3"),
    RuleSet(Decision.ALLOW, (_DENIED,), "s4"),
    ALLOW_ALL,
    ALLOW_ALL,
)

_LIMITS = (
    Limit(name="b", topics=("job.b",), concurrency=1),
    Limit(name="tenant", key=("tenant",), concurrency=2),
    Limit(name="colour", key=("label:colour",), concurrency=1),
    Limit(name="all", concurrency=3),
    Limit(name="all", concurrency=2),
    Limit(name="rate", key=("tenant",), rate=Rate(3, 2.0)),
    Limit(name="depth", max_waiting=6),
)


def some_limits(chance: random.Random) -> tuple[Limit, ...]:
    """None, as often as not."""
    chosen = chance.sample(_LIMITS, k=chance.choice([0, 0, 0, 1, 2, 3]))
    return tuple({limit.name: limit for limit in chosen}.values())
