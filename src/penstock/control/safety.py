"""The safety kernel: a pure decision on each job before it may run, and the moves that follow.

A kernel that cannot answer raises, and the job stays where it is: an error is neither an
allow nor a denial.

A condition on something that the job does not state does not match, not even `*`. A missing
cost estimate counts as the highest cost, so that leaving it out gains nothing.

A verdict is stored with the move that follows from it. A job that is judged again, after a
restart or by other rules, is written about only if the verdict is another one.

`WaitingJobs` looks after the jobs that wait for something other than a worker: for people, for
their parents, or to be read again.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from itertools import islice
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from penstock.control.approvals import await_approval, expiry, is_current, lifted, refusal
from penstock.control.dependencies import has_parents
from penstock.control.intake import cancellation
from penstock.control.open_jobs import OpenJobs
from penstock.control.store_retry import RetryingStore
from penstock.core.job import Job, JobRequest, Priority
from penstock.core.ledger import BulkMove, Change, Move
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Hold, Rate, SafetyVerdict
from penstock.lifecycles.canonical import WAITING, JobEvent, JobState, Role
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
"""Topics whose matching rules are cached."""


class SafetyKernel:
    """Answers by one set of rules at a time."""

    def __init__(self, rules: RuleSet = ALLOW_ALL) -> None:
        self.use(rules)

    @property
    def rules(self) -> RuleSet:
        return self._rules

    @property
    def built_in(self) -> bool:
        """Whether there are no rules: verdicts are then not stored."""
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


# -- from verdicts to moves --------------------------------------------------------

log = logging.getLogger(__name__)

_SCHEDULER = Role.SCHEDULER.value
_RECONCILER = Role.RECONCILER.value
_SCHEDULE = (JobEvent.SCHEDULE,)
_JUDGED_A_TURN = 2000
"""Maximum number of jobs judged in one commit."""


class News(Struct):
    """A verdict and hold to store with the job's next move."""

    verdict: SafetyVerdict
    hold: Hold | None = None


class Judged(Struct):
    """The outcome of one round."""

    moves: list[Change] = msgspec.field(default_factory=list)
    """Moves of jobs that were denied or put on hold."""
    passed: list[Job] = msgspec.field(default_factory=list)
    """Jobs that are allowed, and are queued or wait for their parents."""
    children: dict[int, tuple[Job, SafetyVerdict | None]] = msgspec.field(default_factory=dict)
    """Those of them that wait for parents, by seq."""
    news: dict[int, News] = msgspec.field(default_factory=dict)
    """By seq, where the record does not have the verdict yet."""

    def admissions(self, gone: set[int], now: float) -> tuple[list[Change], list[BulkMove]]:
        """The moves of allowed jobs that no worker took: they become SCHEDULED, most as one."""
        moves: list[Change] = []
        plain = BulkMove(job_ids=[], events=_SCHEDULE, actor=_SCHEDULER, at=now, versions=[])
        assert plain.versions is not None
        for job in self.passed:
            if job.seq in gone:
                continue
            news = self.news.get(job.seq) if self.news else None
            if job.state is JobState.PENDING and news is None:
                plain.job_ids.append(job.request.job_id)
                plain.versions.append(job.version)
            elif news is not None:
                moves.append(_judged(job, news, now))
        return moves, [plain] if plain.job_ids else []


def _judged(job: Job, news: News, now: float) -> Move:
    event, said = JobEvent.SCHEDULE, ""
    if job.state is not JobState.PENDING:
        event, said = JobEvent.NOTE, _judged_again(news.verdict)
    return Move(
        job.job_id,
        (event,),
        _SCHEDULER,
        now,
        said,
        version=job.version,
        verdict=news.verdict,
        hold=news.hold,
    )


class Judge:
    """Judges the jobs that are not judged yet."""

    def __init__(self, open_jobs: OpenJobs, kernel: SafetyKernel) -> None:
        self._open_jobs, self._kernel = open_jobs, kernel

    def sit(self, now: float) -> Judged:
        """Judge up to a number of jobs; the rest, and those the kernel failed on, stay."""
        open_jobs, judged = self._open_jobs, Judged()
        unjudged = open_jobs.unjudged
        if not unjudged:
            return judged
        decide, built_in = self._kernel.decide, self._kernel.built_in
        passed, queue = judged.passed, open_jobs.queue
        undecided: dict[int, Job] = {}
        for job in list(islice(unjudged.values(), _JUDGED_A_TURN)):
            del unjudged[job.seq]
            try:
                verdict = decide(job.request)
            except Exception as error:
                log.exception("the safety kernel could not judge job %s", job.job_id)
                open_jobs.doubtful[job.seq] = f"the safety kernel failed: {error}"
                undecided[job.seq] = job
                continue
            if not (built_in and job.verdict is None and verdict.decision is Decision.ALLOW):
                self._follow(job, verdict, judged, now)
            elif job.request.after:
                self._let_pass(job, None, judged)
            else:
                passed.append(job)
                queue(job)
        unjudged.update(undecided)
        return judged

    def _follow(self, job: Job, verdict: SafetyVerdict, judged: Judged, now: float) -> None:
        hold = job.hold
        if verdict.decision is Decision.DENY:
            judged.moves.append(refusal(job, verdict, now))
            return
        if verdict.decision is Decision.REQUIRE_APPROVAL:
            if has_parents(job.request):
                self._open_jobs.dependencies.admit(job)  # if a parent fails, no approval is needed
            if hold is None or not is_current(hold, verdict, job.request):
                judged.moves.append(await_approval(job, verdict, now))
                return
            if not hold.approved:
                if hold.until <= now:
                    judged.moves.append(expiry(job, now))
                else:
                    self._open_jobs.await_approval(job)
                return
        elif hold is not None and not hold.approved:
            judged.news[job.seq] = News(verdict, lifted(hold))
        if job.verdict != verdict:
            judged.news.setdefault(job.seq, News(verdict))
        self._let_pass(job, verdict, judged)

    def _let_pass(self, job: Job, verdict: SafetyVerdict | None, judged: Judged) -> None:
        judged.passed.append(job)
        if has_parents(job.request) and not self._open_jobs.dependencies.admit(job):
            self._open_jobs.doubtful.pop(job.seq, None)
            judged.children[job.seq] = (job, verdict)
        else:
            self._open_jobs.queue(job, verdict)


def _judged_again(verdict: SafetyVerdict) -> str:
    return f"judged again: {verdict.decision} by rule {verdict.rule_id}"


_READ = 2000
"""Records read again in one turn at most."""
_ENDED = 500
"""Jobs that waited in vain and are ended in one commit, at most."""
_LOOKED_UP = 500
"""Parents looked up in one turn at most."""


class WaitingJobs:
    """Looks after waiting jobs; each call does a bounded part of what is due."""

    def __init__(self, open_jobs: OpenJobs, store: RetryingStore) -> None:
        self._open_jobs, self._store = open_jobs, store

    @property
    def is_not_done(self) -> bool:
        """Whether there is more to do at once."""
        open_jobs, parents = self._open_jobs, self._open_jobs.dependencies
        return bool(
            parents.unknown
            or parents.doomed
            or open_jobs.families.unknown
            or open_jobs.families.doomed
            or open_jobs.unread
            or len(open_jobs.unjudged) > len(open_jobs.doubtful)
        )

    async def call_up(self, now: float) -> list[Change]:
        """Read again what must be judged again; end what waited in vain."""
        open_jobs = self._open_jobs
        if open_jobs.unread:
            asked = list(islice(open_jobs.unread, _READ))
            open_jobs.read_again(asked, await self._store.fetch(asked))
        ended: list[Change] = [expiry(job, now) for job in open_jobs.take_expired(now, _ENDED)]
        if open_jobs.dependencies.doomed:
            ended.extend(await self._end_children(now))
        if open_jobs.families.doomed:
            ended.extend(await self._end_with_parents(now))
        return ended

    async def _end_with_parents(self, now: float) -> list[Change]:
        """Cancel children whose parent ended without success, wherever they are."""
        doomed = self._open_jobs.families.doomed
        reasons = dict(islice(doomed.items(), _ENDED))
        ended: list[Change] = []
        for job in await self._store.fetch(list(reasons)):
            why = reasons.pop(job.seq)
            if job.state in WAITING:
                ended.append(cancellation(job, "PARENT_ENDED", why, now))
            elif job.is_final or job.cancel_requested:
                doomed.pop(job.seq, None)
            else:
                ask = (JobEvent.REQUEST_CANCEL,)
                ended.append(Move(job.job_id, ask, _RECONCILER, now, why, version=job.version))
        for seq in reasons:  # no longer in the store
            doomed.pop(seq, None)
        return ended

    async def _end_children(self, now: float) -> list[Change]:
        parents = self._open_jobs.dependencies
        reasons = dict(islice(parents.doomed.items(), _ENDED))
        jobs = {job.seq: job for job in await self._store.fetch(list(reasons))}
        ended: list[Change] = []
        for seq, why in reasons.items():
            if (job := jobs.get(seq)) is not None and job.state in WAITING:
                ended.append(cancellation(job, "PARENT_FAILED", why, now))
            else:
                parents.forget(seq)
        return ended

    async def ask_for_parents(self, judged: Judged) -> None:
        """Look up unknown parents; queue the jobs that need not wait."""
        open_jobs, parents = self._open_jobs, self._open_jobs.dependencies
        for parent_id in list(islice(parents.unknown, _LOOKED_UP)):
            parents.look_up(parent_id, await self._store.get(parent_id))
        for chain in list(islice(open_jobs.families.unknown, _LOOKED_UP)):
            tries = [await self._store.get(chain[1])]
            while (last := tries[-1]) is not None and last.successor is not None:
                tries.append(await self._store.get(last.successor))
            open_jobs.families.look_up(chain, tries[-1])
        if parents.released:
            released = parents.take_released()
            for seq in released:
                if (child := judged.children.get(seq)) is not None:
                    open_jobs.queue(*child)
            open_jobs.release(released)
