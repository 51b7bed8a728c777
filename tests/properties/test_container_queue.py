"""The queue of a container worker, whatever comes and goes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.workloads.container.job import Priority
from penstock.workloads.container.standing.queue import Need, Queue, Room, Waiting

ROOM = Room(3, 1000, 4)
NEEDS = st.builds(Need, st.floats(6, 1000), st.floats(0.01, 4))
PRIORITIES = st.sampled_from(list(Priority))


class AWorkersQueue(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(ROOM)
        self.line: list[Waiting] = []
        """What should be in it, in order."""
        self.running: dict[str, Need] = {}
        self.seq = 0

    @rule(need=NEEDS, priority=PRIORITIES)
    def comes(self, need: Need, priority: Priority) -> None:
        self.seq += 1
        job = Waiting(priority.rank, self.seq, f"j{self.seq}", need)
        self.queue.add(job)
        self.line = sorted([*self.line, job], key=lambda job: (job.rank, job.seq))

    @rule(data=st.data())
    def is_cancelled(self, data: st.DataObject) -> None:
        if self.line:
            job = data.draw(st.sampled_from(self.line))
            assert self.queue.discard(job.job_id) == job
            self.line.remove(job)

    @rule()
    def starts(self) -> None:
        job = self.queue.next()
        if job is None:
            self.nobody_starts_without_a_reason()
            return
        assert job == self.line.pop(0)
        self.queue.begin(job)
        self.running[job.job_id] = job.need

    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        if self.running:
            job_id = data.draw(st.sampled_from(sorted(self.running)))
            self.queue.release(job_id)
            del self.running[job_id]

    @rule()
    def everything_ends_and_everybody_has_their_turn(self) -> None:
        turns = 0
        while self.line:
            before = len(self.line)
            self.starts()
            if len(self.line) == before:
                assert self.running, "nobody runs, and yet the first does not start"
                self.queue.release(self.running.popitem()[0])
            turns += 1
            assert turns < 10_000

    def nobody_starts_without_a_reason(self) -> None:
        if self.line:
            assert self.queue.waits_for(self.line[0].job_id)

    @invariant()
    def no_more_is_held_than_there_is(self) -> None:
        assert self.queue.running == len(self.running) <= ROOM.jobs
        assert sum(need.memory_mb for need in self.running.values()) <= ROOM.memory_mb + 1e-3
        assert sum(need.cpus for need in self.running.values()) <= ROOM.cpus + 1e-3

    @invariant()
    def places_are_those_of_the_line(self) -> None:
        assert list(self.queue) == self.line
        assert [self.queue.position(job.job_id) for job in self.line] == list(range(len(self.line)))
        assert len(self.queue) == len(self.line)


TestAWorkersQueue = AWorkersQueue.TestCase
