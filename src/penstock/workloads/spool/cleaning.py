"""Taking jobs away that have ended, and what killed programs left behind."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from penstock.core.errors import InvalidRequest
from penstock.lifecycles.spool import SPOOL, Status
from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import move
from penstock.workloads.spool.ids import JobId, is_job_id, order_of
from penstock.workloads.spool.removing import TMP, remove_tree
from penstock.workloads.spool.workspace import Workspace

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
