"""What is answered about a job: the protocol's keys first, in its order."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.job import (
    Artifact,
    JobError,
    Priority,
    Usage,
)


class Accepted(Struct, frozen=True):
    """A submission that was accepted: it is stored."""

    accepted: bool
    job_id: str
    state: ContainerJobState


class Refusal(Struct, frozen=True):
    """A submission that was refused: nothing of it is stored."""

    accepted: bool
    job_id: Any
    """As it was given, whatever it was; null without one."""
    state: ContainerJobState
    error: JobError


class Absent(Struct, frozen=True):
    """There is no such job on this worker."""

    job_id: str
    state: ContainerJobState = ContainerJobState.NOT_FOUND


class Deleted(Struct, frozen=True):
    job_id: str
    state: ContainerJobState
    note: str
    """What came of it, in a sentence."""


class ProtocolRecord(Struct, frozen=True, kw_only=True):
    """A job, in the protocol's own words. Times are ISO 8601, UTC."""

    job_id: str
    state: ContainerJobState
    created_at: str
    started_at: str | None
    finished_at: str | None
    exit_code: int | None
    """Of the container; 125 for a missing image and other errors of the engine, 126 and 127 for
    a command that can't be run or found, 137 for a memory kill; null after a timeout or cancel."""
    stdout: str
    """What is kept of it, once the job has ended; before, see `/jobs/{job_id}/logs`."""
    stderr: str
    error: JobError | None


class JobRecord(ProtocolRecord, frozen=True, kw_only=True):
    """A job. Everything after `error` is more than the protocol has. Times are ISO 8601, UTC."""

    priority: Priority
    labels: dict[str, str]
    image: str
    image_id: str
    """What the image's name meant when the job started."""
    engine: str
    position: int | None
    """How many queued jobs start before it."""
    waiting_for: str
    """Why it has not started, in a sentence."""
    usage: Usage
    stdout_bytes: int
    """How many the container wrote, kept or not."""
    stdout_truncated: bool
    stdout_gap: bool
    """Whether some are missing because no worker was there to read them."""
    stderr_bytes: int
    stderr_truncated: bool
    stderr_gap: bool
    artifacts: tuple[Artifact, ...]
    skipped: tuple[str, ...]
    """What lay in the output folder and was not collected, each with its reason."""


class ProtocolSummary(Struct, frozen=True, kw_only=True):
    """A job without its output."""

    job_id: str
    state: ContainerJobState
    created_at: str
    started_at: str | None
    finished_at: str | None
    exit_code: int | None
    error: JobError | None


class JobSummary(ProtocolSummary, frozen=True, kw_only=True):
    """A job without its output. Times are ISO 8601, UTC."""

    priority: Priority
    labels: dict[str, str]
    image: str
    engine: str
    usage: Usage


class JobPage(Struct, frozen=True):
    jobs: list[JobSummary]
    next: str | None
    """The cursor of the next page; null on the last."""


def moment(seconds: float) -> str:
    """Milliseconds and Z, as the protocol writes times."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{datetime.fromtimestamp(whole, UTC):%Y-%m-%dT%H:%M:%S}.{milliseconds:03}Z"


def maybe_moment(seconds: float | None) -> str | None:
    return None if seconds is None else moment(seconds)
