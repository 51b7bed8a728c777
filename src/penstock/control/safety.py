"""The safety kernel: a pure decision on each job, before anything may run it.

A kernel that cannot answer raises, and the job stays where it is: silence is never an
allow, and never a denial either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from msgspec import Struct

from penstock.control.conditions import (
    Check,
    costs_at_least,
    costs_at_most,
    has_env_key,
    has_label,
    has_priority,
    one_of,
    some_risk_tag,
)
from penstock.core.job import JobRequest, Priority
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate, SafetyVerdict
from penstock.ports.policy import Condition, RuleTrace

EFFECTS: Mapping[str, Decision] = {
    "approval": Decision.REQUIRE_APPROVAL,
    "rate": Decision.THROTTLE,
    "constraints": Decision.ALLOW_WITH_CONSTRAINTS,
}
"""What a decision may carry: each effect goes with one of them."""


class Rule(Struct, frozen=True):
    """Matches when every condition that it states does; an unstated one always does."""

    id: str
    decision: Decision
    topics: tuple[str, ...] = ()
    """Globs; any may match."""
    tenants: tuple[str, ...] = ()
    """Globs; any may match."""
    labels: Mapping[str, str | tuple[str, ...]] = {}
    """All must be there; values are globs, of which any may match."""
    reason: str = ""
    principals: tuple[str, ...] = ()
    """Globs of who submitted it; any may match."""
    env_keys: tuple[str, ...] = ()
    """Globs of names in env; each must be there. Values are not looked at."""
    capabilities: tuple[str, ...] = ()
    """Globs; any may match."""
    risk_tags: tuple[str, ...] = ()
    """Globs; any may match any tag of the job."""
    priorities: tuple[Priority, ...] = ()
    min_cost: float | None = None
    """The estimated cost is this or more; a job without an estimate counts as above it."""
    max_cost: float | None = None
    """The estimated cost is this or less; a job without an estimate counts as above it."""
    approval: ApprovalTerms | None = None
    rate: Rate | None = None
    constraints: Constraints | None = None

    def checks(self) -> Iterator[Check]:
        """Its conditions: that on the topic, if there is one, comes first."""
        if self.topics:
            yield one_of("topics", self.topics, lambda request: request.topic)
        if self.tenants:
            yield one_of("tenants", self.tenants, lambda request: request.tenant)
        if self.principals:
            yield one_of("principals", self.principals, lambda request: request.principal)
        if self.capabilities:
            yield one_of("capabilities", self.capabilities, lambda request: request.capability)
        if self.risk_tags:
            yield some_risk_tag(self.risk_tags)
        for name, globs in self.labels.items():
            yield has_label(name, (globs,) if isinstance(globs, str) else globs)
        for glob in self.env_keys:
            yield has_env_key(glob)
        if self.priorities:
            yield has_priority(self.priorities)
        if self.min_cost is not None:
            yield costs_at_least(self.min_cost)
        if self.max_cost is not None:
            yield costs_at_most(self.max_cost)

    def verdict(self, snapshot: str) -> SafetyVerdict:
        """What it says, which is the same for every job. Raises ValueError."""
        for effect, decision in EFFECTS.items():
            given = getattr(self, effect) is not None
            if given and decision is not self.decision:
                raise ValueError(f"rule {self.id}: {effect} goes with {decision}")
            if not given and decision is self.decision and effect != "approval":
                raise ValueError(f"rule {self.id}: {decision} needs {effect}")
        asks = self.decision is Decision.REQUIRE_APPROVAL
        return SafetyVerdict(
            self.decision,
            self.id,
            snapshot,
            self.reason,
            self.constraints,
            (self.approval or ApprovalTerms()) if asks else None,
            self.rate,
        )


class RuleSet(Struct, frozen=True):
    """Rules in order; the first that matches speaks, else the default does."""

    default: Decision
    """Allow or deny."""
    rules: tuple[Rule, ...] = ()
    snapshot: str = "built-in"
    """Names the text that the rules were read from."""


ALLOW_ALL = RuleSet(Decision.ALLOW)

_Ready: TypeAlias = tuple[tuple[Callable[[JobRequest], bool], ...], SafetyVerdict]
_TOPICS = 1000
"""Topics for which the rules that can speak are known by heart."""


class SafetyKernel:
    """Answers by one set of rules at a time."""

    def __init__(self, rules: RuleSet = ALLOW_ALL) -> None:
        self.use(rules)

    @property
    def rules(self) -> RuleSet:
        return self._rules

    @property
    def built_in(self) -> bool:
        """Whether nobody gave any rules: verdicts are then not worth keeping."""
        return self._rules is ALLOW_ALL

    def use(self, rules: RuleSet) -> None:
        """Answer by these from now on. If they can't be used, the former stay."""
        default = SafetyVerdict(
            rules.default, "default", rules.snapshot, "no rule matched; this is the default"
        )
        ready = tuple(_ready(rule, rules.snapshot) for rule in rules.rules)
        self._rules, self._default, self._ready = rules, default, ready
        self._by_topic: dict[str, tuple[_Ready, ...]] = {}

    def decide(self, request: JobRequest) -> SafetyVerdict:
        if not self._ready:
            return self._default
        ready = self._by_topic.get(request.topic)
        for conditions, verdict in self._narrow(request) if ready is None else ready:
            for passes in conditions:
                if not passes(request):
                    break
            else:
                return verdict
        return self._default

    def _narrow(self, request: JobRequest) -> tuple[_Ready, ...]:
        """The rules whose topics match, to be kept: most jobs share a few topics."""
        if len(self._by_topic) >= _TOPICS:
            self._by_topic.clear()
        ready = tuple(
            (conditions[1:] if rule.topics else conditions, verdict)
            for rule, (conditions, verdict) in zip(self._rules.rules, self._ready, strict=True)
            if not rule.topics or conditions[0](request)
        )
        self._by_topic[request.topic] = ready
        return ready

    def trace(self, request: JobRequest) -> tuple[SafetyVerdict, tuple[RuleTrace, ...]]:
        """What `decide` says, with every rule that was tried for it and what it looked at."""
        tried: list[RuleTrace] = []
        for rule, (_, verdict) in zip(self._rules.rules, self._ready, strict=True):
            seen = tuple(
                Condition(check.field, check.wanted, check.found(request), check.passes(request))
                for check in rule.checks()
            )
            matched = all(condition.matched for condition in seen)
            tried.append(RuleTrace(rule.id, matched, seen))
            if matched:
                return verdict, tuple(tried)
        return self._default, tuple(tried)


def _ready(rule: Rule, snapshot: str) -> _Ready:
    return tuple(check.passes for check in rule.checks()), rule.verdict(snapshot)
