"""Answers about the safety rules. Whether a caller may ask is checked by who calls this."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from msgspec.structs import asdict

from penstock.control.rulebook import Rulebook
from penstock.control.rules import parse_rules
from penstock.control.safety import Rule, SafetyKernel
from penstock.core.check import check_number
from penstock.core.errors import NotFound
from penstock.core.job import Job
from penstock.core.quantity import say_duration, say_size
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate, SafetyVerdict
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import Clock
from penstock.ports.policy import Difference, Explanation, PolicyView, RuleView, Simulation
from penstock.ports.store import JobQuery, Store

_PAGE = 500
_DIFFERENCES = 1000
MOST = 1_000_000
"""Jobs that one simulation may look at."""


class PolicyDesk:
    """See `penstock.ports.policy.Policy`."""

    def __init__(
        self, rulebook: Rulebook, kernel: SafetyKernel, store: Store, clock: Clock
    ) -> None:
        self._rulebook, self._kernel, self._store = rulebook, kernel, store

    async def current(self) -> PolicyView:
        rules, book = self._kernel.rules, self._rulebook
        return PolicyView(
            rules.snapshot,
            book.source,
            book.loaded_at,
            rules.default,
            tuple(map(view, rules.rules)),
            book.problem,
        )

    async def explain(self, job_id: str) -> Explanation:
        job = await self._store.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        now, trace = self._kernel.trace(job.request)
        return Explanation(job.job_id, job.verdict, now, trace)

    async def simulate(self, text: str, limit: int = 10_000) -> Simulation:
        check_number("limit", limit, 1, MOST)
        rules = await asyncio.to_thread(parse_rules, text.encode("utf-8", "surrogatepass"), "given")
        kernel = SafetyKernel(rules)
        decisions: Counter[str] = Counter()
        differences: list[Difference] = []
        changed, looked_at, before = 0, 0, None
        while looked_at < limit:
            size = min(_PAGE, limit - looked_at)
            page = await self._store.find(JobQuery(before=before, limit=size))
            for job in page:
                verdict = kernel.decide(job.request)
                decisions[verdict.decision.value] += 1
                difference = _difference(job, verdict)
                if difference is not None:
                    changed += 1
                    if changed <= _DIFFERENCES:
                        differences.append(difference)
            looked_at += len(page)
            if len(page) < size:
                break
            before = page[-1].seq
            await asyncio.sleep(0)  # so that nobody waits for more than a page
        return Simulation(rules.snapshot, looked_at, dict(decisions), changed, tuple(differences))

    async def reload(self) -> PolicyView:
        await self._rulebook.reload()
        return await self.current()


def _difference(job: Job, verdict: SafetyVerdict) -> Difference | None:
    """How a job would be judged, if that is not how it was; rule ids don't count."""
    was = job.verdict
    if was is None:
        if job.state is JobState.PENDING:
            return None  # not judged yet
        denied = job.state is JobState.DENIED  # by a version that kept no verdicts
        was = SafetyVerdict(Decision.DENY if denied else Decision.ALLOW, "built-in", "")
    if _effective(was) == _effective(verdict):
        return None
    request = job.request
    return Difference(job.job_id, request.topic, request.tenant, said(was), said(verdict))


def _effective(verdict: SafetyVerdict) -> tuple[object, ...]:
    return (verdict.decision, verdict.constraints, verdict.approval, verdict.rate)


# -- in words -------------------------------------------------------------------------------


def view(rule: Rule) -> RuleView:
    conditions: dict[str, str] = {}
    for check in rule.checks():
        before = conditions.get(check.field)
        conditions[check.field] = f"{before} and {check.wanted}" if before else check.wanted
    effect = effect_of(rule.approval, rule.rate, rule.constraints)
    return RuleView(rule.id, rule.decision, conditions, effect, rule.reason)


def said(verdict: SafetyVerdict) -> str:
    """decision, effect (rule)"""
    effect = effect_of(verdict.approval, verdict.rate, verdict.constraints)
    return " ".join(filter(None, (verdict.decision.value, effect, f"({verdict.rule_id})")))


def effect_of(
    approval: ApprovalTerms | None, rate: Rate | None, constraints: Constraints | None
) -> str:
    if approval is not None:
        return _terms(approval)
    if rate is not None:
        return str(rate)
    return "" if constraints is None else _limits(constraints)


def _terms(terms: ApprovalTerms) -> str:
    who = f"of {', '.join(terms.approvers)}" if terms.approvers else "with the role"
    own = ", even their own" if terms.self_approval else ""
    return f"by {terms.needed} {who}{own}, within {say_duration(terms.expires)}"


def _limits(constraints: Constraints) -> str:
    stated = {k: v for k, v in asdict(constraints).items() if v is not None and v is not False}
    return ", ".join(f"{name} {_plain(name, value)}" for name, value in stated.items())


def _plain(name: str, value: Any) -> str:
    match name:
        case "max_runtime":
            return say_duration(value)
        case "max_memory" | "max_output":
            return say_size(value)
        case "network":
            return ", ".join(value) or "none"
        case "read_only":
            return "yes"
        case _:
            return str(value)
