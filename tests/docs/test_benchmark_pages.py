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
def engine(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    yield import_module("engine")
    for name in set(sys.modules) - before:
        sys.modules.pop(name)


NONE = "\u2013"


def origin(options: str = "", busy: int = 0) -> str:
    said = import_module("report").origin(
        {
            "command": f"python benchmarks/engine.py {options}",
            "date": "2030-01-01",
            "machine": {"others": f"kept the cores {busy}% busy (median), at most 100%"},
        }
    )
    return "\n".join(said)


def test_verdicts_stand_only_between_the_marks_of_figures(pages: dict[str, str]) -> None:
    benchmarks = {name: text for name, text in pages.items() if "reference/benchmarks" in name}
    assert len(benchmarks) == 8
    for name, text in benchmarks.items():
        prose = re.sub(r"<!-- figures -->.*<!-- /figures -->", "", text, flags=re.S)
        assert prose != text, name
        assert re.findall(r"\b(?:reached|missed)\b", prose) == [], name
        # The only measure in the text is a setting: how long HTTP gathers events.
        measured = re.findall(r"\d[\d.,]* ?(?:ms|µs|s|\u00d7|x|%|/s)(?!\w)", prose)
        assert [figure for figure in measured if figure != "20 ms"] == [], name


def test_what_peers_can_not_do_is_not_set_against_what_they_can(engine: Any) -> None:
    one, bulk = {"one": 50.0}, {"one": 10.0, "bulk": 500.0}
    results = {
        "submit-apart": {engine.PENSTOCK: {"one": 100.0}, engine.HUEY: one, engine.PGQUEUER: bulk},
        "submit-async": {engine.PENSTOCK: {"one": 200.0, "many": 1000.0, "bulk": 2000.0}},
    }
    drawn = engine.by_side(results, engine.ROWS, engine.SIDES)
    lines = [line.split("|")[1:-1] for line in drawn.splitlines()]
    cells = {label.strip(): [cell.strip() for cell in row] for label, *row in lines}
    one_by_one = "submitted one after another, synchronous, engine apart, jobs/s"
    assert cells[one_by_one] == ["100", "50 (2.0\u00d7)", "10 (10.0\u00d7)"]
    in_flight = "submitted one by one, 64 in flight, jobs/s"
    assert cells[in_flight] == ["1,000", NONE, NONE]
    many = cells["submitted, 1,000 a call, jobs/s"]
    assert many == ["2,000", NONE, "500 (4.0\u00d7)"]


def test_a_quick_run_and_a_busy_machine_are_said(engine: Any) -> None:
    quiet = origin()
    assert "quiet" not in quiet
    assert "quick" not in quiet
    loud = origin("--quick", 98)
    assert "**The machine was not quiet:**" in loud
    assert "**A quick run:**" in loud
