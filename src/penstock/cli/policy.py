"""`penstock policy`: check, show, explain and simulate safety rules."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.app.finding import find_job
from penstock.cli.engine import EngineRef, engine_options
from penstock.cli.formats import Whole, moment, plural
from penstock.cli.groups import Commands
from penstock.cli.options import options
from penstock.cli.output import (
    Form,
    JobId,
    Listing,
    Row,
    Wrapped,
    echo,
    emit,
    facts,
    print_json,
    print_one,
    rich_text,
    warn,
)
from penstock.core.verdict import Decision, SafetyVerdict
from penstock.ports.engine_api import (
    EngineApi,
    Explanation,
    PolicyView,
    RuleTrace,
    RuleView,
    Simulation,
)

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.control.safety import RuleSet

COLOURS = {
    Decision.ALLOW: "green",
    Decision.DENY: "bold red",
    Decision.REQUIRE_APPROVAL: "yellow",
    Decision.THROTTLE: "cyan",
    Decision.ALLOW_WITH_CONSTRAINTS: "blue",
}


@click.group(cls=Commands)
@engine_options
def policy() -> None:
    """Check, show, explain and simulate safety rules."""


@policy.command()
def check(file: str, form: Form) -> None:
    """Check a rule file.

    Needs no engine. An error names the rule and the key.
    """
    from penstock.control.policy import view

    _, rules = _read(file)
    views = list(map(view, rules.rules))
    head = f"{file}: {plural(len(views), 'rule')}, snapshot {rules.snapshot}"
    fields = {"snapshot": rules.snapshot, "default": rules.default, "rules": views}
    print_one(form, fields, rules.snapshot, lambda: [head, _rules(views, rules)])


@policy.command()
async def show(api: EngineApi, form: Form) -> None:
    """Show the rules in force."""
    _print_policy(await api.policy.current(), form)


@policy.command()
async def reload(api: EngineApi, form: Form) -> None:
    """Reload the rule file now.

    The engine does so by itself a second after the file was last changed.
    A file that is wrong is refused, and the rules in force stay.
    """
    _print_policy(await api.policy.reload(), form)


@policy.command()
async def explain(api: EngineApi, job: str, json: bool) -> None:
    """Explain the decision on a job.

    Shows how it was judged, how the rules in force judge it now, and every rule that was
    tried, with what it wanted and found. Values of environment variables are not shown.
    """
    told = await api.policy.explain((await find_job(api, job)).job_id)
    print_json(told) if json else _print_explanation(told)


@policy.command()
@options("-n, --limit 1..1000000=10000  How many of the newest jobs to judge.")
def simulate(engine: EngineRef, file: str, limit: int, json: bool) -> None:
    """Show which past jobs other rules would have judged differently.

    Changes nothing.
    """
    text, _ = _read(file)
    told = engine.ask(lambda api: api.policy.simulate(text, limit))
    print_json(told) if json else _print_simulation(told)


def _read(file: str) -> tuple[str, RuleSet]:
    """A rule file's text, and the rules in it. Raises Misconfigured."""
    from penstock.control.policy import parse_rules, read_text

    text = read_text(Path(file))
    rules = parse_rules(text, file)
    return text.decode(), rules


# -- printing -------------------------------------------------------------------------------


def _print_policy(found: PolicyView, form: Form) -> None:
    loaded = moment(found.loaded_at, time.time())
    source = found.source or "built-in: no rule file is set"
    head = f"{source}, snapshot {found.snapshot}, since {loaded}"
    print_one(form, found, found.snapshot, lambda: [head, _rules(found.rules, found)])
    if found.problem:
        warn(f"the current file was not accepted: {found.problem}")


def _rules(views: Sequence[RuleView], whole: PolicyView | RuleSet) -> Listing:
    rows: list[Row] = []
    for number, rule in enumerate(views, 1):
        when = "; ".join(f"{field}: {wanted}" for field, wanted in rule.conditions.items())
        said = (rule.id, rule.decision, when or "always", rule.effect, rule.reason)
        rows.append(_rule(number, *said))
    return Listing([*rows, _rule(None, "default", whole.default, "no rule matched")])


def _rule(
    number: int | None, name: str, decision: Decision, when: str, effect: str = "", reason: str = ""
) -> Row:
    return {
        "#": number,
        "RULE": name,
        "DECISION": coloured(decision),
        "WHEN": Wrapped(when),
        "EFFECT": Wrapped(effect),
        "REASON": Wrapped(reason),
    }


def coloured(decision: Decision) -> Text:
    return rich_text((decision.value, COLOURS[decision]))


def _print_explanation(told: Explanation) -> None:
    judged = _verdict(told.then) if told.then else "without rules, or not yet"
    rows = [row for rule in told.trace for row in _steps(rule)]
    if not told.trace or not told.trace[-1].matched:
        rows.append(_step("default", _YES, "(no rule matched)"))
    emit(
        rich_text("job ", (told.job_id, "bold")),
        facts([("judged", judged), ("now", _verdict(told.now))]),
        "",
        Listing(rows),
    )


def _verdict(verdict: SafetyVerdict) -> Text:
    from penstock.control.policy import effect_of

    effect = effect_of(verdict.approval, verdict.rate, verdict.constraints)
    return rich_text(
        coloured(verdict.decision),
        f" {effect}" if effect else "",
        f" by rule {verdict.rule_id} of {verdict.snapshot}",
        f": {verdict.reason}" if verdict.reason else "",
    )


_YES, _NO = ("yes", "bold green"), ("no", "dim")
_MET, _NOT_MET = ("✓", "green"), ("✗", "red")


def _steps(rule: RuleTrace) -> Iterator[Row]:
    """A line for each condition; the first also names the rule."""
    name, answer = rule.rule_id, _YES if rule.matched else _NO
    if not rule.conditions:
        yield _step(name, answer, "(everything)")
    for condition in rule.conditions:
        mark = _MET if condition.matched else _NOT_MET
        yield _step(name, answer, condition.field, mark, condition.wanted, condition.found)
        name, answer = "", ("", "")


def _step(
    name: str,
    answer: tuple[str, str],
    field: str,
    mark: tuple[str, str] = ("", ""),
    wanted: str = "",
    found: str = "",
) -> Row:
    return {
        "RULE": name,
        "MATCHES": rich_text(answer),
        "FIELD": Whole(field),
        "": rich_text(mark),
        "WANTED": Wrapped(wanted),
        "FOUND": Wrapped(found),
    }


def _print_simulation(told: Simulation) -> None:
    otherwise = plural(told.changed, "job") if told.changed else "none"
    decisions = ", ".join(f"{name} {count:,}" for name, count in sorted(told.decisions.items()))
    emit(
        f"{plural(told.looked_at, 'job')} by rules {told.snapshot}: {decisions or 'nothing'}",
        f"{otherwise} would be judged otherwise",
    )
    if not told.differences:
        return
    rows: list[Row] = [
        {
            "JOB": JobId(each.job_id),
            "TOPIC": each.topic,
            "TENANT": each.tenant,
            "WAS": Wrapped(each.was),
            "WOULD BE": Wrapped(each.would_be),
        }
        for each in told.differences
    ]
    emit("", Listing(rows))
    if (more := told.changed - len(told.differences)) > 0:
        echo(f"… and {more:,} more")
