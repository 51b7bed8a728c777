"""What a user does with jobs that are there: cancel, clean up, retry."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from msgspec import structs

from penstock.core.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.spool.client.work import IMAGES, MAX_PROMPT, PROMPT, Work
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.closing import fail
from penstock.workloads.spool.disk.files import Unfit, move, read_file, replace_file
from penstock.workloads.spool.disk.ids import JobId, is_job_id, order_of
from penstock.workloads.spool.disk.meta import read_kind, read_options, seen_meta, stamp
from penstock.workloads.spool.disk.peers import Peers, original_runs, returning
from penstock.workloads.spool.disk.removing import TMP, remove_tree
from penstock.workloads.spool.disk.workspace import Workspace

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
        _requeue(workspace, job_id)
        raise
    return Status.FAILED


def _requeue(workspace: Workspace, job_id: JobId) -> None:
    """The disk would not let us end it."""
    queued = SPOOL.after(Status.RUNNING, SpoolEvent.RECOVER)
    with suppress(OSError, PenstockError):
        move(workspace.of(Status.RUNNING, job_id), workspace.of(queued, job_id), sync=Sync.NONE)


def _has_server(workspace: Workspace, job_id: JobId, clock: Clock) -> bool:
    """Whether somebody who is alive runs it. An original server's jobs can't be told from ours."""
    servers = Peers(workspace.private, _LEASE, clock).look()
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


ABANDONED = 86_400.0
"""Seconds after which a folder in `input/writing` is nobody's."""


def clean(
    workspace: Workspace,
    older_than: float | None = None,
    keep: int | None = None,
    states: Collection[Status] = SPOOL.final,
    *,
    clock: Clock | None = None,
) -> list[JobId]:
    """The ids of the jobs that were taken away: those that ended more than `older_than` seconds
    ago, and all but the last `keep` in each state. With neither, no job is.

    A job is gone at once and as a whole, by one rename; its files are deleted afterwards. What
    submitters that were killed left a day ago goes too.
    """
    if not SPOOL.final.issuperset(states):
        raise InvalidRequest("states", "only jobs that have ended can be taken away")
    workspace.adopt()
    now = (clock or SystemClock()).now()
    gone: list[JobId] = []
    for status in sorted(states):
        for job_id in _chosen(workspace, status, now, older_than, keep):
            if _take_away(workspace, status, job_id):
                gone.append(job_id)
    _sweep_staging(workspace, now)
    _sweep_notes(workspace)
    _empty_trash(workspace)
    return sorted(gone, key=order_of)


def outdated(
    workspace: Workspace,
    older_than: float | None = None,
    keep: int | None = None,
    states: Collection[Status] = SPOOL.final,
    *,
    clock: Clock | None = None,
) -> list[JobId]:
    """The ids of the jobs that `clean` would take away."""
    now = (clock or SystemClock()).now()
    found = (_chosen(workspace, status, now, older_than, keep) for status in states)
    return sorted(chain.from_iterable(found), key=order_of)


def _chosen(
    workspace: Workspace, status: Status, now: float, older_than: float | None, keep: int | None
) -> list[JobId]:
    if older_than is None and keep is None:
        return []
    ends = sorted(_ends(workspace, status), reverse=True)
    return [
        job_id
        for place, (ended, _, job_id) in enumerate(ends)
        if (keep is not None and place >= keep)
        or (older_than is not None and now - ended > older_than)
    ]


def _ends(workspace: Workspace, status: Status) -> Iterator[tuple[float, object, JobId]]:
    """When each ended: then the last file was put into its folder."""
    with os.scandir(workspace.folder(status)) as entries:
        for entry in entries:
            if is_job_id(entry.name):
                with suppress(FileNotFoundError):
                    ended = entry.stat(follow_symlinks=False).st_mtime
                    yield ended, order_of(entry.name), entry.name


def _take_away(workspace: Workspace, status: Status, job_id: JobId) -> bool:
    trash = _trash(workspace) / f"{job_id}.{secrets.token_hex(8)}{TMP}"
    try:
        move(workspace.of(status, job_id), trash, sync=Sync.NONE)
    except FileNotFoundError:
        return False  # somebody else was quicker
    return True


def _sweep_staging(workspace: Workspace, now: float) -> None:
    with os.scandir(workspace.folder(Status.STAGING)) as entries:
        for entry in entries:
            with suppress(OSError):
                if now - entry.stat(follow_symlinks=False).st_mtime > ABANDONED:
                    remove_tree(Path(entry.path))


def _sweep_notes(workspace: Workspace) -> None:
    """Wishes to cancel jobs that have ended."""
    with os.scandir(workspace.private / "cancel") as entries:
        for entry in entries:
            if not is_job_id(entry.name) or _is_over(workspace, entry.name):
                with suppress(OSError):
                    os.unlink(entry.path)


def _is_over(workspace: Workspace, job_id: JobId) -> bool:
    return workspace.find(job_id) not in (Status.QUEUED, Status.RUNNING)


def _empty_trash(workspace: Workspace) -> None:
    with os.scandir(_trash(workspace)) as entries:
        for entry in entries:
            # Another who cleans may be at it too; what stays is for the next time.
            with suppress(OSError):
                remove_tree(Path(entry.path))


def _trash(workspace: Workspace) -> Path:
    return workspace.private / "trash"


def retry(workspace: Workspace, job_id: JobId, *, clock: Clock | None = None) -> JobId:
    """The id of the new job, whose metadata names the old one. A deadline is not taken over.

    NotFound if there is no such job, Conflict if it has not ended, InvalidRequest if what is
    left of it can't be submitted.
    """
    status = workspace.find(job_id)
    if status is Status.MISSING:
        raise NotFound(f"there is no job {job_id} in {workspace.path}")
    if not SPOOL.is_final(status):
        raise Conflict(f"job {job_id} is {status}", hint="only one that has ended can be retried")
    folder = workspace.of(status, job_id)
    meta = seen_meta(folder)
    try:
        prompt, images = read_file(folder, PROMPT, MAX_PROMPT), _images(folder)
    except FileNotFoundError:
        raise NotFound(f"job {job_id} has no {PROMPT} any more") from None
    return Work(workspace, create=False, clock=clock).submit(
        prompt,
        kind=read_kind(folder),
        options=structs.replace(read_options(folder), deadline=None),
        images=images,
        parent=meta.parent or None,
        tags=meta.tags,
        retry_of=job_id,
    )


def _images(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder / IMAGES))
    except (FileNotFoundError, NotADirectoryError):
        return []
    images = [folder / IMAGES / name for name in names]
    for path in (folder / IMAGES, *images):
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise Unfit(path.name, "is a symbolic link")
    return images
