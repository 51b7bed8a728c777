"""Jobs that wait for others to end (`after`), and children of open jobs (`child_of`). Pure.

`Dependencies`: a parent that is retried has not ended, its retry stands in for it. A parent that is
no longer in the store counts as one that did not succeed.

`Families`: children go before new jobs. While a chain of tries goes on, its children do. When its
last try ends without success, they are cancelled, and so, in turn, are theirs. Children of a parent
that succeeded go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import islice

from penstock.core.errors import InvalidRequest
from penstock.core.job import Job, JobRequest, ParentPolicy, chain_of, rank
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
        """Parents to be looked up: it is not known yet whether they have ended."""
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
        """What the store says of a parent, unless a commit reported it in the meantime."""
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


# -- children --------------------------------------------------------

Chain = tuple[str, str]
"""(tenant, first try)"""
_HEAD_START = 1.0
"""Seconds of waiting time that a child has ahead of its parent."""


class _Family:
    __slots__ = ("children", "rank")

    def __init__(self) -> None:
        self.children: dict[int, None] = {}
        """Those that have not ended and are not detached, by seq."""
        self.rank = float("inf")
        """The place of the parent in the order of its tenant's jobs."""


class Families:
    """Parents by their chain, and their open children."""

    def __init__(self) -> None:
        self.parents: dict[Chain, _Family] = {}
        self.unknown: dict[Chain, None] = {}
        """Parents to be looked up: it is not known yet whether they have ended."""
        self.doomed: dict[int, str] = {}
        """Children to be cancelled, by seq, and why."""

    def rank(self, job: Job) -> float:
        """The order of a job among its tenant's: a child goes before what came with its parent."""
        own = rank(job.request, job.accepted_at)
        family = self.parents.get(_parent_of(job.request))
        return own if family is None else min(own, family.rank - _HEAD_START)

    def enter(self, child: Job, parent: Job | None) -> None:
        """A child is there; `parent` is the try that submitted it, if that is with a worker."""
        chain = _parent_of(child.request)
        family = self.parents.get(chain)
        if family is None:
            family = self.parents[chain] = _Family()
            if parent is None or chain != _chain(parent):
                self.unknown[chain] = None
            else:
                family.rank = self.rank(parent)
        family.children[child.seq] = None

    def leave(self, child: Job) -> None:
        """A child has ended."""
        chain = _parent_of(child.request)
        if (family := self.parents.get(chain)) is not None:
            family.children.pop(child.seq, None)
            if not family.children:
                del self.parents[chain]
                self.unknown.pop(chain, None)
        self.doomed.pop(child.seq, None)

    def hear(self, job: Job) -> None:
        """A job has ended; its children go on with its retry, or with its success."""
        chain = _chain(job)
        if job.successor is not None or chain not in self.parents:
            return
        self.unknown.pop(chain, None)
        family = self.parents.pop(chain)
        if job.state is not JobState.SUCCEEDED:
            why = f"its parent {chain[1]} ended {job.state}"
            if job.job_id != chain[1]:
                why += f" (as {job.job_id})"
            self.doomed.update(dict.fromkeys(family.children, why))

    def look_up(self, chain: Chain, last: Job | None) -> None:
        """What the store says of a parent's last try."""
        if chain not in self.unknown:
            return  # a commit reported it in the meantime
        del self.unknown[chain]
        if last is None or last.request.tenant != chain[0]:
            del self.parents[chain]  # of another engine, or pruned: nothing follows from it
        elif last.is_final:
            self.hear(last)
        else:
            self.parents[chain].rank = self.rank(last)


def ends_with_parent(request: JobRequest) -> bool:
    return request.child_of is not None and not request.detached


def _parent_of(request: JobRequest) -> Chain:
    return (request.tenant, request.child_of or "")


def _chain(job: Job) -> Chain:
    return (job.request.tenant, chain_of(job.request))
