"""Jobs that wait for others to end (`after`). Pure; whoever holds the ledger asks it.

A parent that is retried has not ended: its retry stands in for it. A parent that is in the
store no more counts as one that did not succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import islice

from penstock.core.errors import InvalidRequest
from penstock.core.job import Job, JobRequest, ParentPolicy
from penstock.lifecycles.canonical import JobState

_NAMED = 3
"""How many parents a reason names."""


def has_parents(request: JobRequest) -> bool:
    """Whether a job waits for others; the retry of one that ran has done that already."""
    return bool(request.after) and not request.retry_number


def waits_for(
    parents: Collection[str], state_of: Callable[[str], str], count: int | None = None
) -> str:
    """The jobs that a job waits for, in a sentence; there are `count`, if not all are given."""
    named = [f"{parent_id} ({state_of(parent_id)})" for parent_id in islice(parents, _NAMED)]
    more = (count or len(parents)) - len(named)
    return "it waits for " + ", ".join(named) + (f" and {more} more" if more else "")


class Dependencies:
    """Who waits for whom, by the waiting job's seq and the awaited job's id."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        """Every waiting job that has, or had, something to wait for."""
        self.children: dict[str, dict[int, None]] = {}
        """The jobs that wait for a parent."""
        self._left: dict[int, dict[str, str]] = {}
        """The parents that have not ended, and the names under which they are waited for."""
        self._lenient: set[int] = set()
        """Jobs that run however their parents end."""
        self._done: set[int] = set()
        """Jobs that have waited to the end and are not with a worker yet."""
        self.unknown: dict[str, None] = {}
        """Parents to be looked up: nobody knows yet whether they have ended."""
        self.released: list[int] = []
        """Jobs whose last parent has ended since somebody took them from here."""
        self.doomed: dict[int, str] = {}
        """Jobs to be cancelled, and why."""

    def __contains__(self, seq: int) -> bool:
        return seq in self._left or seq in self.doomed

    def waiting(self) -> list[int]:
        return list(self._left)

    def admit(self, job: Job) -> bool:
        """Whether a job has nothing to wait for any more; else it waits from now on."""
        seq = job.seq
        if seq in self._done:
            return True
        if seq in self:
            return False
        self.members.add(seq)
        self._left[seq] = {}
        if job.request.if_parent_fails is ParentPolicy.RUN:
            self._lenient.add(seq)
        for parent_id in job.request.after:
            self._await(seq, parent_id, parent_id)
        return False

    def _await(self, seq: int, parent_id: str, name: str) -> None:
        self._left[seq].setdefault(parent_id, name)
        children = self.children.get(parent_id)
        if children is None:
            children = self.children[parent_id] = {}
            self.unknown[parent_id] = None
        children[seq] = None

    def look_up(self, parent_id: str, parent: Job | None) -> None:
        """What the store says of a parent, unless a commit has told us in the meantime."""
        if parent_id not in self.unknown:
            return
        del self.unknown[parent_id]
        if parent is None:
            for seq in self.children.pop(parent_id, {}):
                self._end(seq, parent_id, "is not in the store any more", well=False)
        elif parent.is_final:
            self.hear(parent)

    def hear(self, parent: Job) -> None:
        """A job has ended."""
        parent_id = parent.job_id
        children = self.children.pop(parent_id, None)
        if children is None:
            return
        self.unknown.pop(parent_id, None)
        for seq in children:
            if parent.successor is not None:
                name = self._left[seq].pop(parent_id)
                self._await(seq, parent.successor, name)
            else:
                well = parent.state is JobState.SUCCEEDED
                self._end(seq, parent_id, f"ended {parent.state}", well=well)

    def _end(self, seq: int, parent_id: str, how: str, *, well: bool) -> None:
        name = self._left[seq].pop(parent_id)
        if not (well or seq in self._lenient):
            known_as = "" if name == parent_id else f" (as {parent_id})"
            why = f"job {name}, which it waits for, {how}{known_as}"
            self.forget(seq)
            self.members.add(seq)
            self.doomed[seq] = why
        elif not self._left[seq]:
            del self._left[seq]
            self._done.add(seq)
            self.released.append(seq)

    def forget(self, seq: int) -> None:
        """A job waits no more: it has ended, or a worker has it."""
        for parent_id in self._left.pop(seq, ()):
            children = self.children[parent_id]
            del children[seq]
            if not children:
                del self.children[parent_id]
                self.unknown.pop(parent_id, None)
        self.members.discard(seq)
        self._lenient.discard(seq)
        self._done.discard(seq)
        self.doomed.pop(seq, None)

    def take_released(self) -> list[int]:
        """The jobs that may go on and did not yet."""
        released, self.released = self.released, []
        return [seq for seq in released if seq in self._done]

    def why(self, seq: int, state_of: Callable[[str], str]) -> str | None:
        """Whom a job waits for, in a sentence."""
        if (doom := self.doomed.get(seq)) is not None:
            return f"it is about to be cancelled: {doom}"
        left = self._left.get(seq)
        return waits_for(left, state_of) if left else None


def check_cycles(after: Mapping[str, tuple[str, ...]]) -> None:
    """Raise InvalidRequest for jobs that would wait for each other for ever.

    Only jobs that come together can form a circle: what is there already waits for
    nothing that comes later.
    """
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]  # it begins and ends with the same job
        shown = circle if len(circle) <= 6 else [*circle[:3], "…", *circle[-2:]]
        raise InvalidRequest("after", f"dependency cycle: {' waits for '.join(shown)}") from None
