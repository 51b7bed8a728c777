"""What a spooled job may ask for beside its prompt: `options.json` in its directory.

The file is ours, so that a tool which rewrites `meta.json` loses nothing. Without it a job is
what it was in the original: one user message, and the server's defaults.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.core.job import Priority
from penstock.workloads.llm.values import Message, Sampling


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
