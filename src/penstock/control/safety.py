"""The safety kernel: a pure decision on each job, before anything may run it.

A kernel that cannot answer raises, and the job stays where it is: an error is neither an
allow nor a denial.

A condition on something that the job does not state does not match, not even `*`. A missing
cost estimate counts as the highest cost, so that leaving it out gains nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from penstock.core.job import JobRequest, Priority
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate, SafetyVerdict
from penstock.ports.engine_api import Condition, RuleTrace

_SHOWN = 200


class Check(NamedTuple):
    """One condition of a rule, ready to be tested often, and how to describe it."""

    field: str
    wanted: str
    passes: Callable[[JobRequest], bool]
    found: Callable[[JobRequest], str]


def _any_of(
    field: str, globs: Sequence[str], values: Callable[[JobRequest], Iterable[str]]
) -> Check:
    """One of the job's values matches one of the globs."""
    matches = matcher(globs)
    return Check(
        field,
        ", ".join(globs),
        lambda request: any(map(matches, values(request))),
        lambda request: _shown(values(request)),
    )


def _label(name: str) -> Callable[[JobRequest], Iterable[str]]:
    return lambda request: (request.labels[name],) if name in request.labels else ()


def _cost(request: JobRequest) -> float:
    return math.inf if request.estimated_cost is None else request.estimated_cost


def _say_cost(request: JobRequest) -> str:
    cost = request.estimated_cost
    return "no estimate, which counts as the highest" if cost is None else f"{cost:g}"


def _shown(values: Iterable[str]) -> str:
    text = ", ".join(value or '""' for value in values) or "nothing"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def matcher(globs: Iterable[str]) -> Callable[[str], bool]:
    """Whether one of the globs matches a text; case matters, and a star crosses dots."""
    plain = frozenset(glob for glob in globs if not is_pattern(glob))
    patterns = [translate(glob) for glob in globs if is_pattern(glob)]
    if not patterns:
        return plain.__contains__
    match = re.compile("|".join(patterns)).match
    return lambda text: text in plain or match(text) is not None


def is_pattern(glob: str) -> bool:
    return any(sign in glob for sign in "*?[")


VALUES: Mapping[str, Callable[[JobRequest], Iterable[str]]] = {
    "topics": lambda job: (job.topic,),
    "tenants": lambda job: (job.tenant,),
    "principals": lambda job: filter(None, (job.principal,)),
    "capabilities": lambda job: filter(None, (job.capability,)),
    "risk_tags": lambda job: job.risk_tags,
    "priorities": lambda job: (job.priority,),
}
"""The conditions of which any glob may match any of these values of a job."""

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
        for field, values in VALUES.items():
            if globs := getattr(self, field):
                yield _any_of(field, globs, values)
        for name, wanted in self.labels.items():
            globs = (wanted,) if isinstance(wanted, str) else wanted
            yield _any_of(f"labels.{name}", globs, _label(name))
        for glob in self.env_keys:  # names only: values are never looked at
            yield _any_of("env_keys", (glob,), lambda job: sorted(job.env))
        least, most = self.min_cost, self.max_cost
        if least is not None:
            said = f"{least:g} or more"
            yield Check("min_cost", said, lambda job: _cost(job) >= least, _say_cost)
        if most is not None:
            said = f"{most:g} or less"
            yield Check("max_cost", said, lambda job: _cost(job) <= most, _say_cost)

    def verdict(self, snapshot: str) -> SafetyVerdict:
        """What it says, which is the same for every job. Raises ValueError."""
        for effect, decision in EFFECTS.items():
            given = getattr(self, effect) is not None
            if given and decision is not self.decision:
                raise ValueError(
                    f"rule {self.id}: {effect} is only allowed with decision '{decision}'"
                )
            if not given and decision is self.decision and effect != "approval":
                raise ValueError(f"rule {self.id}: decision '{decision}' requires {effect}")
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
