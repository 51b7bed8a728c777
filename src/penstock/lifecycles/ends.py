"""How an inner lifecycle's end reads on the canonical job that carried it.

A pipeline, a container job, a spooled job or a pipe runs inside a canonical job's
RUNNING. Each lifecycle's own file says which canonical end each of its ends is.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.lifecycles.canonical import JobState


class CanonicalEnd(NamedTuple):
    """A terminal state, and the error code to use where the inner job gave none."""

    state: JobState
    error_code: str | None = None
