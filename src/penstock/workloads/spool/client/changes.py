"""What a user does with jobs that are there: cancel, clean up, retry."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from penstock.core.errors import Conflict, InvalidRequest, NotFound, PenstockError
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.spool.client.work import IMAGES, MAX_PROMPT, PROMPT, Work
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.files import (
    TMP,
    Unfit,
    make_usable,
    move,
    read_file,
    remove_tree,
    replace_file,
)
from penstock.workloads.spool.disk.job import (
    JobGone,
    fail,
    read_kind,
    read_options,
    requeue,
    seen_meta,
    stamp,
)
from penstock.workloads.spool.disk.peers import Peers, original_runs, returning
from penstock.workloads.spool.disk.workspace import JobId, Workspace, is_job_id, order_of

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
        with suppress(FileNotFoundError):
            if not make_usable(workspace.name(status, job_id)):
                raise Conflict(f"{job_id} in {workspace.folder(status)} is not a folder")
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
        with suppress(OSError, PenstockError, JobGone):  # the disk would not let us end it
            requeue(workspace, job_id)
        raise
    return Status.FAILED


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
    dry_run: bool = False,
) -> list[JobId]:
    """The ids of the jobs that were taken away: those that ended more than `older_than` seconds
    ago, and all but the last `keep` in each state. With neither, no job is. A dry run only tells.

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
            if dry_run or _take_away(workspace, status, job_id):
                gone.append(job_id)
    if not dry_run:
        _sweep(workspace.folder(Status.STAGING), lambda one: now - _changed(one) > ABANDONED)
        _sweep(workspace.private / "cancel", lambda one: _is_over(workspace, one.name))
        _sweep(workspace.private / "trash", lambda _: True)
    return sorted(gone, key=order_of)


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
                    yield _changed(entry), order_of(entry.name), entry.name


def _take_away(workspace: Workspace, status: Status, job_id: JobId) -> bool:
    trash = workspace.private / "trash" / f"{job_id}.{secrets.token_hex(8)}{TMP}"
    try:
        move(workspace.of(status, job_id), trash, sync=Sync.NONE)
    except FileNotFoundError:
        return False  # somebody else was quicker
    return True


def _sweep(folder: Path, is_old: Callable[[os.DirEntry[str]], bool]) -> None:
    """Another who cleans may be at it too; what stays is for the next time."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if is_old(entry):
                    remove_tree(entry.path)


def _changed(entry: os.DirEntry[str]) -> float:
    return entry.stat(follow_symlinks=False).st_mtime


def _is_over(workspace: Workspace, name: str) -> bool:
    """Whether a wish to cancel it is too late."""
    return not is_job_id(name) or workspace.find(name) not in (Status.QUEUED, Status.RUNNING)


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
