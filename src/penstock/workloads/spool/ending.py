"""Everything that ends a job, or what is left of it.

A server ends the jobs that it runs with `finish` and `fail`; a tool does what its user wants
with `cancel`, `retry` and `clean`.
"""

from __future__ import annotations

from penstock.workloads.spool.cancelling import CANCELLED, cancel
from penstock.workloads.spool.cleaning import clean
from penstock.workloads.spool.closing import (
    ANSWER,
    AUDIO,
    EMBEDDING,
    ERROR,
    PARTIAL,
    PROGRESS,
    RESULT,
    fail,
    finish,
)
from penstock.workloads.spool.retrying import retry

__all__ = [
    "ANSWER",
    "AUDIO",
    "CANCELLED",
    "EMBEDDING",
    "ERROR",
    "PARTIAL",
    "PROGRESS",
    "RESULT",
    "cancel",
    "clean",
    "fail",
    "finish",
    "retry",
]
