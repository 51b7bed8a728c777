"""What a server knows of the queued jobs, and which is next. Pure: it never looks at a folder.

It may be behind: a job it holds for queued may have been claimed by a neighbour or cancelled.
The claim finds that out, and costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from msgspec import Struct

from penstock.workloads.spool.serving.turns import Turn


class Waiting(Struct, frozen=True, kw_only=True):
    """One queued job."""

    job_id: str
    turn: Turn
    deadline: float | None = None
    parent: str | None = None
    """The job whose end it waits for."""
    suspect: bool = False
    """Whether it is to run alone."""
    model: str = ""
    """The model that it names; empty for the default one."""


class Queue:
    """A heap by turn, and beside it those that wait for a parent."""

    def __init__(self) -> None:
        self._known: dict[str, Waiting] = {}
        self._heap: list[tuple[Turn, str]] = []
        self._deadlines: list[tuple[float, str]] = []
        self._children: dict[str, set[str]] = {}
        self._paused: dict[str, set[str]] = {}
        """Jobs that wait for a model, by its name."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._known

    def add(self, found: Iterable[Waiting]) -> None:
        for waiting in found:
            if waiting.job_id not in self._known:
                self._add(waiting)

    def _add(self, waiting: Waiting) -> None:
        self._known[waiting.job_id] = waiting
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, waiting.job_id))
        if waiting.parent is None or self._is_circle(waiting):
            heapq.heappush(self._heap, (waiting.turn, waiting.job_id))
        else:
            self._children.setdefault(waiting.parent, set()).add(waiting.job_id)

    def _is_circle(self, waiting: Waiting) -> bool:
        """Whether it would wait for itself: then it is let through, to fail with that reason."""
        seen = {waiting.job_id}
        parent = waiting.parent
        while parent is not None and parent not in seen:
            seen.add(parent)
            known = self._known.get(parent)
            parent = known.parent if known else None
        return parent is not None

    def pop(self) -> Waiting | None:
        """The job whose turn it is; the queue forgets it."""
        while self._heap:
            _, job_id = heapq.heappop(self._heap)
            if (waiting := self._known.get(job_id)) is not None:
                self.forget(job_id)
                return waiting
        return None

    def pause(self, waiting: Waiting, model: str) -> None:
        """Keep a job that was popped until its model is resumed."""
        self._known[waiting.job_id] = waiting
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, waiting.job_id))
        self._paused.setdefault(model, set()).add(waiting.job_id)

    def resume(self, model: str) -> bool:
        """Let the jobs of a model have their turn; whether there were any."""
        jobs = [one for one in self._paused.pop(model, set()) if one in self._known]
        for job_id in jobs:
            heapq.heappush(self._heap, (self._known[job_id].turn, job_id))
        return bool(jobs)

    def forget(self, job_id: str) -> None:
        waiting = self._known.pop(job_id, None)
        if waiting is not None and waiting.parent in self._children:
            children = self._children[waiting.parent]
            children.discard(job_id)
            if not children:
                del self._children[waiting.parent]

    @property
    def parents(self) -> Collection[str]:
        """Those that somebody waits for."""
        return self._children.keys()

    def ended(self, parent: str) -> bool:
        """Let its children have their turn; whether there were any."""
        children = self._children.pop(parent, set())
        for job_id in children:
            heapq.heappush(self._heap, (self._known[job_id].turn, job_id))
        return bool(children)

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._known:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def late(self, now: float) -> list[str]:
        """Those whose deadline is over; the queue forgets them."""
        late: list[str] = []
        while (due := self.next_deadline()) is not None and due <= now:
            _, job_id = heapq.heappop(self._deadlines)
            self.forget(job_id)
            late.append(job_id)
        return late
