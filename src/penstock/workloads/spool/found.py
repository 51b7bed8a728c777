"""What is found of a job by somebody who looks."""

from __future__ import annotations

import os
from codecs import getincrementaldecoder
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.lifecycles.spool import Status
from penstock.workloads.spool.closing import (
    ANSWER,
    AUDIO,
    EMBEDDING,
    ERROR,
    PARTIAL,
    PROGRESS,
    RESULT,
)
from penstock.workloads.spool.disk import Unfit, read_file
from penstock.workloads.spool.ids import JobId
from penstock.workloads.spool.meta import Meta, seen_meta

_CONTENT = (RESULT, EMBEDDING, AUDIO)
_MOST = 1 << 30
_MOST_PROGRESS = 1 << 16


class Listed(Struct, frozen=True):
    """A job in a list."""

    job_id: JobId
    status: Status


class Found(Struct, frozen=True, kw_only=True):
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


def read_found(folder: Path, job_id: JobId, status: Status) -> Found:
    """As it lies there; whether it still does is for the caller to see."""
    return Found(
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
    said = _bytes(folder / PARTIAL)
    if said is None:
        said = _bytes(folder / RESULT) or b""
    return getincrementaldecoder("utf-8")(errors="replace").decode(said)


def read_progress(folder: Path) -> Progress:
    try:
        return msgspec.json.decode(read_file(folder / PROGRESS, _MOST_PROGRESS), type=Progress)
    except (FileNotFoundError, Unfit, msgspec.DecodeError):
        return Progress()


def _content(folder: Path) -> bytes | None:
    for name in _CONTENT:
        content = _bytes(folder / name)
        if content is not None:
            return content
    return None


def _error(folder: Path) -> str:
    return (_bytes(folder / ERROR) or b"").decode(errors="replace").rstrip("\n")


def _artifacts(folder: Path) -> tuple[str, ...]:
    return tuple(name for name in (*_CONTENT, ANSWER) if os.path.lexists(folder / name))


def _bytes(path: Path) -> bytes | None:
    """None for what is not there, or is no file."""
    try:
        return read_file(path, _MOST)
    except (FileNotFoundError, Unfit):
        return None
