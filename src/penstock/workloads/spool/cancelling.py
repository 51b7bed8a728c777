"""Cancelling a job from outside: at once where nobody runs it, else by asking who does."""

from __future__ import annotations

from contextlib import suppress

from msgspec import structs

from penstock.core.errors import NotFound, PenstockError
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.spool.closing import fail
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import move, replace_file
from penstock.workloads.spool.ids import JobId
from penstock.workloads.spool.meta import seen_meta, stamp
from penstock.workloads.spool.serving.claims import returning
from penstock.workloads.spool.serving.neighbours import Neighbours
from penstock.workloads.spool.serving.pidfile import original_runs
from penstock.workloads.spool.workspace import Workspace

CANCELLED = "CANCELLED"
"""The code of a job that failed because somebody wanted it to."""
_LEASE = 30.0


def cancel(
    workspace: Workspace,
    job_id: JobId,
    reason: str = "cancelled by its user",
    *,
    clock: Clock | None = None,
) -> Status:
    """The state it is in now.

    FAILED: it will not run. RUNNING: its server was asked, and ends it within a token. A job
    that had ended stays as it is, and NotFound is raised about one that is not there.
    """
    time = clock or SystemClock()
    workspace.adopt()
    while True:
        status = workspace.find(job_id)
        if status is Status.MISSING:
            raise NotFound(f"there is no job {job_id} in {workspace.path}")
        if SPOOL.is_final(status):
            return status
        # Under this lock nobody puts a job back, so one that we have stays ours.
        with returning(workspace.private):
            if status is Status.RUNNING and _has_server(workspace, job_id, time):
                return _ask(workspace, job_id, reason)
            if status is Status.RUNNING or _claimed(workspace, job_id):
                with suppress(NotFound):
                    return _end(workspace, job_id, reason, time)


def _claimed(workspace: Workspace, job_id: JobId) -> bool:
    """Whether it was queued, and is ours now."""
    running = SPOOL.after(Status.QUEUED, SpoolEvent.CLAIM)
    try:
        move(workspace.of(Status.QUEUED, job_id), workspace.of(running, job_id), sync=Sync.NONE)
    except (FileNotFoundError, FileExistsError):
        return False
    return True


def _end(workspace: Workspace, job_id: JobId, reason: str, clock: Clock) -> Status:
    if not workspace.holds(Status.RUNNING, job_id):
        raise NotFound(job_id)
    meta = seen_meta(workspace.of(Status.RUNNING, job_id))
    end = structs.replace(meta, code=CANCELLED, completed_at=stamp(clock.now()))
    try:
        fail(workspace, job_id, end, f"{CANCELLED}: {reason}")
    except PenstockError:
        _give_back(workspace, job_id)
        raise
    return Status.FAILED


def _give_back(workspace: Workspace, job_id: JobId) -> None:
    """The disk would not let us end it."""
    queued = SPOOL.after(Status.RUNNING, SpoolEvent.RECOVER)
    with suppress(OSError, PenstockError):
        move(workspace.of(Status.RUNNING, job_id), workspace.of(queued, job_id), sync=Sync.NONE)


def _has_server(workspace: Workspace, job_id: JobId, clock: Clock) -> bool:
    """Whether somebody who is alive runs it. An original server's jobs can't be told from ours."""
    servers = Neighbours(workspace.private, _LEASE, clock).look()
    if any(server.alive and job_id in server.claims for server in servers):
        return True
    return original_runs(workspace.path)


def _ask(workspace: Workspace, job_id: JobId, reason: str) -> Status:
    """Leave a note for its server."""
    notes = workspace.private / "cancel"
    replace_file(notes, job_id, reason.encode(errors="replace"), Sync.NONE)
    status = workspace.find(job_id)
    if status not in (Status.QUEUED, Status.RUNNING):
        with suppress(FileNotFoundError):
            (notes / job_id).unlink()
    return status
