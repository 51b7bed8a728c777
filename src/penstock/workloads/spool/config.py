"""What can be set of a spool's server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=31_536_000)]


class Sync(StrEnum):
    """What a job that was acknowledged survives."""

    FULL = "full"
    """Power loss: files and folders are flushed before the rename that makes them visible."""
    NONE = "none"
    """The death of any process, but not power loss."""


class ServerConfig(Struct, frozen=True, kw_only=True):
    """One server on one workspace."""

    workspace: Path
    workers: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Jobs that are RUNNING at once; as many as the model has slots is right."""
    sync: Sync = Sync.FULL
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """How often a job may lose its server or crash the engine before it is FAILED."""
    scan: Annotated[float, Meta(ge=0.05, le=3600)] = 1.0
    """Seconds between two looks at the folders, should an event have been missed."""
    lease: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    """Seconds of silence after which a server on another machine counts as dead; one on this
    machine is known to be by its lock."""
    drain: Seconds = 30.0
    """Seconds that running jobs have to end when the server is told to stop; then they are
    queued again."""
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 2048
    """Of a job that names no limit."""
    keep_jobs: Count = 0
    """How many ended jobs are kept in each of `output` and `failed`; 0 means all."""
    keep_seconds: Seconds = 0.0
    """How long an ended job is kept; 0 means for ever."""
