"""What the pages of benchmarks say is made from their figures, and compares like with like."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def report(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    yield import_module("report")
    for name in ("report", "side"):
        sys.modules.pop(name, None)


def everything(**others: Any) -> dict[str, Any]:
    return {
        "command": "python benchmarks/engine.py",
        "date": "2030-01-01",
        "machine": {"others": "kept the cores 0% busy (median), at most 2%"},
        "notes": [],
        "results": {},
        "growth": [],
        "memory": {},
        **others,
    }


def test_verdicts_stand_only_between_the_marks_of_figures(pages: dict[str, str]) -> None:
    benchmarks = {name: text for name, text in pages.items() if "reference/benchmarks" in name}
    assert len(benchmarks) == 6
    for name, text in benchmarks.items():
        prose = re.sub(r"<!-- figures -->.*<!-- /figures -->", "", text, flags=re.S)
        assert prose != text, name
        assert re.findall(r"\b(?:reached|missed)\b", prose) == [], name


def test_what_peers_can_not_do_is_not_set_against_what_they_can(report: Any) -> None:
    submit = {
        report.PENSTOCK: {"one": 100.0, "many": 1000.0, "bulk": 2000.0},
        report.HUEY: {"one": 50.0},
    }
    page = report.page(everything(results={"submit": submit}))
    rows = {
        row.split("|")[1].strip(): row.split("|")[2:4] for row in page.splitlines() if "|" in row
    }
    cells = {label: [cell.strip() for cell in row] for label, row in rows.items()}
    assert cells["submitted one after another, jobs/s"] == ["100", "50 (2.0\u00d7)"]
    assert cells["submitted one by one, 64 in flight, jobs/s"] == ["1,000", report.NONE]
    assert cells["submitted in bulk, jobs/s"] == ["2,000", report.NONE]


def test_a_quick_run_and_a_busy_machine_are_said(report: Any) -> None:
    quiet = report.page(everything())
    assert "quiet" not in quiet
    assert "quick" not in quiet
    busy = {"others": "kept the cores 98% busy (median), at most 100%"}
    loud = report.page(everything(machine=busy, command="python benchmarks/engine.py --quick"))
    assert "**The machine was not quiet:**" in loud
    assert "**A quick run:**" in loud
