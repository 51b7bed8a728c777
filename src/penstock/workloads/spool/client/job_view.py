"""What is found of a job by somebody who looks, and its position in the queue."""

from __future__ import annotations

import heapq
import os
from codecs import getincrementaldecoder
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.core.job import Priority
from penstock.lifecycles.spool import Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.disk.closing import (
    ANSWER,
    AUDIO,
    EMBEDDING,
    ERROR,
    PARTIAL,
    PROGRESS,
    RESULT,
)
from penstock.workloads.spool.disk.files import Unfit, read_file
from penstock.workloads.spool.disk.ids import JobId, Turn, order_of, turn_of
from penstock.workloads.spool.disk.meta import OPTIONS, Meta, read_options, seen_meta
from penstock.workloads.spool.disk.peers import is_served
from penstock.workloads.spool.disk.workspace import Workspace

_CONTENT = (RESULT, EMBEDDING, AUDIO)
_MOST = 1 << 30
_MOST_PROGRESS = 1 << 16


class Listed(Struct, frozen=True):
    """A job in a list."""

    job_id: JobId
    status: Status


class JobView(Struct, frozen=True, kw_only=True):
    """A job, and what there is of it in its state."""

    job_id: JobId
    status: Status
    content: bytes | None = None
    """The result of one that is DONE, byte by byte: text, `embedding.json`, or sound."""
    error: str = ""
    """Why it is FAILED."""
    meta: Meta = Meta()
    artifacts: tuple[str, ...] = ()
    """Files of its results, in `folder`."""
    folder: Path | None = None

    @property
    def text(self) -> str:
        """The content as text; what is not UTF-8 is replaced."""
        return (self.content or b"").decode(errors="replace")


class Progress(Struct, frozen=True, kw_only=True):
    """`progress.json`, while a job is RUNNING."""

    tokens: int = 0
    tokens_per_second: float | None = None
    max_tokens: int | None = None
    eta_s: float | None = None


class Partial(Struct, frozen=True, kw_only=True):
    """What a RUNNING job has said so far; of one that has ended, all."""

    status: Status
    text: str = ""
    progress: Progress = Progress()


def read_job_view(folder: Path, job_id: JobId, status: Status) -> JobView:
    """As it lies there; whether it still does is for the caller to see."""
    return JobView(
        job_id=job_id,
        status=status,
        content=_content(folder) if status is Status.DONE else None,
        error=_error(folder) if status is Status.FAILED else "",
        meta=seen_meta(folder),
        artifacts=_artifacts(folder) if status is Status.DONE else (),
        folder=folder,
    )


def read_partial(folder: Path) -> str:
    """A character whose end is not written yet is not there yet. Of a job that is just ending
    it is the result: once that is written, the parts are removed."""
    said = _bytes(folder, PARTIAL)
    if said is None:
        said = _bytes(folder, RESULT) or b""
    return getincrementaldecoder("utf-8")(errors="replace").decode(said)


def read_progress(folder: Path) -> Progress:
    try:
        return msgspec.json.decode(read_file(folder, PROGRESS, _MOST_PROGRESS), type=Progress)
    except (FileNotFoundError, Unfit, msgspec.DecodeError):
        return Progress()


def _content(folder: Path) -> bytes | None:
    for name in _CONTENT:
        content = _bytes(folder, name)
        if content is not None:
            return content
    return None


def _error(folder: Path) -> str:
    return (_bytes(folder, ERROR) or b"").decode(errors="replace").rstrip("\n")


def _artifacts(folder: Path) -> tuple[str, ...]:
    return tuple(name for name in (*_CONTENT, ANSWER) if os.path.lexists(folder / name))


def _bytes(folder: Path, name: str) -> bytes | None:
    """None for what is not there, or is no file."""
    try:
        return read_file(folder, name, _MOST)
    except (FileNotFoundError, Unfit):
        return None


_LATELY = 20
"""How many jobs that are DONE tell how long one takes."""


class Position(Struct, frozen=True, kw_only=True):
    status: Status
    ahead: int = 0
    """Queued jobs whose turn is before its own."""
    queued: int = 0
    running: int = 0
    eta_s: float | None = None
    """Seconds until it may have ended, judged by those that ended lately; None if none did."""
    served: bool = True
    """False if it is queued and no server is seen; then it waits for one first."""


class QueuePositions:
    """Remembers the turns of queued jobs: they don't change."""

    def __init__(self, workspace: Workspace, clock: Clock) -> None:
        self._workspace, self._clock = workspace, clock
        self._turns: dict[JobId, Turn] = {}

    def of(self, job_id: JobId, status: Status) -> Position:
        if status is Status.RUNNING:
            progress = read_progress(self._workspace.of(status, job_id))
            return Position(status=status, eta_s=progress.eta_s)
        if status is not Status.QUEUED:
            return Position(status=status, eta_s=0.0)
        return self._queued(job_id)

    def _queued(self, job_id: JobId) -> Position:
        queued = {*self._workspace.ids(Status.QUEUED), job_id}
        self._turns = {one: self._turns.get(one) or self._turn(one) for one in queued}
        mine = self._turns[job_id]
        ahead = sum(1 for turn in self._turns.values() if turn < mine)
        running = sum(1 for _ in self._workspace.ids(Status.RUNNING))
        return Position(
            status=Status.QUEUED,
            ahead=ahead,
            queued=len(queued),
            running=running,
            eta_s=self._eta(ahead, max(1, running)),
            served=is_served(self._workspace, self._clock),
        )

    def _turn(self, job_id: JobId) -> Turn:
        return turn_of(job_id, self._priority(job_id), self._clock.now())

    def _priority(self, job_id: JobId) -> Priority:
        folder = self._workspace.of(Status.QUEUED, job_id)
        if not os.access(f"{folder}/{OPTIONS}", os.F_OK):
            return Priority.BATCH
        try:
            return read_options(folder).priority
        except Unfit:
            return Priority.BATCH

    def _eta(self, ahead: int, at_once: int) -> float | None:
        done = heapq.nlargest(_LATELY, self._workspace.ids(Status.DONE), key=order_of)
        metas = (seen_meta(self._workspace.of(Status.DONE, job_id)) for job_id in done)
        took = [meta.duration_s for meta in metas if meta.duration_s is not None]
        if not took:
            return None
        return (ahead // at_once + 1) * sum(took) / len(took)
