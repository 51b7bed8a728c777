"""Open children of open jobs (`child_of`): they go before new jobs, and end with their parent.
Pure; whoever holds the ledger asks it.

A parent is a chain of tries: while the chain goes on, its children do. When its last try ends
without success, they are to be cancelled, and so, in turn, are theirs. Children of a parent that
succeeded go on.
"""

from __future__ import annotations

from penstock.core.job import Job, JobRequest, chain_of, rank
from penstock.lifecycles.canonical import JobState

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
        self._families: dict[Chain, _Family] = {}
        self.unknown: dict[Chain, None] = {}
        """Parents to be looked up: nobody knows yet whether they have ended."""
        self.doomed: dict[int, str] = {}
        """Children to be cancelled, by seq, and why."""

    def __bool__(self) -> bool:
        return bool(self._families or self.doomed)

    def rank(self, job: Job) -> float:
        """The order of a job among its tenant's: a child goes before what came with its parent."""
        own = rank(job.request, job.accepted_at)
        family = self._families.get(_parent_of(job.request))
        return own if family is None else min(own, family.rank - _HEAD_START)

    def enter(self, child: Job, parent: Job | None) -> None:
        """A child is there; `parent` is the try that submitted it, if that is with a worker."""
        chain = _parent_of(child.request)
        family = self._families.get(chain)
        if family is None:
            family = self._families[chain] = _Family()
            if parent is None or chain != _chain(parent):
                self.unknown[chain] = None
            else:
                family.rank = self.rank(parent)
        family.children[child.seq] = None

    def leave(self, child: Job) -> None:
        """A child has ended."""
        chain = _parent_of(child.request)
        if (family := self._families.get(chain)) is not None:
            family.children.pop(child.seq, None)
            if not family.children:
                del self._families[chain]
                self.unknown.pop(chain, None)
        self.doomed.pop(child.seq, None)

    def hear(self, job: Job) -> None:
        """A job has ended; its children go on with its retry, or with its success."""
        chain = _chain(job)
        if job.successor is not None or chain not in self._families:
            return
        self.unknown.pop(chain, None)
        family = self._families.pop(chain)
        if job.state is not JobState.SUCCEEDED:
            why = f"its parent {chain[1]} ended {job.state}"
            if job.job_id != chain[1]:
                why += f" (as {job.job_id})"
            self.doomed.update(dict.fromkeys(family.children, why))

    def look_up(self, chain: Chain, last: Job | None) -> None:
        """What the store says of a parent's last try."""
        if chain not in self.unknown:
            return  # a commit has told us in the meantime
        del self.unknown[chain]
        if last is None or last.request.tenant != chain[0]:
            del self._families[chain]  # of another engine, or pruned: nothing follows from it
        elif last.is_final:
            self.hear(last)
        else:
            self._families[chain].rank = self.rank(last)


def ends_with_parent(request: JobRequest) -> bool:
    return request.child_of is not None and not request.detached


def _parent_of(request: JobRequest) -> Chain:
    return (request.tenant, request.child_of or "")


def _chain(job: Job) -> Chain:
    return (job.request.tenant, chain_of(job.request))
