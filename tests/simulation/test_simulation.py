"""Seeded histories of the whole engine, each checked: over memory, and fewer over SQLite.

PENSTOCK_HISTORIES says how many (an eighth of them over SQLite), PENSTOCK_SEED where to begin;
a failure names its seed.
"""

from __future__ import annotations

import os
import random

import pytest
from tests.support.simulation.history import (
    Began,
    ChildGiven,
    LimitsSet,
    RulesSet,
    Told,
    TookBack,
    WaitBegan,
    WaitEnded,
)
from tests.support.simulation.simulator import failing, simulate

from penstock.core.verdict import Decision
from penstock.lifecycles.canonical import JobState

HISTORIES = int(os.environ.get("PENSTOCK_HISTORIES", "400"))
PIECES = 4
FIRST = int(os.environ.get("PENSTOCK_SEED", "0")) or random.randrange(1 << 32)


@pytest.mark.parametrize("piece", range(PIECES))
def test_every_promise_is_kept_in_every_history(piece: int) -> None:
    # The seed is in the report and not in the test's name, which workers of xdist must agree on.
    size = HISTORIES // PIECES
    first = FIRST + piece * size
    bad = [simulated.report() for simulated in failing(range(first, first + size))]
    over_sqlite = range(first, first + size // 8)
    bad += [simulated.report() for simulated in failing(over_sqlite, sqlite=True)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("sqlite", [False, True])
def test_a_seed_makes_the_same_history_every_time(sqlite: bool) -> None:
    one, two = simulate(11, sqlite=sqlite), simulate(11, sqlite=sqlite)
    assert one.history.events == two.history.events
    assert one.history.records == two.history.records


def test_histories_are_not_empty() -> None:
    runs = ends = 0
    for seed in range(20):
        events = simulate(seed).history.events
        runs += sum(isinstance(event, Began) for event in events)
        ends += sum(isinstance(event, Told) for event in events)
    assert runs > 40
    assert ends > 40


def test_histories_go_through_the_gate() -> None:
    approved = expired = children = orphans = limited = changes = 0
    for seed in range(150):
        history = simulate(seed).history
        for job in history.records.values():
            code = "" if job.result is None else job.result.error_code
            asked = job.verdict is not None and job.verdict.decision is Decision.REQUIRE_APPROVAL
            approved += bool(asked and job.attempt)
            expired += code == "APPROVAL_EXPIRED"
            children += bool(job.request.after and job.attempt)
            orphans += code == "PARENT_FAILED"
        limited += any(isinstance(event, LimitsSet) and event.limits for event in history.events)
        changes += sum(isinstance(event, RulesSet) for event in history.events) > 1
    assert min(approved, expired, children, orphans, limited, changes) >= 10


def test_histories_have_parents_that_wait_and_children_that_end_with_them() -> None:
    waits = broken_off = took_back = runs_again = retries = doomed = spared = 0
    for seed in range(150):
        history = simulate(seed).history
        given = [event for event in history.events if isinstance(event, ChildGiven)]
        attempts = {(event.job_id, event.attempt) for event in given}
        runs_again += len(attempts) - len({job_id for job_id, _ in attempts})
        retries += sum(
            history.records[job_id].request.first_try is not None for job_id, _ in attempts
        )
        waits += sum(isinstance(event, WaitBegan) for event in history.events)
        broken_off += sum(
            isinstance(event, WaitEnded) and event.is_broken_off for event in history.events
        )
        took_back += sum(isinstance(event, TookBack) for event in history.events)
        for job in history.records.values():
            parent = history.records.get(job.request.child_of or "")
            while parent is not None and parent.successor is not None:
                parent = history.records[parent.successor]
            if parent is not None and parent.state is not JobState.SUCCEEDED:
                doomed += job.state is JobState.CANCELLED
                spared += job.request.detached and job.state is not JobState.CANCELLED
    assert min(waits, broken_off, took_back, retries, doomed, spared) >= 10
    assert runs_again >= 5
