"""Looking into the safety rules: what is in force, why a job was judged so, what if."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from penstock.core.verdict import Decision, SafetyVerdict


class RuleView(Struct, frozen=True):
    id: str
    decision: Decision
    conditions: dict[str, str]
    """What it looks at, in words, by field; empty: it matches everything."""
    effect: str = ""
    """Its rate, constraints or approval terms, in words."""
    reason: str = ""


class PolicyView(Struct, frozen=True):
    """The rules in force."""

    snapshot: str
    source: str
    """The file they were read from; empty for the built-in rules."""
    loaded_at: float
    default: Decision
    rules: tuple[RuleView, ...]
    problem: str = ""
    """Why the file as it now is was not taken, while the last good rules go on."""


class Condition(Struct, frozen=True):
    """One field that a rule looked at."""

    field: str
    wanted: str
    found: str
    matched: bool


class RuleTrace(Struct, frozen=True):
    """One rule that was tried. Rules after the one that spoke were not."""

    rule_id: str
    matched: bool
    conditions: tuple[Condition, ...]


class Explanation(Struct, frozen=True):
    """How the rules in force judge a job now, step by step, and how it was judged then."""

    job_id: str
    then: SafetyVerdict | None
    """What was decided when it was judged; None if it has not been, or without rules."""
    now: SafetyVerdict
    trace: tuple[RuleTrace, ...]


class Difference(Struct, frozen=True):
    """A past job that other rules would have judged otherwise."""

    job_id: str
    topic: str
    tenant: str
    was: str
    """decision (rule), as it was"""
    would_be: str


class Simulation(Struct, frozen=True):
    snapshot: str
    looked_at: int
    decisions: dict[str, int]
    """How often each decision would be made."""
    changed: int
    differences: tuple[Difference, ...]
    """The first thousand of them."""


class Policy(Protocol):
    async def current(self) -> PolicyView: ...

    async def explain(self, job_id: str) -> Explanation: ...

    async def simulate(self, text: str, limit: int = 10_000) -> Simulation:
        """Judge the newest `limit` jobs by these rules (TOML). Changes nothing."""

    async def reload(self) -> PolicyView:
        """Read the rule file again now. Raises Misconfigured and keeps the last good ones."""
