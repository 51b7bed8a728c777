"""What a server knows of the queued jobs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import Priority
from penstock.workloads.spool.disk.workspace import turn_of
from penstock.workloads.spool.server.scanner import Queue, Waiting


def waiting(job_id: str, **more: object) -> Waiting:
    return Waiting(job_id=job_id, turn=turn_of(job_id, Priority.BATCH, 1e9), **more)  # type: ignore[arg-type]


def popped(queue: Queue) -> list[str]:
    return [waiting.job_id for waiting in iter(queue.pop, None)]


@pytest.mark.seed("004", "3.6")
@given(st.lists(st.integers(0, 10**12), unique=True))
def test_jobs_come_out_in_the_order_of_their_turns_whatever_the_order_they_came_in(
    numbers: list[int],
) -> None:
    queue = Queue()
    queue.add(waiting(str(number)) for number in numbers)
    turns = [turn_of(job_id, Priority.BATCH, 1e9) for job_id in popped(queue)]
    assert turns == sorted(turns)
    assert len(turns) == len(numbers)
    assert len(queue) == 0


@pytest.mark.seed("004", "3.6", "14.12")
def test_a_job_is_learned_once_and_again_when_it_comes_back() -> None:
    queue = Queue()
    queue.add([waiting("1"), waiting("1")])
    assert popped(queue) == ["1"]
    assert "1" not in queue
    queue.add([waiting("1")])
    assert popped(queue) == ["1"]


def test_a_child_comes_out_after_its_parent_has_ended() -> None:
    queue = Queue()
    queue.add([waiting("1_1", parent="9"), waiting("1_2", parent="9"), waiting("1_3")])
    assert popped(queue) == ["1_3"]
    assert list(queue.parents) == ["9"]
    assert not queue.release("8")
    assert queue.release("9")
    assert popped(queue) == ["1_1", "1_2"]
    assert list(queue.parents) == []


def test_a_child_whose_deadline_is_over_is_waited_for_by_nobody() -> None:
    queue = Queue()
    queue.add([waiting("1_1", parent="9", deadline=1.0)])
    assert queue.late(2.0) == ["1_1"]
    assert list(queue.parents) == []
    assert not queue.release("9")


def test_jobs_of_a_model_that_was_paused_come_out_when_it_is_back() -> None:
    queue = Queue()
    queue.add([waiting("1"), waiting("2")])
    first = queue.pop()
    assert first is not None
    queue.put(first, blocked_by="a-model")
    assert popped(queue) == ["2"]
    assert ("1" in queue, list(queue.parents)) == (True, [])
    assert queue.release("a-model")
    assert popped(queue) == ["1"]


def test_a_circle_of_parents_is_let_through() -> None:
    queue = Queue()
    queue.add([waiting("1_1", parent="1_2"), waiting("1_2", parent="1_3")])
    assert popped(queue) == []
    queue.add([waiting("1_3", parent="1_1"), waiting("5", parent="5")])
    assert popped(queue) == ["1_3", "5"]


def test_late_jobs_are_told_once_even_those_that_wait_for_a_parent() -> None:
    queue = Queue()
    queue.add([waiting("1", deadline=10.0), waiting("2", deadline=20.0, parent="9"), waiting("3")])
    assert queue.late(9.0) == []
    assert queue.late(10.0) == ["1"]
    assert queue.late(30.0) == ["2"]
    assert popped(queue) == ["3"]
    assert list(queue.parents) == []
