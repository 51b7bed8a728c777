"""`advance` and `fold` are separate code for the same facts: they must agree on every life."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.core.job import Job, JobResult
from penstock.core.journal import BrokenLog, Folded, Transition, fold
from penstock.core.ledger import ChangeOutcome, Decider, Known, Move, advance
from penstock.lifecycles.canonical import ACTORS, CANONICAL, TERMINAL, JobEvent, JobState, Role
from penstock.testing.samples import T0, accept

EVENTS = [event for event in JobEvent if event is not JobEvent.ACCEPT]

moves = st.builds(
    Move,
    job_id=st.just("a"),
    events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3).map(tuple),
    actor=st.sampled_from(Role).map(lambda role: f"{role}:someone"),
    at=st.floats(T0 - 100, T0 + 100),
    version=st.none() | st.integers(1, 12),
    attempt=st.none() | st.integers(0, 4),
    worker_id=st.sampled_from(["w1", "w2"]),
    pool=st.sampled_from(["p1", "p2"]),
    result=st.builds(
        JobResult, job_id=st.just("a"), status=st.sampled_from(sorted(TERMINAL)), attempt=st.just(1)
    ),
    then=st.sampled_from([(), (accept("b", parent_job_id="a"),)]),
)


@dataclass
class Life:
    job: Job
    log: list[Transition]

    def take(self, move: Move) -> ChangeOutcome:
        before = self.job
        answer = advance(before, move)
        assert answer.job is not None
        if not answer.moved:
            assert answer.job is before
            assert answer.transitions == ()
            assert bool(answer.why) is (answer.verdict is ChangeOutcome.REFUSED)
        self.job = answer.job
        self.log.extend(answer.transitions)
        return answer.verdict


def born() -> Life:
    (answer,) = Decider({}, Known(), 1, 1).decide([accept("a")])
    assert answer.job is not None
    return Life(answer.job, list(answer.transitions))


def legal(job: Job, data: st.DataObject) -> Move:
    """A move that some role may make right now."""
    events = [event for before, event, _ in CANONICAL if before is job.state]
    event = data.draw(st.sampled_from(events))
    role = data.draw(st.sampled_from(sorted(ACTORS[event])))
    at = data.draw(st.floats(T0 - 100, T0 + 100))
    result = JobResult(job_id="a", status=JobState.FAILED)
    return Move("a", (event,), role.value, at, worker_id="w1", result=result)


@given(st.lists(moves, max_size=40))
def test_whatever_is_asked_the_record_is_the_fold_of_its_log(asked: list[Move]) -> None:
    life = born()
    for move in asked:
        life.take(move)
        assert fold(life.log) == Folded.of(life.job)
        assert [entry.n for entry in life.log] == list(range(1, life.job.version + 1))


@given(st.data(), st.integers(1, 30))
def test_every_legal_life_folds(data: st.DataObject, steps: int) -> None:
    life = born()
    for _ in range(steps):
        life.take(legal(life.job, data))
    assert fold(life.log) == Folded.of(life.job)


@given(st.data(), st.lists(moves, min_size=1, max_size=20))
def test_nothing_but_notes_follows_an_end(data: st.DataObject, asked: list[Move]) -> None:
    life = born()
    while not life.job.is_final:
        life.take(legal(life.job, data))
    ended = life.job
    for move in asked:
        life.take(move)
    assert life.job.state is ended.state
    assert (life.job.finished_at, life.job.result) == (ended.finished_at, ended.result)
    assert {entry.event for entry in life.log[ended.version :]} <= {JobEvent.NOTE}


@pytest.mark.seed("001", "6.2")
@given(st.lists(moves, max_size=40))
def test_attempts_count_up_by_one_and_only_when_work_is_given_out(asked: list[Move]) -> None:
    life = born()
    for move in asked:
        life.take(move)
    attempt = 0
    for entry in life.log:
        given_out = entry.event in (JobEvent.DISPATCH, JobEvent.REDISPATCH)
        attempt += given_out
        assert entry.attempt == attempt
        assert (entry.worker_id is not None) is given_out


@given(st.lists(moves, min_size=1, max_size=30))
def test_a_move_made_twice_moves_once(asked: list[Move]) -> None:
    life = born()
    for move in asked:
        if life.take(replace(move, version=life.job.version)) is ChangeOutcome.MOVED:
            stale = replace(move, version=life.job.version - 1)
            assert life.take(stale) is ChangeOutcome.REFUSED


@given(st.data(), st.integers(2, 20))
def test_a_log_that_lost_or_gained_an_entry_does_not_fold(data: st.DataObject, steps: int) -> None:
    life = born()
    for _ in range(steps):
        life.take(legal(life.job, data))
    place = data.draw(st.integers(0, len(life.log) - 2))
    with pytest.raises(BrokenLog):
        fold(life.log[:place] + life.log[place + 1 :])
    with pytest.raises(BrokenLog):
        fold([*life.log[: place + 1], *life.log[place:]])


def test_an_empty_log_does_not_fold() -> None:
    with pytest.raises(BrokenLog):
        fold([])
