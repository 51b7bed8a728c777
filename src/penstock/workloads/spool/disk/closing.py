"""How a job ends: everything about it is final, and on the disk, before it can be seen.

All is written where the job runs; then one rename makes it DONE or FAILED. Who is killed before
that leaves a job that runs and has no server, and the next server starts it again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from penstock.core.errors import Conflict
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.process import failpoint
from penstock.workloads.spool.disk.files import (
    exists,
    fsync_dir,
    make_folder,
    move,
    replace_file,
    store_errors,
    write_files,
)
from penstock.workloads.spool.disk.ids import JobId
from penstock.workloads.spool.disk.meta import META, Meta, encode_meta
from penstock.workloads.spool.disk.removing import TMP, open_up, remove_tree
from penstock.workloads.spool.disk.workspace import Workspace

RESULT, EMBEDDING, ANSWER, AUDIO = "result.txt", "embedding.json", "answer.json", "audio.wav"
ERROR, PARTIAL, PROGRESS = "error.txt", "partial.txt", "progress.json"
_PASSING = frozenset({PARTIAL, PROGRESS, ERROR, RESULT, EMBEDDING, ANSWER, AUDIO})
_MOST_ERROR = 16_384
_IMPOSTOR = "not-a-folder"


def finish(workspace: Workspace, job_id: JobId, meta: Meta, artifacts: Mapping[str, bytes]) -> None:
    """RUNNING becomes DONE, with these files as its results.

    Conflict if somebody moved or deleted it meanwhile, or put another under its id in its way;
    then it is not DONE. StoreFull or StoreFailed if the disk refuses.
    """
    end = structs.replace(meta, status="done", artifacts=tuple(artifacts))
    if not _is_folder(workspace.name(Status.RUNNING, job_id)):
        raise _gone(workspace, job_id)
    _end(workspace, job_id, SpoolEvent.FINISH, encode_meta(end), artifacts)


def fail(workspace: Workspace, job_id: JobId, meta: Meta, error: str) -> None:
    """RUNNING becomes FAILED, with one line that says why; raises as `finish` does.

    What lies in the place of the job's folder, if it is none, is put into one.
    """
    end = structs.replace(meta, status="failed", artifacts=(ERROR,))
    said = {ERROR: _line(error)}
    if _is_folder(workspace.name(Status.RUNNING, job_id)):
        _end(workspace, job_id, SpoolEvent.FAIL, encode_meta(end), said)
    else:
        _fail_impostor(workspace, job_id, {**said, META: encode_meta(end)})


def _end(
    workspace: Workspace,
    job_id: JobId,
    event: SpoolEvent,
    meta: bytes,
    files: Mapping[str, bytes],
) -> None:
    folder = workspace.name(Status.RUNNING, job_id)
    target = workspace.name(SPOOL.after(Status.RUNNING, event), job_id)
    try:
        replace_file(folder, META, meta, workspace.sync, beside=files)
        remove_attempt(folder, files)  # afterwards, so that who reads along always finds the text
        fsync_dir(folder, workspace.sync)
        failpoint("spool-ended")
        move(folder, target, sync=workspace.sync)
    except FileNotFoundError:
        raise _gone(workspace, job_id) from None
    except FileExistsError:
        raise Conflict(
            f"job {job_id} is in {os.path.dirname(target)} already", hint="two folders have one id"
        ) from None
    _forget_cancellation(workspace, job_id)


def _fail_impostor(workspace: Workspace, job_id: JobId, files: Mapping[str, bytes]) -> None:
    """A folder is made beside it and becomes the failed job, with the thing in it; until then the
    thing stays."""
    impostor = workspace.of(Status.RUNNING, job_id)
    if not os.path.lexists(impostor):
        raise _gone(workspace, job_id)
    draft = workspace.folder(Status.STAGING) / f"{job_id}{TMP}"
    with store_errors("clear", draft):
        remove_tree(draft)
    make_folder(draft)
    write_files(draft, files, workspace.sync)
    with suppress(OSError):  # some file systems have no links
        os.link(impostor, draft / _IMPOSTOR, follow_symlinks=False)
    fsync_dir(draft, workspace.sync)
    with suppress(FileExistsError):  # who did this before was killed before the next line
        move(draft, workspace.of(Status.FAILED, job_id), sync=workspace.sync)
    with store_errors("clear", impostor):
        remove_tree(impostor)
        remove_tree(draft)
    _forget_cancellation(workspace, job_id)


def _is_folder(path: str) -> bool:
    """Whether it is one, which its owner may read and write from now on."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        return False
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        open_up(Path(path), mode)
    return True


def remove_attempt(folder: Path | str, keep: Container[str] = ()) -> None:
    """Remove what a job has only while it runs, and what an earlier attempt left."""
    with store_errors("clear", folder):
        for name in os.listdir(folder):
            if name not in keep and (name in _PASSING or name.endswith(TMP)):
                remove_tree(Path(folder, name))


def _forget_cancellation(workspace: Workspace, job_id: JobId) -> None:
    if exists(note := f"{workspace.private}/cancel/{job_id}"):
        with suppress(OSError):
            os.unlink(note)


def _gone(workspace: Workspace, job_id: JobId) -> Conflict:
    return Conflict(
        f"job {job_id} is not in {workspace.folder(Status.RUNNING)} any more",
        hint="it was moved or deleted while it ran",
    )


def _line(error: str) -> bytes:
    line = " ".join(error.split()) or "unknown error"
    return line.encode(errors="backslashreplace")[:_MOST_ERROR]
