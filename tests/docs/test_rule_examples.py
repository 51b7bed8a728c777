"""Every rule file that the pages show is accepted by `policy check`, and jobs run under it."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.support.network import leaving_is_permitted

import penstock
from penstock.cli.program import run

JOBS = Path(__file__).parents[1] / "support" / "jobs"
IN_PROCESSES = {"docs/how-to/process-mode.md"}
"""Pages whose rules are about functions in processes of their own."""
WRONG = "wrong.toml"
"""The name of a file that a page shows as one that is refused."""
ENDS = {
    "allow": "SUCCEEDED",
    "throttle": "SUCCEEDED",
    "allow_with_constraints": "SUCCEEDED",
    "deny": "DENIED",
    "require_approval": "PARKED",
}


def rule_files(blocks: list[Any]) -> list[tuple[Any, dict[str, Any]]]:
    found = [(block, tomllib.loads(block.text)) for block in blocks if block.kind == "toml"]
    return [(block, text) for block, text in found if re.search(r"^\[\[rule", block.text, re.M)]


def test_rule_files_of_the_pages_are_accepted(
    all_blocks: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = []
    files = rule_files(all_blocks)
    for block, _ in files:
        path = tmp_path / "rules.toml"
        path.write_text(block.text)
        if bool(run(["policy", "check", str(path)])) != (block.value == WRONG):
            refused.append(f"{block.place}: {capsys.readouterr().err}")
    assert refused == []
    assert len({block.page for block, _ in files}) >= 4


def test_a_job_that_matches_a_rule_of_the_pages_ends_as_it_says(
    all_blocks: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(JOBS))
    wrong, tried = [], 0
    for number, (block, text) in enumerate(rule_files(all_blocks)):
        if block.value == WRONG:
            continue
        path = tmp_path / f"{number}.toml"
        path.write_text(block.text)
        # An embedded engine knows one principal, its owner.
        rules = [rule for rule in text["rules"] if "principals" not in rule]
        app = application(map(topic_of, rules), block.page in IN_PROCESSES)
        with app.run(tmp_path / str(number), rules=str(path)) as ps:
            for rule in rules:
                job = ps.submit(topic_of(rule), {"number": 1}, **matching(rule))
                got = outcome(job, rule["decision"])
                ends = ENDS[rule["decision"]]
                if "network" in rule.get("constraints", ()) and not leaving_is_permitted():
                    ends = "FAILED"  # what can't be enforced here is not run
                if got != (ends, rule["id"]):
                    wrong.append((block.place, rule["id"], got, job.refresh().result))
                tried += 1
    assert wrong == []
    assert tried >= 8


def application(topics: Iterable[str], in_processes: bool) -> penstock.App:
    double = import_module("process_jobs").double

    async def double_here(number: int) -> int:
        return number * 2

    app = penstock.App()
    for topic in set(topics):
        app.job(topic, mode="process")(double) if in_processes else app.job(topic)(double_here)
    return app


def topic_of(rule: dict[str, Any]) -> str:
    return literal(rule.get("topics", ["job.any.thing"])[0])


def matching(rule: dict[str, Any]) -> dict[str, Any]:
    """Options of a job that meets a rule's conditions."""
    options: dict[str, Any] = {"estimated_cost": rule.get("max_cost", rule.get("min_cost"))}
    for key, option in (("tenants", "tenant"), ("capabilities", "capability")):
        if key in rule:
            options[option] = literal(rule[key][0])
    if "priorities" in rule:
        options["priority"] = rule["priorities"][0]
    options["risk_tags"] = [literal(tag) for tag in rule.get("risk_tags", [])]
    options["env"] = {literal(name): "x" for name in rule.get("env_keys", [])}
    options["labels"] = {name: literal(glob) for name, glob in rule.get("labels", {}).items()}
    return {option: value for option, value in options.items() if value}


def literal(glob: str | list[str]) -> str:
    return (glob if isinstance(glob, str) else glob[0]).replace("*", "x")


def outcome(job: penstock.JobHandle[Any], decision: str) -> tuple[str, str]:
    """How the job ended, or that it waits for approval; and the rule that decided."""
    if decision == "require_approval":
        deadline = time.monotonic() + 20
        while (record := job.refresh()).hold is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert record.verdict is not None
        return "PARKED", record.verdict.rule_id
    record = job.wait(20)
    assert record.verdict is not None
    return record.state, record.verdict.rule_id
