"""Settings of a spool server, and the options of a spooled job."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.core.job import Priority
from penstock.workloads.llm.values import Message, Sampling

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


class JobKind(StrEnum):
    """The word in `type.txt`; without that file a job is text."""

    TEXT = "text"
    EMBED = "embed"
    VISION = "vision"
    TTS = "tts"
    """Known from the original; ours has no voice, and such a job fails with that reason."""


class SpoolOptions(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """`options.json`; every field has a default, and an unknown one is refused."""

    model: str = ""
    """Its name, or a part of it; empty means the server's first."""
    system: str = ""
    """The system prompt; one that goes on from a parent has its parent's, unless it says so."""
    messages: tuple[Message, ...] = ()
    """A conversation so far; the prompt is its next message."""
    raw: bool = False
    """The prompt is given to the model as it is, without its chat template."""
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    sampling: Sampling = Sampling()
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    schema: dict[str, Any] | None = None
    grammar: str | None = None
    priority: Priority = Priority.BATCH
    deadline: float | None = None
    """The time by which it must have ended, in seconds since the epoch; then it fails."""
    timeout: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    """Seconds that it may run."""
