"""What can be asked about the safety rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.ledgers import MemoryLedger

from penstock.control.guard import Guard
from penstock.control.policy import PolicyService, Rulebook, parse_rules, said, view
from penstock.control.safety import Rule, SafetyKernel
from penstock.core.errors import InvalidRequest, Misconfigured, NotFound
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.engine_api import OWNER, Policy
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import accept, move

RULES = """
default = "allow"

[[rules]]
id = "no-guests"
decision = "deny"
tenants = ["guest*"]
env_keys = ["AWS_*", "HOME"]
reason = "guests may not"
"""


class House:
    """A policy service on a rule file and an empty store."""

    def __init__(self, folder: Path, text: str | None = RULES) -> None:
        self.path = folder / "rules.toml"
        if text is not None:
            self.path.write_text(text)
        self.clock, self.store, self.kernel = VirtualClock(), MemoryLedger(), SafetyKernel()
        path = None if text is None else self.path
        self.book = Rulebook(self.kernel, path, self.clock)
        self.book.load()
        self.api: Policy = PolicyService(
            self.book, self.store, Guard(OWNER, self.store, self.clock)
        )

    async def judged(self, job_id: str, verdict: SafetyVerdict | None, **fields: Any) -> None:
        """A job that was let pass, or denied, with this verdict."""
        denied = verdict is not None and verdict.decision is Decision.DENY
        events = (JobEvent.SCHEDULE, JobEvent.DENY) if denied else (JobEvent.SCHEDULE,)
        step = move(job_id, *events, verdict=verdict)
        await self.store.apply([accept(job_id, **fields), step])


def verdict(decision: Decision, rule_id: str = "r", **effect: Any) -> SafetyVerdict:
    return SafetyVerdict(decision, rule_id, "old", **effect)


# -- current and reload ---------------------------------------------------------------------


@run_async
async def test_the_rules_in_force_are_told_with_their_file(tmp_path: Path) -> None:
    house = House(tmp_path)
    current = await house.api.current()
    assert current.source == str(house.path)
    assert current.snapshot == house.kernel.rules.snapshot
    assert (current.default, current.problem) == (Decision.ALLOW, "")
    assert current.loaded_at == house.clock.now()
    (rule,) = current.rules
    assert rule.conditions == {"tenants": "guest*", "env_keys": "AWS_* and HOME"}
    assert (rule.id, rule.reason, rule.effect) == ("no-guests", "guests may not", "")


@run_async
async def test_the_built_in_rules_come_from_no_file(tmp_path: Path) -> None:
    current = await House(tmp_path, None).api.current()
    assert (current.snapshot, current.source, current.rules) == ("built-in", "", ())


@run_async
async def test_a_reload_tells_the_new_rules_and_a_broken_file_is_told_of(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.path.write_text('default = "deny"')
    assert (await house.api.reload()).default is Decision.DENY
    house.path.write_text("oops")
    with pytest.raises(Misconfigured):
        await house.api.reload()
    current = await house.api.current()
    assert current.default is Decision.DENY
    assert "rules.toml: not valid TOML" in current.problem


# -- explain --------------------------------------------------------------------------------


@run_async
async def test_an_explanation_tells_then_and_now_and_every_step(tmp_path: Path) -> None:
    house = House(tmp_path)
    then = verdict(Decision.ALLOW, "former")
    await house.judged("a", then, tenant="guest", env={"AWS_KEY": "hush", "HOME": "hush"})
    told = await house.api.explain("a")
    assert (told.job_id, told.then) == ("a", then)
    assert (told.now.decision, told.now.rule_id) == (Decision.DENY, "no-guests")
    (rule,) = told.trace
    assert rule.matched
    assert [condition.field for condition in rule.conditions] == ["tenants", "env_keys", "env_keys"]
    assert "hush" not in str(told)


@run_async
async def test_no_job_no_explanation(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no job 'x'"):
        await House(tmp_path).api.explain("x")


# -- simulate -------------------------------------------------------------------------------


@run_async
async def test_a_simulation_tells_what_would_differ_and_changes_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.judged("same", verdict(Decision.ALLOW))
    await house.judged("denied-now", verdict(Decision.ALLOW, "former"), tenant="guest")
    await house.judged("built-in", None, tenant="guest")
    await house.judged("let-go", verdict(Decision.DENY, "strict"))
    text = 'default = "allow"\n[[rules]]\nid = "n"\ndecision = "deny"\ntenants = ["guest"]'
    before = await house.store.get("denied-now")
    told = await house.api.simulate(text)
    assert (told.looked_at, told.changed) == (4, 3)
    assert told.decisions == {"allow": 2, "deny": 2}
    assert told.snapshot == parse_rules(text.encode(), "").snapshot
    assert [(d.job_id, d.was, d.would_be) for d in told.differences] == [
        ("let-go", "deny (strict)", "allow (default)"),
        ("built-in", "allow (built-in)", "deny (n)"),
        ("denied-now", "allow (former)", "deny (n)"),
    ]
    assert (told.differences[2].tenant, told.differences[2].topic) == ("guest", "job.test")
    assert await house.store.get("denied-now") == before
    assert [rule.id for rule in house.kernel.rules.rules] == ["no-guests"]


@run_async
async def test_another_rule_with_the_same_effect_is_no_difference_another_effect_is(
    tmp_path: Path,
) -> None:
    house = House(tmp_path)
    await house.judged("a", verdict(Decision.THROTTLE, "old", rate=Rate(10, 60.0)))
    text = 'default = "allow"\n[[rules]]\nid = "new"\ndecision = "throttle"\nrate = "{}"'
    assert (await house.api.simulate(text.format("10/m"))).changed == 0
    (difference,) = (await house.api.simulate(text.format("5/m"))).differences
    assert (difference.was, difference.would_be) == ("throttle 10/m (old)", "throttle 5/m (new)")


@run_async
async def test_a_job_that_was_not_judged_yet_is_no_difference(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.store.apply([accept("a")])
    told = await house.api.simulate('default = "deny"')
    assert (told.looked_at, told.decisions, told.changed) == (1, {"deny": 1}, 0)


@run_async
async def test_a_job_denied_before_verdicts_were_kept_counts_as_denied(tmp_path: Path) -> None:
    house = House(tmp_path)
    await house.store.apply([accept("a"), move("a", JobEvent.SCHEDULE, JobEvent.DENY)])
    assert (await house.api.simulate('default = "deny"')).changed == 0
    assert (await house.api.simulate('default = "allow"')).changed == 1


@pytest.mark.parametrize("limit", [1, 499, 500, 501, 1000, 1200, 5000])
@run_async
async def test_the_newest_jobs_are_looked_at_each_once(tmp_path: Path, limit: int) -> None:
    house = House(tmp_path)
    jobs = [f"j{n}" for n in range(1200)]
    await house.store.apply([accept(name) for name in jobs])
    await house.store.apply([move(name, JobEvent.SCHEDULE) for name in jobs])
    told = await house.api.simulate('default = "deny"', limit)
    expected = jobs[::-1][:limit]
    assert (told.looked_at, told.changed) == (len(expected), len(expected))
    assert [d.job_id for d in told.differences] == expected[:1000]


@run_async
async def test_a_simulation_that_cannot_be_is_refused(tmp_path: Path) -> None:
    house = House(tmp_path)
    with pytest.raises(Misconfigured, match="rules given: oops: unknown key"):
        await house.api.simulate('default = "deny"\noops = 1')
    with pytest.raises(Misconfigured, match="not UTF-8"):
        await house.api.simulate('default = "\ud800"')
    for limit in (0, -1, 10_000_000):
        with pytest.raises(InvalidRequest, match="limit"):
            await house.api.simulate('default = "deny"', limit)


# -- in words -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effect", "words"),
    [
        ({"approval": ApprovalTerms()}, "by 1 with the role approve, within 1d"),
        (
            {"approval": ApprovalTerms(2, ("ada", "ops-*"), 90.0, True)},
            "by 2 of ada, ops-*, also their own jobs, within 90s",
        ),
        ({"rate": Rate(5, 30.0)}, "5/30s"),
        (
            {"constraints": Constraints(600.0, 0, 3, 512 << 20, 1000, (), True)},
            "max_runtime 10m, max_retries 0, max_concurrent 3, max_memory 512MiB,"
            " max_output 1000B, network none, read_only yes",
        ),
        ({"constraints": Constraints(network=("a", "b"))}, "network a, b"),
    ],
)
def test_an_effect_is_told_in_words(effect: dict[str, Any], words: str) -> None:
    rule = Rule("r", Decision.ALLOW, **effect)
    assert view(rule).effect == words
    assert said(verdict(Decision.ALLOW, "r", **effect)) == f"allow {words} (r)"
