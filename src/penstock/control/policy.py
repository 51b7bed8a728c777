"""Safety rules in a file (TOML): reading, reloading, showing, explaining and simulating them.

    default = "deny"

    [[rules]]
    id = "public-text"
    decision = "allow"
    topics = ["job.text.*"]

    [[rules]]
    id = "ask-for-mail"
    decision = "require_approval"
    topics = ["job.mail.*"]
    labels = { audience = "all*" }
    approval = { needed = 2, expires = "4h" }
    reason = "two people look at what everybody gets"

A file with any error is refused as a whole; the error names the file, the rule and the field.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from penstock.control.guard import Guard
from penstock.control.ledger import Ledger
from penstock.control.safety import Rule, RuleSet, SafetyKernel, is_pattern
from penstock.core.check import MAX_RETRIES, MAX_TIMEOUT, MAX_WAIT, check_name, check_number
from penstock.core.errors import InvalidRequest, Misconfigured, did_you_mean
from penstock.core.job import Job, Priority
from penstock.core.verdict import (
    ApprovalTerms,
    Constraints,
    Decision,
    Rate,
    SafetyVerdict,
    parse_duration,
    parse_rate,
    parse_size,
    say_duration,
    say_size,
)
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import Clock
from penstock.ports.engine_api import (
    Difference,
    Explanation,
    Policy,
    PolicyView,
    RuleView,
    Simulation,
)
from penstock.ports.store import JobQuery

log = logging.getLogger(__name__)

_PAGE = 500
_DIFFERENCES = 1000
MOST = 1_000_000
"""Maximum number of jobs in one simulation."""
LARGEST = 1 << 20
"""Bytes that a rule file may have."""
_MAX_GLOB, _MAX_REASON, _MAX_BYTES = 200, 1000, 1 << 50
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CLASSES = re.compile(r"\[!?+\]?+[^\]]*+\]")
_HOST = re.compile(r"[A-Za-z0-9_.:*\[\]-]{1,253}", re.ASCII)
_TABLES = {"approval": ApprovalTerms, "constraints": Constraints}
_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_WORDS |= {"object": "table"}
_QUANTITIES: dict[str, Callable[[str], Any]] = {
    "rate": lambda text: asdict(parse_rate(text)),
    "approval.expires": parse_duration,
    "constraints.max_runtime": parse_duration,
    "constraints.max_memory": parse_size,
    "constraints.max_output": parse_size,
}
_RANGES = {
    "min_cost": (0, 1e12),
    "max_cost": (0, 1e12),
    "rate.per": (0.001, MAX_TIMEOUT),
    "approval.needed": (1, 100),
    "approval.expires": (0.001, MAX_WAIT),
    "constraints.max_runtime": (0.001, MAX_TIMEOUT),
    "constraints.max_retries": (0, MAX_RETRIES),
    "constraints.max_concurrent": (1, 1_000_000),
    "constraints.max_memory": (1, _MAX_BYTES),
    "constraints.max_output": (1, _MAX_BYTES),
}


def load_rules(path: Path) -> RuleSet:
    """Read and check a rule file. Raises Misconfigured."""
    return parse_rules(read_text(path), str(path))


def read_text(path: Path) -> bytes:
    """A rule file as it stands. Raises Misconfigured."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST + 1)
    except OSError as error:
        raise Misconfigured(f"rules {path}: can't be read: {error.strerror}") from error


def snapshot_of(text: bytes) -> str:
    """The short name of a text."""
    return hashlib.sha256(text).hexdigest()[:12]


def parse_rules(text: bytes, source: str) -> RuleSet:
    """Rules from the text of a file; `source` is what errors call it. Raises Misconfigured."""
    if len(text) > LARGEST:
        raise Misconfigured(f"rules {source}: larger than {LARGEST:,} bytes")
    try:
        document = tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise Misconfigured(f"rules {source}: line {line} is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise Misconfigured(f"rules {source}: not valid TOML: {error}") from error
    except RecursionError:
        raise Misconfigured(f"rules {source}: nested too deeply") from None
    try:
        return _rule_set(document, snapshot_of(text))
    except InvalidRequest as error:
        raise Misconfigured(f"rules {source}: {error.message}", hint=error.hint) from None


def _rule_set(document: dict[str, Any], snapshot: str) -> RuleSet:
    _check_keys("", document, ("default", "rules"))
    default = document.get("default")
    if default not in (Decision.ALLOW.value, Decision.DENY.value):
        problem = f"must be 'allow' or 'deny', not {default!r}"
        raise InvalidRequest(
            "default",
            "missing" if default is None else problem,
            hint='write default = "deny": the decision when no rule matches',
        )
    entries = document.get("rules", [])
    if not isinstance(entries, list):
        raise InvalidRequest("rules", "must be a list", hint="write [[rules]] above each rule")
    rules: dict[str, Rule] = {}
    for number, entry in enumerate(entries, 1):
        try:
            rule = _rule(entry)
            if rule.id in rules:
                raise InvalidRequest("id", f"also the id of rule {[*rules].index(rule.id) + 1}")
        except InvalidRequest as error:
            name = entry.get("id") if isinstance(entry, dict) else None
            place = f"rule {number} ({name if isinstance(name, str) else 'no id'})"
            place += f": {error.field}" if error.field else ""
            raise InvalidRequest(place, error.problem, hint=error.hint) from None
        rules[rule.id] = rule
    return RuleSet(Decision(default), tuple(rules.values()), snapshot)


def _rule(entry: Any) -> Rule:
    if not isinstance(entry, dict):
        raise InvalidRequest("", "must be a table", hint="write [[rules]] above each rule")
    _check_keys("", entry, Rule.__struct_fields__)
    table = {key: _parsed(key, value) for key, value in entry.items()}
    if not isinstance(entry.get("rate", ""), str):
        raise InvalidRequest("rate", "expected string", hint='as rate = "10/m"')
    for key, kind in _TABLES.items():
        if isinstance(table.get(key), dict):
            _check_keys(f"{key}.", table[key], kind.__struct_fields__)
            table[key] = {k: _parsed(f"{key}.{k}", value) for k, value in table[key].items()}
    if isinstance(labels := table.get("labels"), dict):
        for name, globs in labels.items():
            _converted(globs, str | tuple[str, ...], f"labels.{name}")
    _check_texts(table)
    rule: Rule = _converted(table, Rule)
    _check(rule)
    return rule


def _check_keys(prefix: str, table: dict[str, Any], known: Iterable[str]) -> None:
    for key in table:
        if key not in known:
            raise InvalidRequest(f"{prefix}{key}", "unknown key", hint=did_you_mean(key, known))


def _parsed(path: str, value: Any) -> Any:
    """A duration, size or rate as a number; other values as they are."""
    if path not in _QUANTITIES or not isinstance(value, str):
        return value
    try:
        return _QUANTITIES[path](value)
    except ValueError as error:
        raise InvalidRequest(path, str(error)) from None


def _converted(value: Any, kind: Any, path: str = "") -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).replace(" | null", "").partition(" - at `$")
    raise _explained(problem, (path + at.rstrip("`")).lstrip("."))


def _explained(problem: str, path: str) -> InvalidRequest:
    """A conversion error in the words of TOML."""
    for name, word in _WORDS.items():
        problem = re.sub(rf"\b{name}\b(?=[^`']*`)", word, problem)
    problem = problem.replace("`", "").replace(" | ", " or ")
    problem = problem.replace("Object missing required field", "missing required key")
    hint = ""
    if unknown := re.search("Invalid enum value '(.*)'", problem):
        members = Decision if path == "decision" else Priority
        hint = did_you_mean(unknown[1], [member.value for member in members])
    return InvalidRequest(path, problem[0].lower() + problem[1:], hint=hint)


def _check_texts(table: dict[str, Any]) -> None:
    """No text has a control character, and no list or table of conditions is empty."""
    for path, value in _walk("", table):
        if isinstance(value, str) and _CONTROL.search(value):
            raise InvalidRequest(path, "has a control character")
        if value in ([], {}) and path not in (*_TABLES, "constraints.network"):
            raise InvalidRequest(path, "empty: leave it out to match everything")


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if path:
        yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(f"{path}.{key}" if path else key, item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(f"{path}[{index}]", item)


def _check(rule: Rule) -> None:
    check_name("id", rule.id)
    if rule.id == "default":
        raise InvalidRequest("id", "'default' is reserved: it names the default decision")
    if len(rule.reason) > _MAX_REASON:
        raise InvalidRequest("reason", f"longer than {_MAX_REASON:,} characters")
    for path, glob in _globs(rule):
        _check_glob(path, glob)
    for path, (least, most) in _RANGES.items():
        value: Any = rule
        for name in path.split("."):
            value = None if value is None else getattr(value, name)
        if value is not None:
            check_number(path, value, least, most)
    if rule.min_cost is not None and rule.max_cost is not None and rule.min_cost > rule.max_cost:
        raise InvalidRequest("max_cost", "less than min_cost: no job can match")
    _check_effects(rule)


def _globs(rule: Rule) -> Iterator[tuple[str, str]]:
    fields = ("topics", "tenants", "principals", "env_keys", "capabilities", "risk_tags")
    lists = {field: getattr(rule, field) for field in fields}
    for name, globs in rule.labels.items():
        if isinstance(globs, tuple):
            lists[f"labels.{name}"] = globs
        elif globs:  # an empty text matches a label without a value
            yield f"labels.{name}", globs
    if rule.approval is not None:
        lists["approval.approvers"] = rule.approval.approvers
    for path, globs in lists.items():
        for index, glob in enumerate(globs):
            yield f"{path}[{index}]", glob


def _check_glob(path: str, glob: str) -> None:
    if not 0 < len(glob) <= _MAX_GLOB:
        raise InvalidRequest(
            path, f"{glob[:20]!r} is not a valid glob", hint=f"1 to {_MAX_GLOB} characters"
        )
    if "[" in _CLASSES.sub("", glob):
        raise InvalidRequest(
            path, f"{glob!r} has a '[' that is not closed", hint="write [[] for the character"
        )


def _check_effects(rule: Rule) -> None:
    try:
        rule.verdict("")
    except ValueError as error:
        raise InvalidRequest("decision", str(error).partition(": ")[2]) from None
    constraints, approval = rule.constraints, rule.approval
    if constraints is not None:
        if constraints == Constraints():
            known = ", ".join(sorted(Constraints.__struct_fields__))
            raise InvalidRequest("constraints", "sets no limit", hint=f"known are {known}")
        for index, host in enumerate(constraints.network or ()):
            if not _HOST.fullmatch(host):
                path = f"constraints.network[{index}]"
                raise InvalidRequest(path, f"{host!r} is not a host, as api.example.org")
    if approval is not None and approval.approvers:
        named = {*approval.approvers}
        if len(named) < approval.needed and not any(map(is_pattern, named)):
            raise InvalidRequest(
                "approval.needed", f"{approval.needed} needed, but approvers lists {len(named)}"
            )


# -- the rules in force -----------------------------------------------------------------------


class Rulebook:
    """A service that checks the rule file every second, and reloads it on request.

    A changed file is used when it reads the same from one look to the next: half of a file
    can be valid TOML, and must not become the rules while the rest is being written.
    """

    def __init__(
        self, kernel: SafetyKernel, path: Path | None, clock: Clock, *, interval: float = 1.0
    ) -> None:
        self.kernel, self._path, self._clock, self._interval = kernel, path, clock, interval
        self._judged: bytes | None = None
        """The text that was accepted or refused last."""
        self._last_look: bytes | None = None
        self._reading = asyncio.Lock()
        self.on_change: Callable[[], None] = lambda: None
        """Called when the rules have changed."""
        self.loaded_at = clock.now()
        self.problem = ""
        """Why the current file was not accepted."""

    @property
    def source(self) -> str:
        return "" if self._path is None else str(self._path)

    def load(self) -> None:
        """Read the file before anything is judged. Raises Misconfigured."""
        if self._path is not None:
            self.kernel.use(load_rules(self._path))
            self.loaded_at = self._clock.now()

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._interval)
            await self.look()

    async def look(self) -> None:
        """Use the file if it changed, and has not since the last look."""
        if self._path is None:
            return
        async with self._reading:
            with suppress(Misconfigured):
                text = await self._read(self._path)
                before, self._last_look = self._last_look, text
                if text == before and text != self._judged:
                    await self._use(text)

    async def reload(self) -> RuleSet:
        """Read the file now. Raises Misconfigured, and keeps the last good rules."""
        if self._path is None:
            raise Misconfigured(
                "there is no rule file: the built-in rules allow everything",
                hint="name one with --rules or the setting 'rules', and start again",
            )
        async with self._reading:
            text = await self._read(self._path)
            if await self._read(self._path) != text:
                raise Misconfigured(
                    f"rules {self._path}: changed while it was read", hint="try again"
                )
            await self._use(text)
        return self.kernel.rules

    async def _read(self, path: Path) -> bytes:
        try:
            return await asyncio.to_thread(read_text, path)
        except Misconfigured as error:
            self._judged = None
            self._refuse(str(error))
            raise

    async def _use(self, text: bytes) -> None:
        self._judged, rules = text, None
        if snapshot_of(text) != self.kernel.rules.snapshot:
            try:
                rules = await asyncio.to_thread(parse_rules, text, self.source)
            except Misconfigured as error:
                self._refuse(str(error))
                raise
        if self.problem:
            log.info("rules %s: good again", self.source)
            self.problem = ""
        if rules is not None:
            self.kernel.use(rules)
            self.loaded_at = self._clock.now()
            log.info("rules %s: %d rules, now %s", self.source, len(rules.rules), rules.snapshot)
            self.on_change()

    def _refuse(self, problem: str) -> None:
        if problem != self.problem:
            log.error("%s; rules %s go on", problem, self.kernel.rules.snapshot)
        self.problem = problem


class PolicyService:
    """See `penstock.ports.engine_api.Policy`."""

    def __init__(self, rulebook: Rulebook, store: Ledger, guard: Guard) -> None:
        self._rulebook, self._store, self._guard = rulebook, store, guard

    async def current(self) -> PolicyView:
        self._guard.require(Policy.current)
        return self._view()

    def _view(self) -> PolicyView:
        book, rules = self._rulebook, self._rulebook.kernel.rules
        return PolicyView(
            rules.snapshot,
            book.source,
            book.loaded_at,
            rules.default,
            tuple(map(view, rules.rules)),
            book.problem,
        )

    async def explain(self, job_id: str) -> Explanation:
        job = self._guard.shown(await self._store.get(job_id), job_id)
        now, trace = self._rulebook.kernel.trace(job.request)
        return Explanation(job.job_id, job.verdict, now, trace)

    async def simulate(self, text: str, limit: int = 10_000) -> Simulation:
        self._guard.require(Policy.simulate)
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
            await asyncio.sleep(0)  # let others run between pages
        return Simulation(rules.snapshot, looked_at, dict(decisions), changed, tuple(differences))

    async def reload(self) -> PolicyView:
        with self._guard.doing(Policy.reload):
            await self._rulebook.reload()
            return self._view()


def _difference(job: Job, verdict: SafetyVerdict) -> Difference | None:
    """How a job would be judged, if differently; rule ids don't count."""
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


# -- descriptions -------------------------------------------------------------------------------


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
    who = f"of {', '.join(terms.approvers)}" if terms.approvers else "with the role approve"
    own = ", also their own jobs" if terms.self_approval else ""
    return f"by {terms.needed} {who}{own}, within {say_duration(terms.expires)}"


def _limits(constraints: Constraints) -> str:
    stated = {k: v for k, v in asdict(constraints).items() if v is not None and v is not False}
    return ", ".join(f"{name} {_SAID.get(name, str)(value)}" for name, value in stated.items())


_SAID: dict[str, Callable[[Any], str]] = {
    "max_runtime": say_duration,
    "max_memory": say_size,
    "max_output": say_size,
    "network": lambda hosts: ", ".join(hosts) or "none",
    "read_only": lambda _: "yes",
}
