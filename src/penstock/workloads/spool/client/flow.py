"""Flow: looking at jobs, and waiting for their end."""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from penstock.core.errors import NotFound, WaitTimedOut
from penstock.core.job import Priority
from penstock.core.text import harmless
from penstock.lifecycles.spool import SPOOL, VISIBLE, Status
from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.spool.client.work import MAX_PROMPT, PROMPT
from penstock.workloads.spool.disk.files import Unfit, read_file, read_text
from penstock.workloads.spool.disk.job import (
    ANSWER,
    AUDIO,
    EMBEDDING,
    ERROR,
    OPTIONS,
    PARTIAL,
    PROGRESS,
    RESULT,
    Meta,
    read_options,
    seen_meta,
    time_of,
)
from penstock.workloads.spool.disk.peers import is_served
from penstock.workloads.spool.disk.watching import FolderWatch, Names
from penstock.workloads.spool.disk.workspace import (
    FORWARD,
    JobId,
    Turn,
    Workspace,
    order_of,
    submitted_near,
    turn_of,
)

_FIRST, _LONGEST, _GROWTH = 0.05, 1.0, 1.5
_BEGINNING = 120
"""Characters of a prompt that a list shows."""


class WaitBackoff:
    """How long until the next look, and whether there is one."""

    def __init__(self, timeout: float | None, clock: Clock) -> None:
        self._clock = clock
        self._end = None if timeout is None else clock.monotonic() + timeout
        self._pause = _FIRST

    def next(self, what: str) -> float:
        """Seconds to wait now; WaitTimedOut when there are none left."""
        pause, self._pause = self._pause, min(_LONGEST, self._pause * _GROWTH)
        if self._end is None:
            return pause
        left = self._end - self._clock.monotonic()
        if left <= 0:
            raise WaitTimedOut(f"{what} within the time given", hint="nothing was cancelled")
        return min(pause, left)


def ended(workspace: Workspace, job_id: JobId, patience: WaitBackoff) -> None:
    with Names(_ends(workspace)) as names:
        while not _has_ended(workspace, job_id):
            names.wait_for(job_id, patience.next(f"job {job_id} did not end"))


async def ended_async(workspace: Workspace, job_id: JobId, patience: WaitBackoff) -> None:
    moved = asyncio.Event()
    watch = FolderWatch(moved.set)
    try:
        for folder in _ends(workspace):
            watch.add(folder, lambda name: moved.set() if name == job_id else None)
        while not _has_ended(workspace, job_id):
            try:
                async with asyncio.timeout(patience.next(f"job {job_id} did not end")):
                    await moved.wait()
            except TimeoutError:
                continue
            moved.clear()
    finally:
        watch.close()


def idle(workspace: Workspace, patience: WaitBackoff) -> None:
    with Names(_ends(workspace)) as names:
        while not _is_idle(workspace):
            names.wait(patience.next("the jobs did not end"))


def _ends(workspace: Workspace) -> list[Path]:
    return [workspace.folder(status) for status in sorted(SPOOL.final)]


def _has_ended(workspace: Workspace, job_id: JobId) -> bool:
    status = workspace.find(job_id)
    if status is Status.MISSING:
        raise NotFound(f"there is no job {job_id} in {workspace.path}")
    return SPOOL.is_final(status)


def _is_idle(workspace: Workspace) -> bool:
    """A look at the queue again, for a job that was put back to it while we looked on."""
    busy = (Status.QUEUED, Status.RUNNING, Status.QUEUED)
    return not any(True for status in busy for _ in workspace.ids(status))


class Flow:
    """Asks a workspace. Every id is checked first: InvalidRequest if it can't be one."""

    def __init__(self, workspace: Workspace | Path | str, *, clock: Clock | None = None) -> None:
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._clock = clock or SystemClock()
        self._positions = QueuePositions(self.workspace, self._clock)

    def status(self, job_id: JobId) -> Status:
        """MISSING only if it is in none of the folders, not if it moves just now."""
        return self.workspace.find(job_id)

    def exists(self, job_id: JobId) -> bool:
        return self.status(job_id) is not Status.MISSING

    def get(self, job_id: JobId) -> JobView:
        """What there is of it; everything is of the state that is told."""
        while (status := self.status(job_id)) is not Status.MISSING:
            found = read_job_view(self.workspace.of(status, job_id), job_id, status)
            if self.workspace.holds(status, job_id):
                return found
        return JobView(job_id=job_id, status=status)

    def prompt(self, job_id: JobId) -> str:
        """NotFound if there is no such job; Unfit if its prompt is no text."""
        while True:
            folder = self.workspace.of(self._known(job_id), job_id)
            try:
                return read_text(folder, PROMPT, MAX_PROMPT)
            except FileNotFoundError:
                if os.path.lexists(folder):
                    raise NotFound(f"job {job_id} has no {PROMPT}") from None

    def list(self, states: Collection[Status] = VISIBLE, limit: int | None = None) -> list[Listed]:
        """By id, the newest first. No job is looked into, and none that moves is missed."""
        found: dict[JobId, Status] = {}
        for status in FORWARD:
            found.update(dict.fromkeys(self.workspace.ids(status), status))
        ids = [job_id for job_id, status in found.items() if status in states]
        if limit is None:
            ids.sort(key=order_of, reverse=True)
        else:
            ids = heapq.nlargest(limit, ids, key=order_of)
        return [Listed(job_id, found[job_id]) for job_id in ids]

    def summary(self, job_id: JobId) -> JobSummary:
        """What a list shows of it."""
        found = self.get(job_id)
        meta, tokens = found.meta, found.meta.completion_tokens
        if found.status is Status.RUNNING:
            tokens = read_progress(self.workspace.of(found.status, job_id)).tokens
        prompt = ""
        with suppress(NotFound, Unfit):
            prompt = " ".join(harmless(self.prompt(job_id)[: 4 * _BEGINNING]).split())
        return JobSummary(
            job_id=job_id,
            status=found.status,
            submitted_at=time_of(meta.submitted_at) or submitted_near(job_id),
            prompt=prompt if len(prompt) <= _BEGINNING else f"{prompt[:_BEGINNING]}…",
            tokens=tokens,
            seconds=meta.duration_s,
            code=meta.code,
            tags=meta.tags,
        )

    def moves(self, period: float = 0.25) -> Iterator[Sequence[Move]]:
        """What has moved since the look before; first where everything that has not ended is."""
        before: dict[JobId, Status] | None = None
        while True:
            after = {one.job_id: one.status for one in self.list()}
            if before is None:
                moved = {one: of for one, of in after.items() if not SPOOL.is_final(of)}
                before = {}
            else:
                moved = {one: of for one, of in after.items() if before.get(one) is not of}
            now, gone = self._clock.now(), dict.fromkeys(before.keys() - after, Status.MISSING)
            yield [
                Move(at=now, job_id=job_id, status=status)
                for job_id, status in (*reversed(moved.items()), *gone.items())
            ]
            before = after
            time.sleep(period)

    def counts(self) -> dict[Status, int]:
        return self.workspace.counts()

    def latest(self) -> JobView | None:
        """The job that ended last."""
        ends: list[tuple[float, JobId]] = []
        for status in sorted(SPOOL.final):
            for job_id in self.workspace.ids(status):
                try:
                    ends.append((os.lstat(self.workspace.of(status, job_id)).st_mtime, job_id))
                except FileNotFoundError:
                    continue
        return self.get(max(ends)[1]) if ends else None

    def is_served(self) -> bool:
        """Whether a server is seen that may take queued jobs."""
        return is_served(self.workspace, self._clock)

    def position(self, job_id: JobId) -> Position:
        """How many are before it, and how long it may take; NotFound if there is no such job."""
        return self._positions.of(job_id, self._known(job_id))

    def partial(self, job_id: JobId) -> Partial:
        """What it has said so far. NotFound if there is no such job."""
        while True:
            status = self._known(job_id)
            if SPOOL.is_final(status):
                return Partial(status=status, text=self.get(job_id).text)
            folder = self.workspace.of(status, job_id)
            text, progress = read_partial(folder), read_progress(folder)
            if status is Status.QUEUED:
                text, progress = "", Progress()
            if self.workspace.holds(status, job_id):
                return Partial(status=status, text=text, progress=progress)

    # -- waiting ----------------------------------------------------------------------

    def wait(self, job_id: JobId, timeout: float | None = None) -> JobView:
        """Until it has ended. NotFound if it is not there, or is taken away; WaitTimedOut."""
        ended(self.workspace, job_id, WaitBackoff(timeout, self._clock))
        return self.get(job_id)

    async def await_end(self, job_id: JobId, timeout: float | None = None) -> JobView:
        """The same, in an event loop."""
        await ended_async(self.workspace, job_id, WaitBackoff(timeout, self._clock))
        return self.get(job_id)

    def wait_idle(self, timeout: float | None = None) -> dict[Status, int]:
        """Until no job is queued or running; returns the counts."""
        idle(self.workspace, WaitBackoff(timeout, self._clock))
        return self.counts()

    def _known(self, job_id: JobId) -> Status:
        status = self.status(job_id)
        if status is Status.MISSING:
            raise NotFound(f"there is no job {job_id} in {self.workspace.path}")
        return status


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

    def fields(self) -> dict[str, Any]:
        """As JSON has it: where it is, its metadata, and what it made."""
        view: dict[str, Any] = {"job_id": self.job_id, "status": self.status.value}
        if self.status is Status.MISSING:
            return view
        fields = msgspec.to_builtins(self.meta)
        known = {name: value for name, value in fields.items() if value not in (None, "", ())}
        view = {**known.pop("other", {}), **known, **view}
        if self.status is Status.FAILED:
            view["error"] = self.error
        elif self.status is Status.DONE and EMBEDDING not in self.artifacts:
            view["result"] = self.text
        elif self.status is Status.DONE:
            try:
                view["embedding"] = msgspec.json.decode(self.content or b"")
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                view["result"] = self.text  # what lies there is shown as it is
        return view


class JobSummary(Struct, frozen=True, kw_only=True):
    """A job in the list, as much of it as is shown."""

    job_id: str
    status: Status
    submitted_at: float
    prompt: str
    """Its beginning, in one line."""
    tokens: int | None = None
    """Of the answer, so far."""
    seconds: float | None = None
    """For which it ran."""
    code: str = ""
    tags: tuple[str, ...] = ()


class Move(Struct, frozen=True, kw_only=True, tag="moved"):
    """A job that is somewhere else than at the last look."""

    at: float
    job_id: JobId
    status: Status
    """MISSING if it was cleaned away."""


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
