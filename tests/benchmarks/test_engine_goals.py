"""The engine benchmark judges its goals by the figures of the run, and fails on wrong results."""

# The dash and the multiplication sign are those of the tables.
# ruff: noqa: RUF001

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

JUDGE = """
import json, sys
from engine import SIDES, goals, judged
results = json.load(sys.stdin)
print(json.dumps(judged(goals(results), results, SIDES).rows))
"""

TWICE = """
import sys
sys.path.insert(0, {folder!r})
import marks
once = marks.mark
marks.mark = lambda sent=0: (once(sent), once(sent))
"""


def judged(results):
    done = subprocess.run(
        [sys.executable, "-c", JUDGE],
        input=json.dumps(results),
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    return {(work, aim): found for work, aim, *found in json.loads(done.stdout)}


@pytest.mark.parametrize(("ours", "reached"), [(14_000, True), (13_999, False)])
def test_a_goal_beside_a_peer_is_judged_by_both_figures(ours, reached):
    found = judged({"drain-1": {"penstock": {"rate": ours}, "huey-fsync": {"rate": 1000}}})
    _, peer, ratio, verdict = found["drained, 1 worker process", "≥ 14×"]
    assert peer == "Huey, SQLite, fsync: 1,000/s"
    assert ratio == "14.0×"
    assert verdict is reached


def test_without_its_peer_a_goal_is_neither_reached_nor_missed():
    found = judged({"drain-1": {"penstock": {"rate": 50_000}}})
    _, peer, _, verdict = found["drained, 1 worker process", "≥ 14×"]
    assert peer == "Huey, SQLite, fsync: not measured"
    assert verdict is None


def test_what_was_not_measured_has_no_row():
    assert judged({}) == {}


@pytest.mark.parametrize(("p50", "reached"), [(1.30, True), (1.31, False)])
def test_the_latency_may_be_three_flushes_and_some(p50, reached):
    found = judged({"latency": {"penstock": {"p50_ms": p50, "limit_ms": 1.3}}})
    assert found["p50 latency at 100 jobs/s", "≤ 3 flushes + 0.7 ms"][3] is reached


@pytest.mark.parametrize(("beside", "reached"), [(750, True), (749, False)])
def test_running_jobs_may_lose_a_quarter_of_their_rate(beside, reached):
    figures = {"noop_one": 10, "noop_alone": 1000, "noop_beside": beside}
    found = judged({"submit-embedded": {"penstock": figures}})
    assert found["– the rate of that backlog meanwhile", "≥ 0.75×"][3] is reached


def test_the_share_of_http_is_that_of_the_faster_trivial_endpoint():
    rates = {"http-plain": 10_000, "http-bare": 20_000, "http-submit": 7_999}
    found = judged({name: {"penstock": {"rate": rate}} for name, rate in rates.items()})
    assert found["HTTP, one job a request", "≥ 0.4×"][2:] == ["0.40×", False]


@pytest.mark.parametrize(("many", "reached"), [(16, True), (17, False)])
def test_placement_may_cost_twice_as_much_among_ten_times_as_many(many, reached):
    found = judged({"placement": {"penstock": {"few_us": 8, "many_us": many}}})
    assert found["flat: placed among 1,000 workers, 10,000 tenants", "≤ 2×"][3] is reached


def test_flat_is_judged_by_the_worst_rung():
    costs = {1000: 50, 10_000: 61, 100_000: 55}
    found = judged({f"growth-{n}": {"penstock": {"total_us": us}} for n, us in costs.items()})
    assert found["flat: processor a job with 10,000 jobs stored", "≤ 1.2×"][3] is False


@pytest.mark.timeout(120)
def test_a_tiny_run_measures_every_way_to_submit_http_and_placement(tmp_path):
    figures = tmp_path / "figures.json"
    options = ["--tiny", "--no-peers", "--only", "submit,http,placement", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "engine.py"), *options, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(figures.read_text())["results"]
    names = {"submit-apart", "submit-embedded", "submit-async", "placement"}
    assert set(results) == names | {"http-plain", "http-bare", "http-submit"}
    assert all(value > 0 for found in results.values() for value in found["penstock"].values())
    assert "| HTTP, one job a request " in done.stdout


@pytest.mark.timeout(120)
def test_pgqueuer_is_measured_where_it_and_postgresql_are_installed_and_else_left_out(tmp_path):
    figures = tmp_path / "figures.json"
    options = ["--tiny", "--only", "submit-apart", "--json", str(figures)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "engine.py"), *options],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    everything = json.loads(figures.read_text())
    found = everything["results"]["submit-apart"].get("pgqueuer")
    if found is None:
        assert [note for note in everything["notes"] if note.startswith("PgQueuer, PostgreSQL")]
    else:
        assert min(found["one"], found["running_one"], found["bulk"]) > 0


def test_the_processor_time_of_a_drain_is_shown_by_module():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "cpu.py"), "--jobs", "2000"],
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr
    engine, worker = done.stdout.split("# worker")
    assert "| penstock/adapters/sqlite/" in engine
    assert "| penstock/worker/" in worker


def test_jobs_that_run_twice_fail_the_run_and_leave_the_page_alone(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(TWICE.format(folder=str(BENCHMARKS)))
    page = tmp_path / "page.md"
    page.write_text("<!-- figures -->\nold\n<!-- /figures -->\n")
    options = ["--tiny", "--no-peers", "--only", "drain-in-process", "--write", str(page)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "engine.py"), *options],
        capture_output=True,
        text=True,
        timeout=55,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1, done.stderr
    assert "**Penstock failed at drain-in-process**" in done.stdout
    assert "500 jobs were executed 1000 times" in done.stdout
    assert "old" in page.read_text()
