"""Who waits for whom, and what their ends mean."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from penstock.control.dependencies import Dependencies, has_parents
from penstock.core.job import Job, ParentPolicy
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.testing.samples import a_job, a_request

_S = JobState


def child(seq: int = 1, *after: str, **fields: Any) -> Job:
    return a_job(f"c{seq}", seq=seq, after=after, **fields)


def parent(job_id: str, state: JobState = _S.SUCCEEDED, successor: str | None = None) -> Job:
    return replace(a_job(job_id, state=state), successor=successor)


def test_a_job_goes_when_all_that_it_waits_for_has_succeeded() -> None:
    waits = Dependencies()
    assert not waits.admit(child(1, "p", "q"))
    assert list(waits.unknown) == ["p", "q"]
    waits.look_up("p", parent("p"))
    waits.look_up("q", parent("q", _S.RUNNING))
    assert waits.take_released() == []
    waits.hear(parent("q"))
    assert waits.take_released() == [1]
    assert waits.admit(child(1, "p", "q"))
    waits.forget(1)
    assert not waits.members
    assert not waits.children


def test_a_parent_that_does_not_succeed_dooms_whoever_waits_for_it() -> None:
    for state in TERMINAL - {_S.SUCCEEDED}:
        waits = Dependencies()
        waits.admit(child(1, "p", "q"))
        waits.hear(parent("p", state))
        assert waits.doomed == {1: f"job p, which it waits for, ended {state}"}
        assert waits.take_released() == []
        assert not waits.children


def test_a_job_may_run_however_its_parents_end() -> None:
    waits = Dependencies()
    waits.admit(child(1, "p", "q", if_parent_fails=ParentPolicy.RUN))
    waits.look_up("p", None)
    waits.hear(parent("q", _S.FAILED))
    assert waits.take_released() == [1]
    assert not waits.doomed


def test_a_parent_that_is_not_in_the_store_counts_as_one_that_failed() -> None:
    waits = Dependencies()
    waits.admit(child(1, "p"))
    waits.look_up("p", None)
    assert waits.doomed == {1: "job p, which it waits for, is not in the store any more"}


def test_the_retry_of_a_parent_stands_in_for_it() -> None:
    waits = Dependencies()
    waits.admit(child(1, "p"))
    waits.look_up("p", parent("p", _S.FAILED, successor="p2"))
    waits.look_up("p2", parent("p2", _S.RUNNING))
    waits.hear(parent("p2", _S.TIMEOUT, successor="p3"))
    assert not waits.doomed
    waits.hear(parent("p3", _S.FAILED))
    assert waits.doomed == {1: "job p, which it waits for, ended FAILED (as p3)"}


def test_a_job_that_waits_for_a_parent_and_its_retry_waits_for_the_retry_once() -> None:
    waits = Dependencies()
    waits.admit(child(1, "p", "p2"))
    waits.hear(parent("p", _S.FAILED, successor="p2"))
    waits.hear(parent("p2"))
    assert waits.take_released() == [1]


def test_what_a_commit_told_is_not_overwritten_by_an_older_answer() -> None:
    waits = Dependencies()
    waits.admit(child(1, "p"))
    waits.hear(parent("p"))
    waits.look_up("p", parent("p", _S.RUNNING))
    assert waits.take_released() == [1]


def test_a_parent_is_looked_up_once_for_all_its_children() -> None:
    waits = Dependencies()
    for seq in range(1, 1001):
        waits.admit(child(seq, "p"))
    assert list(waits.unknown) == ["p"]
    waits.look_up("p", parent("p", _S.RUNNING))
    waits.admit(child(2000, "p"))
    assert not waits.unknown
    waits.hear(parent("p"))
    assert len(waits.take_released()) == 1001


def test_a_job_that_ended_while_it_waited_is_not_released() -> None:
    waits = Dependencies()
    waits.admit(child(1, "p"))
    waits.hear(parent("p"))
    waits.forget(1)
    assert waits.take_released() == []


def test_being_judged_again_does_not_begin_the_wait_anew() -> None:
    waits = Dependencies()
    waits.admit(child(1, "p", "q"))
    waits.hear(parent("p"))
    assert not waits.admit(child(1, "p", "q"))
    assert list(waits.unknown) == ["q"]
    waits.hear(parent("q", _S.FAILED))
    assert not waits.admit(child(1, "p", "q"))
    assert 1 in waits.doomed


def test_the_retry_of_a_child_that_ran_waits_for_nobody() -> None:
    assert has_parents(a_request(after=("p",)))
    assert not has_parents(a_request(after=("p",), retry_number=1))
    assert not has_parents(a_request())


def test_a_waiting_job_names_three_of_those_it_waits_for() -> None:
    waits = Dependencies()
    waits.admit(child(1, *(f"p{n}" for n in range(5))))
    states = {"p0": "RUNNING"}
    assert waits.why(1, lambda job_id: states.get(job_id, "waiting")) == (
        "it waits for p0 (RUNNING), p1 (waiting), p2 (waiting) and 2 more"
    )
    waits.hear(parent("p0", _S.FAILED))
    said = waits.why(1, lambda job_id: "")
    assert said is not None
    assert said.startswith("it is about to be cancelled: job p0")
    assert waits.why(2, lambda job_id: "") is None


class DependencyMachine(RuleBasedStateMachine):
    """Against a model that looks at every parent's chain each time."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Dependencies()
        self.jobs = {f"p{n}": parent(f"p{n}", _S.RUNNING) for n in range(4)}
        self.children: dict[int, Job] = {}
        self.released: set[int] = set()

    @rule(
        after=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        policy=st.sampled_from(ParentPolicy),
    )
    def admit(self, after: list[int], policy: ParentPolicy) -> None:
        seq = len(self.children) + 1
        job = child(seq, *(f"p{n}" for n in after), if_parent_fails=policy)
        self.children[seq] = job
        self.real.admit(job)

    @rule()
    def look_up(self) -> None:
        while self.real.unknown:
            job_id = next(iter(self.real.unknown))
            self.real.look_up(job_id, self.jobs.get(job_id))

    @rule(which=st.integers(0, 50), state=st.sampled_from(sorted(TERMINAL)), again=st.booleans())
    def end(self, which: int, state: JobState, again: bool) -> None:
        running = [job_id for job_id, job in self.jobs.items() if not job.is_final]
        if running:
            job_id = running[which % len(running)]
            successor = f"{job_id}r" if again and state is _S.FAILED else None
            self.jobs[job_id] = parent(job_id, state, successor)
            if successor is not None:
                self.jobs[successor] = parent(successor, _S.RUNNING)
            self.real.hear(self.jobs[job_id])

    def last(self, job_id: str) -> Job:
        while (successor := self.jobs[job_id].successor) is not None:
            job_id = successor
        return self.jobs[job_id]

    @invariant()
    def each_child_is_where_its_parents_put_it(self) -> None:
        self.look_up()
        self.released.update(self.real.take_released())
        for seq, job in self.children.items():
            parents = [self.last(job_id) for job_id in job.request.after]
            lenient = job.request.if_parent_fails is ParentPolicy.RUN
            failed = any(p.is_final and p.state is not _S.SUCCEEDED for p in parents)
            assert (seq in self.real.doomed) is (failed and not lenient)
            ended = all(p.is_final for p in parents)
            assert (seq in self.released) is (ended and (lenient or not failed))


TestDependencies = DependencyMachine.TestCase
TestDependencies.settings = settings(max_examples=50, stateful_step_count=25)
