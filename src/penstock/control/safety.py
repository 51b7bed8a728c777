"""The safety kernel: a pure decision on each job, before anything may run it.

A kernel that cannot answer raises, and the job stays where it is: silence is never an
allow, and never a denial either.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from msgspec import Struct

from penstock.core.job import JobRequest
from penstock.core.verdict import Decision, SafetyVerdict


class Rule(Struct, frozen=True):
    """Matches when every condition that it states does; an unstated one always does."""

    id: str
    decision: Decision
    topics: tuple[str, ...] = ()
    """Globs; any may match."""
    tenants: tuple[str, ...] = ()
    """Globs; any may match."""
    labels: Mapping[str, str] = {}
    """All must be there; values are globs."""
    reason: str = ""

    def matches(self, request: JobRequest) -> bool:
        return (
            _any(request.topic, self.topics)
            and _any(request.tenant, self.tenants)
            and all(
                key in request.labels and fnmatchcase(request.labels[key], value)
                for key, value in self.labels.items()
            )
        )


def _any(value: str, globs: tuple[str, ...]) -> bool:
    return not globs or any(fnmatchcase(value, glob) for glob in globs)


class RuleSet(Struct, frozen=True):
    """Rules in order; the first that matches speaks, else the default does."""

    default: Decision
    rules: tuple[Rule, ...] = ()
    snapshot: str = "built-in"
    """Names the text that the rules were read from."""


ALLOW_ALL = RuleSet(Decision.ALLOW)


class SafetyKernel:
    """Answers for one set of rules."""

    def __init__(self, rules: RuleSet = ALLOW_ALL) -> None:
        self.rules = rules
        self._allow_all = not rules.rules and rules.default is Decision.ALLOW
        self._default = SafetyVerdict(
            rules.default, "default", rules.snapshot, "no rule matched; this is the default"
        )

    def decide(self, request: JobRequest) -> SafetyVerdict:
        if self._allow_all:
            return self._default
        for rule in self.rules.rules:
            if rule.matches(request):
                return SafetyVerdict(rule.decision, rule.id, self.rules.snapshot, rule.reason)
        return self._default
