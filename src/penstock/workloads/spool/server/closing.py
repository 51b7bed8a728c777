"""How a server ends its jobs: done, failed, given back to the queue, or given up."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from penstock.core.errors import Conflict, StoreFailed
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.process import failpoint
from penstock.workloads.llm.values import LlmCode
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.closing import fail, finish, remove_attempt
from penstock.workloads.spool.disk.files import move
from penstock.workloads.spool.disk.meta import Meta, seen_meta, stamp, write_meta
from penstock.workloads.spool.disk.peers import returning
from penstock.workloads.spool.disk.workspace import Workspace
from penstock.workloads.spool.server.outcomes import SAME_ID, SpoolOutcome, failed
from penstock.workloads.spool.server.requests import JobGone, is_folder
from penstock.workloads.spool.server.running import (
    Attempts,
    EventKind,
    JobEvent,
    Loss,
    Running,
    ServerParts,
    count_attempt,
)

_ENDED = {"completed_at": "", "duration_s": None, "artifacts": (), "status": "", "code": ""}


def lose(workspace: Workspace, job_id: str, loss: Loss) -> Attempts:
    """Count an attempt that came to nothing, durably. Gone if the job is."""
    folder = workspace.of(Status.RUNNING, job_id)
    if not is_folder(folder):
        return Attempts()
    try:
        return count_attempt(folder, loss, workspace.sync)
    except FileNotFoundError:
        raise JobGone(job_id) from None


def requeue(workspace: Workspace, job_id: str) -> None:
    """RUNNING becomes QUEUED again, with nothing of an attempt left. Gone if the job is."""
    folder = workspace.of(Status.RUNNING, job_id)
    target = workspace.of(SPOOL.after(Status.RUNNING, SpoolEvent.RECOVER), job_id)
    try:
        if is_folder(folder):
            _tidy(folder, workspace.sync)
        failpoint("spool-returning")
        move(folder, target, sync=workspace.sync)
    except FileNotFoundError:
        raise JobGone(job_id) from None


def give_up(workspace: Workspace, job_id: str, attempts: Attempts, code: str, now: float) -> None:
    """RUNNING becomes FAILED: it was tried often enough."""
    meta = seen_meta(workspace.of(Status.RUNNING, job_id))
    end = structs.replace(meta, code=code, completed_at=stamp(now), attempts=attempts.count)
    fail(workspace, job_id, end, f"{code}: the job {attempts.reason}")


def _tidy(folder: Path, sync: Sync) -> None:
    remove_attempt(folder)
    meta = seen_meta(folder)
    if meta.status:
        write_meta(folder, structs.replace(meta, **_ENDED), sync)


log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE, _LONGEST_PAUSE = 0.25, 15.0


class JobCloser:
    """Every way in which a job leaves this server. Gone if another process took its folder away."""

    def __init__(self, parts: ServerParts) -> None:
        self._workspace, self._claims, self._threads = parts.workspace, parts.claims, parts.threads
        self._clock, self._health, self._tell = parts.clock, parts.health, parts.tell
        self._most = parts.config.attempts

    async def end(self, running: Running, outcome: SpoolOutcome) -> None:
        """DONE or FAILED, when the disk lets it."""
        try:
            await self._insisting(running, lambda: self._write(running, outcome))
        except Conflict as clash:
            outcome = failed(SAME_ID, clash.message)
            await self._insisting(running, lambda: self._write_elsewhere(running, outcome))
        what = EventKind.FAILED if outcome.error else EventKind.DONE
        self._happened(running, what, outcome.tokens, outcome.code, outcome.error)

    async def requeue(self, running: Running, reason: str) -> None:
        """QUEUED again; that is not counted."""
        await self._insisting(running, lambda: self._return(running))
        self._happened(running, EventKind.REQUEUED, reason=reason)

    async def crashed(self, running: Running, *, alone: bool) -> bool:
        """QUEUED again, and counted. One that was alone when it happened too often has failed:
        then it returns False."""
        attempts = await self._insisting(running, lambda: self._lose(running, alone))
        why = f"the job {attempts.reason}"
        again = self._may_try(attempts, alone)
        what = EventKind.REQUEUED if again else EventKind.FAILED
        self._happened(running, what, code=LlmCode.ENGINE_CRASHED, reason=why)
        return again

    def let_go(self, running: Running) -> None:
        """Somebody else has moved or deleted it: it is not ours any more."""
        log.warning("job %s was moved or deleted while it ran; it is let go", running.job_id)
        self._left(running)
        self._happened(running, EventKind.LET_GO)

    # -- blocking, in a thread ---------------------------------------------------------

    def _write(self, running: Running, outcome: SpoolOutcome) -> None:
        self._check(running)
        meta = self._meta(running, outcome)
        try:
            if outcome.error:
                fail(self._workspace, running.job_id, meta, outcome.line)
            else:
                finish(self._workspace, running.job_id, meta, outcome.files)
        except Conflict:
            self._check(running)
            raise
        self._left(running)

    def _write_elsewhere(self, running: Running, outcome: SpoolOutcome) -> None:
        """Under the next id that is free: two jobs have the same, and neither is overwritten."""
        self._check(running)
        meta = self._meta(running, outcome)
        for number in range(1, 1_000_000):
            other = f"{running.job_id}_{number}"
            if self._workspace.holds(Status.FAILED, other) or not self._claims.take(other):
                continue
            os.rename(running.folder, self._workspace.name(Status.RUNNING, other))
            fail(self._workspace, other, meta, outcome.line)
            self._claims.drop(other)
            break
        self._left(running)

    def _return(self, running: Running) -> None:
        with returning(self._workspace.private):
            self._check(running)
            requeue(self._workspace, running.job_id)
            self._left(running)

    def _lose(self, running: Running, alone: bool) -> Attempts:
        with returning(self._workspace.private):
            self._check(running)
            if running.lost is None:
                running.lost = lose(self._workspace, running.job_id, Loss.CRASHED)
            attempts = running.lost
            if self._may_try(attempts, alone):
                requeue(self._workspace, running.job_id)
            else:
                now = self._clock.now()
                give_up(self._workspace, running.job_id, attempts, LlmCode.ENGINE_CRASHED, now)
            self._left(running)
        return attempts

    def _check(self, running: Running) -> None:
        """Gone unless the folder is still the one that we claimed, and ours."""
        try:
            found = os.lstat(running.folder).st_ino
        except FileNotFoundError:
            raise JobGone(running.job_id) from None
        if found != running.folder_id or not self._claims.holds(running.job_id):
            raise JobGone(running.job_id)

    def _left(self, running: Running) -> None:
        running.ended = True
        self._claims.drop(running.job_id)

    def _meta(self, running: Running, outcome: SpoolOutcome) -> Meta:
        return structs.replace(
            running.meta or seen_meta(running.folder),
            **{**running.facts, **outcome.facts},
            code=outcome.code,
            completed_at=stamp(self._clock.now()),
            duration_s=round(self._clock.monotonic() - running.since, 2),
            attempts=running.attempts.count + 1,
        )

    # ----------------------------------------------------------------------------------

    def _may_try(self, attempts: Attempts, alone: bool) -> bool:
        """One that was not alone may be innocent, however often."""
        return attempts.count < self._most or not alone

    async def _insisting(self, running: Running, work: Callable[[], T]) -> T:
        pause = _PAUSE
        while True:
            try:
                done = await self._threads.see_through(work)
            except StoreFailed as error:
                self._health.trouble(f"job {running.job_id}", str(error))
                await self._clock.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
            else:
                self._health.over(f"job {running.job_id}")
                return done

    def _happened(
        self, running: Running, what: EventKind, tokens: int = 0, code: str = "", reason: str = ""
    ) -> None:
        now = self._clock
        self._tell(
            JobEvent(
                at=now.now(),
                what=what,
                job_id=running.job_id,
                seconds=now.monotonic() - running.since,
                tokens=tokens,
                code=code,
                reason=reason,
            )
        )
