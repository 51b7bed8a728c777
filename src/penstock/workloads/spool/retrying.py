"""Running a job that has ended once more: a new job of the same files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from msgspec import structs

from penstock.core.errors import Conflict, NotFound
from penstock.lifecycles.spool import SPOOL, Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.disk import Unfit, read_file
from penstock.workloads.spool.ids import JobId
from penstock.workloads.spool.meta import read_kind, read_options, seen_meta
from penstock.workloads.spool.submission import MAX_PROMPT
from penstock.workloads.spool.work import IMAGES, PROMPT, Work
from penstock.workloads.spool.workspace import Workspace


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
        prompt, images = read_file(folder / PROMPT, MAX_PROMPT), _images(folder)
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
