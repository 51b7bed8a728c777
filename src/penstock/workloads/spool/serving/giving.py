"""Giving a job back to the queue, or up. Blocking code; the caller has the job.

For the way back the caller also holds `returning.lock`.
"""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import structs

from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.failpoint import failpoint
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import move, store_errors
from penstock.workloads.spool.ending import (
    ANSWER,
    AUDIO,
    EMBEDDING,
    ERROR,
    PARTIAL,
    PROGRESS,
    RESULT,
    fail,
)
from penstock.workloads.spool.meta import Meta, seen_meta, stamp, write_meta
from penstock.workloads.spool.removing import TMP, remove_tree
from penstock.workloads.spool.serving.attempts import Attempts, Loss, count_attempt
from penstock.workloads.spool.serving.reading import Gone, is_folder
from penstock.workloads.spool.workspace import Workspace

_OF_AN_ATTEMPT = frozenset({RESULT, EMBEDDING, ANSWER, AUDIO, ERROR, PARTIAL, PROGRESS})
_ENDED = {"completed_at": "", "duration_s": None, "artifacts": (), "status": "", "code": ""}


def lose(workspace: Workspace, job_id: str, loss: Loss) -> Attempts:
    """Count an attempt that came to nothing, durably. Gone if the job is."""
    folder = workspace.of(Status.RUNNING, job_id)
    if not is_folder(folder):
        return Attempts()
    try:
        return count_attempt(folder, loss, workspace.sync)
    except FileNotFoundError:
        raise Gone(job_id) from None


def give_back(workspace: Workspace, job_id: str) -> None:
    """RUNNING becomes QUEUED again, with nothing of an attempt left. Gone if the job is."""
    folder = workspace.of(Status.RUNNING, job_id)
    target = workspace.of(SPOOL.after(Status.RUNNING, SpoolEvent.RECOVER), job_id)
    try:
        if is_folder(folder):
            _tidy(folder, workspace.sync)
        failpoint("spool-returning")
        move(folder, target, sync=workspace.sync)
    except FileNotFoundError:
        raise Gone(job_id) from None


def give_up(workspace: Workspace, job_id: str, attempts: Attempts, code: str, now: float) -> None:
    """RUNNING becomes FAILED: it was tried often enough."""
    meta = seen_meta(workspace.of(Status.RUNNING, job_id))
    end = structs.replace(meta, code=code, completed_at=stamp(now), attempts=attempts.count)
    fail(workspace, job_id, end, f"{code}: the job {attempts.reason}")


def _tidy(folder: Path, sync: Sync) -> None:
    with store_errors("clear", folder):
        for name in os.listdir(folder):
            if name in _OF_AN_ATTEMPT or name.endswith(TMP):
                remove_tree(folder / name)
    meta = seen_meta(folder)
    if meta.status:
        write_meta(folder, _not_ended(meta), sync)


def _not_ended(meta: Meta) -> Meta:
    return structs.replace(meta, **_ENDED)
