"""Who starts next, and why the others wait."""

from __future__ import annotations

import pytest

from penstock.workloads.container.config import BuildRules, WorkerConfig
from penstock.workloads.container.job import (
    BuildSpec,
    ContainerJob,
    ContainerRecord,
    Limits,
    Mode,
    Priority,
)
from penstock.workloads.container.standing.queue import Need, Queue, Room, Waiting, need_of

SMALL = Need(100, 1)


def a_queue(*, jobs: int = 2, memory_mb: float = 1000, cpus: float = 4) -> Queue:
    return Queue(Room(jobs, memory_mb, cpus))


def waiting(seq: int, need: Need = SMALL, priority: Priority = Priority.NORMAL) -> Waiting:
    return Waiting(priority.rank, seq, f"j{seq}", need)


def started(queue: Queue) -> list[str]:
    """Start whatever may start now."""
    names = []
    while (job := queue.next()) is not None:
        queue.begin(job)
        names.append(job.job_id)
    return names


def test_jobs_start_in_the_order_in_which_they_came_whenever_they_were_heard_of() -> None:
    queue = a_queue(jobs=3)
    for seq in (2, 1, 3):
        queue.add(waiting(seq))
    assert started(queue) == ["j1", "j2", "j3"]


def test_a_higher_priority_starts_first() -> None:
    queue = a_queue(jobs=3)
    queue.add(waiting(1, priority=Priority.LOW))
    queue.add(waiting(2))
    queue.add(waiting(3, priority=Priority.HIGH))
    assert [job.job_id for job in queue] == ["j3", "j2", "j1"]
    assert started(queue) == ["j3", "j2", "j1"]


def test_no_more_jobs_run_than_may() -> None:
    queue = a_queue(jobs=2)
    for seq in range(4):
        queue.add(waiting(seq))
    assert started(queue) == ["j0", "j1"]
    assert queue.waits_for("j2") == "2 of 2 jobs are running"
    queue.release("j0")
    assert started(queue) == ["j2"]


def test_a_job_waits_for_memory_and_says_so() -> None:
    queue = a_queue(memory_mb=700)
    queue.add(waiting(1, Need(400, 1)))
    queue.add(waiting(2, Need(512, 1)))
    assert started(queue) == ["j1"]
    assert queue.waits_for("j2") == "needs 512 MB and 300 MB are free"
    queue.release("j1")
    assert started(queue) == ["j2"]


def test_a_job_waits_for_processors_and_says_so() -> None:
    queue = a_queue(cpus=2)
    queue.add(waiting(1, Need(1, 1.5)))
    queue.add(waiting(2, Need(1, 1)))
    assert started(queue) == ["j1"]
    assert queue.waits_for("j2") == "needs 1 processors and 0.5 are free"


def test_fractions_of_a_processor_add_up_to_the_whole() -> None:
    queue = a_queue(jobs=10, cpus=1)
    for seq in range(10):
        queue.add(waiting(seq, Need(1, 0.1)))
    assert len(started(queue)) == 10


def test_a_small_job_does_not_overtake_a_large_one() -> None:
    queue = a_queue(jobs=3, memory_mb=1000)
    queue.add(waiting(1, Need(600, 1)))
    queue.add(waiting(2, Need(900, 1)))
    queue.add(waiting(3, Need(10, 1)))
    queue.add(waiting(4, Need(10, 1), Priority.LOW))
    assert started(queue) == ["j1"]
    assert queue.waits_for("j3") == (
        "1 job is before it; the first waits: needs 900 MB and 400 MB are free"
    )
    assert queue.waits_for("j4").startswith("2 jobs are before it; the first waits: ")
    queue.release("j1")
    assert started(queue) == ["j2", "j3", "j4"]


def test_a_job_of_a_higher_priority_passes_a_large_one_that_waits() -> None:
    queue = a_queue(memory_mb=1000)
    queue.add(waiting(1, Need(600, 1)))
    queue.add(waiting(2, Need(900, 1)))
    assert started(queue) == ["j1"]
    queue.add(waiting(3, Need(10, 1), Priority.HIGH))
    assert started(queue) == ["j3"]


def test_a_place_is_the_number_of_jobs_before_it() -> None:
    queue = a_queue()
    for seq in (5, 6, 8):
        queue.add(waiting(seq))
    queue.add(waiting(7, priority=Priority.HIGH))
    assert [queue.position(f"j{seq}") for seq in (7, 5, 6, 8)] == [0, 1, 2, 3]
    queue.discard("j5")
    assert [queue.position(f"j{seq}") for seq in (7, 6, 8)] == [0, 1, 2]
    assert queue.position("j5") is None
    assert queue.waits_for("j5") == ""


def test_taking_out_a_job_twice_gives_it_once() -> None:
    queue = a_queue()
    queue.add(waiting(1))
    assert queue.discard("j1") == waiting(1)
    assert queue.discard("j1") is None
    assert len(queue) == 0
    assert "j1" not in queue


def test_a_job_that_ran_before_counts_though_there_is_no_room_for_it() -> None:
    queue = a_queue(jobs=1, memory_mb=100)
    queue.hold("old-1", Need(90, 1))
    queue.hold("old-2", Need(90, 1))
    queue.add(waiting(1))
    assert queue.next() is None
    assert queue.waits_for("j1") == "2 of 1 jobs are running"
    queue.release("old-1")
    queue.release("old-1")
    assert queue.next() is None
    queue.release("old-2")
    assert started(queue) == ["j1"]


def test_a_free_queue_lets_nobody_wait() -> None:
    queue = a_queue()
    queue.add(waiting(1))
    queue.add(waiting(2))
    assert queue.waits_for("j1") == ""
    assert queue.waits_for("j2") == "1 job is before it"


@pytest.mark.parametrize(
    ("need", "field"),
    [
        (Need(1000, 4), None),
        (Need(1001, 1), "runtime.limits.memory_mb"),
        (Need(1, 4.5), "runtime.limits.cpus"),
    ],
)
def test_a_job_that_never_fits_is_told_by_which_field(need: Need, field: str | None) -> None:
    found = Room(2, 1000, 4).too_small(need)
    assert (found[0] if found else None) == field


def test_a_worker_that_says_nothing_has_most_of_the_machine() -> None:
    config = WorkerConfig(max_concurrent_jobs=3, most=Limits(cpus=2))
    assert Room.of(config, 1000) == Room(3, 800, 3)
    config = WorkerConfig(max_concurrent_jobs=1, most=Limits(cpus=8), memory_mb=50)
    assert Room.of(config, 1000) == Room(1, 50, 8)
    assert Room.of(WorkerConfig(cpus=1.5), 1000).cpus == 1.5


def test_a_build_needs_room_for_itself() -> None:
    config = WorkerConfig(build=BuildRules(enabled=True, memory_mb=512))
    job = ContainerJob(job_id="a", limits=Limits(memory_mb=64, cpus=2))
    assert need_of(job, config) == Need(64, 2)
    built = ContainerJob(
        job_id="a",
        mode=Mode.BUILD,
        build=BuildSpec(dockerfile="FROM scratch"),
        limits=Limits(memory_mb=64),
    )
    assert need_of(built, config).memory_mb == 512


def test_a_record_tells_its_place_and_its_need() -> None:
    record = ContainerRecord(
        job_id="a", created_at=1, seq=7, priority=Priority.LOW, memory_mb=5, cpus=0.5
    )
    assert Waiting.of(record) == Waiting(2, 7, "a", Need(5, 0.5))
