"""`penstock policy`: check, show, explain and simulate safety rules."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from penstock.cli.groups import Commands
from penstock.cli.ids import meant
from penstock.cli.paper import Listing, emit, print_json
from penstock.cli.parameters import as_json
from penstock.cli.place import Place, api_at, placed, run
from penstock.cli.terminal import echo
from penstock.cli.words import moment, plural, short_id
from penstock.core.verdict import Decision, SafetyVerdict
from penstock.ports.engine_api import Explanation, PolicyView, RuleTrace, RuleView, Simulation

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
@placed
def policy() -> None:
    """Check, show, explain and simulate safety rules."""


@policy.command()
@click.argument("file")
@as_json
def check(file: str, json: bool) -> None:
    """Check a rule file.

    Needs no engine. An error names the rule and the key.
    """
    from penstock.control.policy import view

    _, rules = _read(file)
    views = list(map(view, rules.rules))
    if json:
        print_json(
            {
                "snapshot": rules.snapshot,
                "default": rules.default,
                "rules": msgspec.to_builtins(views),
            }
        )
        return
    emit(f"{file}: {plural(len(views), 'rule')}, snapshot {rules.snapshot}", _rules(views, rules))


@policy.command()
@as_json
@placed
@click.pass_obj
def show(place: Place, json: bool) -> None:
    """Show the rules in force."""
    _print_policy(run(_current(place)), json)


@policy.command()
@as_json
@placed
@click.pass_obj
def reload(place: Place, json: bool) -> None:
    """Reload the rule file now.

    The engine does so by itself when the file has changed and then been still for a second.
    A file that is wrong is refused, and the rules in force stay.
    """
    _print_policy(run(_reload(place)), json)


@policy.command()
@click.argument("job")
@as_json
@placed
@click.pass_obj
def explain(place: Place, job: str, json: bool) -> None:
    """Explain the decision on a job.

    Shows how it was judged, how the rules in force judge it now, and every rule that was
    tried, with what it wanted and found. Of the environment only names are shown.
    """
    told = run(_explain(place, job))
    if json:
        print_json(msgspec.to_builtins(told))
    else:
        _print_explanation(told)


@policy.command()
@click.argument("file")
@click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=10_000,
    show_default=True,
    help="How many of the newest jobs to judge.",
)
@as_json
@placed
@click.pass_obj
def simulate(place: Place, file: str, limit: int, json: bool) -> None:
    """Show which past jobs other rules would have judged differently.

    Changes nothing.
    """
    text, _ = _read(file)
    told = run(_simulate(place, text, limit))
    if json:
        print_json(msgspec.to_builtins(told))
    else:
        _print_simulation(told)


# -- asking ---------------------------------------------------------------------------------


def _read(file: str) -> tuple[str, RuleSet]:
    """A rule file's text, and the rules in it. Raises Misconfigured."""
    from penstock.control.policy import parse_rules, read_text

    text = read_text(Path(file))
    rules = parse_rules(text, file)
    return text.decode(), rules


async def _current(place: Place) -> PolicyView:
    async with api_at(place) as api:
        return await api.policy.current()


async def _reload(place: Place) -> PolicyView:
    async with api_at(place) as api:
        return await api.policy.reload()


async def _explain(place: Place, text: str) -> Explanation:
    async with api_at(place) as api:
        return await api.policy.explain((await meant(api, text)).job_id)


async def _simulate(place: Place, text: str, limit: int) -> Simulation:
    async with api_at(place) as api:
        return await api.policy.simulate(text, limit)


# -- printing -------------------------------------------------------------------------------


def _print_policy(found: PolicyView, json: bool) -> None:
    if json:
        print_json(msgspec.to_builtins(found))
        return
    loaded = moment(found.loaded_at, time.time())
    source = found.source or "built-in: no rule file is set"
    emit(f"{source}, snapshot {found.snapshot}, since {loaded}", _rules(found.rules, found))
    if found.problem:
        echo(f"penstock: the current file was not accepted: {found.problem}", err=True)


def _rules(views: Sequence[RuleView], whole: PolicyView | RuleSet) -> Listing:
    listing = Listing(
        *("#", "RULE", "DECISION", "WHEN", "EFFECT", "REASON"),
        flexible=("RULE", "WHEN", "EFFECT", "REASON"),
        folded=("WHEN", "EFFECT", "REASON"),
        right=("#",),
    )
    for number, rule in enumerate(views, 1):
        when = "; ".join(f"{field}: {wanted}" for field, wanted in rule.conditions.items())
        listing.add(
            str(number),
            rule.id,
            coloured(rule.decision),
            when or "always",
            rule.effect,
            rule.reason,
        )
    listing.add("", "default", coloured(whole.default), "no rule matched", "", "")
    return listing


def coloured(decision: Decision) -> Text:
    from rich.text import Text

    return Text(decision.value, COLOURS[decision])


def _print_explanation(told: Explanation) -> None:
    from rich.text import Text

    emit(Text.assemble("job ", (told.job_id, "bold")))
    facts = Listing("", " ", header=False, flexible=(" ",), folded=(" ",))
    facts.add("judged", _verdict(told.then) if told.then else "without rules, or not yet")
    facts.add("now", _verdict(told.now))
    emit(facts, "", _trace(told))


def _verdict(verdict: SafetyVerdict) -> Text:
    from rich.text import Text

    from penstock.control.policy import effect_of

    effect = effect_of(verdict.approval, verdict.rate, verdict.constraints)
    return Text.assemble(
        coloured(verdict.decision),
        f" {effect}" if effect else "",
        f" by rule {verdict.rule_id} of {verdict.snapshot}",
        f": {verdict.reason}" if verdict.reason else "",
    )


def _trace(told: Explanation) -> Listing:
    listing = Listing(
        *("RULE", "MATCHES", "FIELD", "", "WANTED", "FOUND"),
        flexible=("RULE", "WANTED", "FOUND"),
        folded=("WANTED", "FOUND"),
    )
    for rule in told.trace:
        for cells in _steps(rule):
            listing.add(*cells)
    if not told.trace or not told.trace[-1].matched:
        listing.add("default", _answer(True), "(no rule matched)", "", "", "")
    return listing


def _steps(rule: RuleTrace) -> Iterator[tuple[str | Text, ...]]:
    """A line for each condition; the first also names the rule."""
    from rich.text import Text

    head: tuple[str | Text, str | Text] = (rule.rule_id, _answer(rule.matched))
    if not rule.conditions:
        yield (*head, "(everything)", "", "", "")
    for condition in rule.conditions:
        mark = Text("✓", "green") if condition.matched else Text("✗", "red")
        yield (*head, condition.field, mark, condition.wanted, condition.found)
        head = ("", "")


def _answer(matched: bool) -> Text:
    from rich.text import Text

    return Text("yes", "bold green") if matched else Text("no", "dim")


def _print_simulation(told: Simulation) -> None:
    otherwise = plural(told.changed, "job") if told.changed else "none"
    decisions = ", ".join(f"{name} {count:,}" for name, count in sorted(told.decisions.items()))
    emit(
        f"{plural(told.looked_at, 'job')} by rules {told.snapshot}: {decisions or 'nothing'}",
        f"{otherwise} would be judged otherwise",
    )
    if not told.differences:
        return
    listing = Listing(
        *("JOB", "TOPIC", "TENANT", "WAS", "WOULD BE"),
        flexible=("JOB", "TOPIC", "TENANT", "WAS", "WOULD BE"),
        folded=("WAS", "WOULD BE"),
    )
    for each in told.differences:
        listing.add(short_id(each.job_id), each.topic, each.tenant, each.was, each.would_be)
    emit("", listing)
    if (more := told.changed - len(told.differences)) > 0:
        echo(f"… and {more:,} more")
