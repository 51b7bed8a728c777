"""How a job ends: everything about it is final, and on the disk, before it can be seen.

A server ends the jobs that it runs with `finish` and `fail`; with the rest a tool does to a
job what its user wants: `cancel`, `retry`, `clean`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.core.errors import Conflict
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.failpoint import failpoint
from penstock.workloads.spool.disk import fsync_dir, move, replace_file, store_errors
from penstock.workloads.spool.ids import JobId
from penstock.workloads.spool.meta import Meta, write_meta
from penstock.workloads.spool.removing import TMP, remove_tree
from penstock.workloads.spool.workspace import Workspace

RESULT, EMBEDDING, ANSWER, AUDIO = "result.txt", "embedding.json", "answer.json", "audio.wav"
ERROR, PARTIAL, PROGRESS = "error.txt", "partial.txt", "progress.json"
_PASSING = frozenset({PARTIAL, PROGRESS, ERROR, RESULT, EMBEDDING, ANSWER, AUDIO})
_MOST_ERROR = 16_384


def finish(workspace: Workspace, job_id: JobId, meta: Meta, artifacts: Mapping[str, bytes]) -> None:
    """RUNNING becomes DONE, with these files as its results.

    Conflict if somebody moved or deleted it meanwhile; then it is not DONE.
    """
    end = msgspec.structs.replace(meta, status="done", artifacts=tuple(artifacts))
    _end(workspace, job_id, SpoolEvent.FINISH, end, artifacts)


def fail(workspace: Workspace, job_id: JobId, meta: Meta, error: str) -> None:
    """RUNNING becomes FAILED, with one line that says why."""
    end = msgspec.structs.replace(meta, status="failed", artifacts=())
    _end(workspace, job_id, SpoolEvent.FAIL, end, {ERROR: _line(error)})


def _end(
    workspace: Workspace,
    job_id: JobId,
    event: SpoolEvent,
    meta: Meta,
    files: Mapping[str, bytes],
) -> None:
    folder = workspace.of(Status.RUNNING, job_id)
    target = workspace.of(SPOOL.after(Status.RUNNING, event), job_id)
    try:
        _clear(folder, files)
        for name, data in files.items():
            replace_file(folder, name, data, workspace.sync)
        write_meta(folder, meta, workspace.sync)
        fsync_dir(folder, workspace.sync)
        failpoint("spool-ended")
        move(folder, target, sync=workspace.sync)
    except FileNotFoundError:
        raise Conflict(
            f"job {job_id} is not in {folder.parent} any more",
            hint="somebody moved or deleted it while it ran",
        ) from None
    except FileExistsError:
        raise Conflict(
            f"job {job_id} is in {target.parent} already", hint="two jobs have one id"
        ) from None


def _clear(folder: Path, files: Mapping[str, bytes]) -> None:
    """Remove what a job has only while it runs, and what an earlier attempt left."""
    with store_errors("clear", folder):
        for name in os.listdir(folder):
            if name not in files and (name in _PASSING or name.endswith(TMP)):
                remove_tree(folder / name)


def _line(error: str) -> bytes:
    line = " ".join(error.split()) or "failed, and nobody said why"
    return line.encode(errors="backslashreplace")[:_MOST_ERROR]
