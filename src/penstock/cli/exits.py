"""How a command can end: the one table of exit codes.

docs/reference/exit-codes.md is made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from penstock.core import errors
from penstock.lifecycles.canonical import JobState


class Exit(IntEnum):
    """An exit code, and what it means."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:
        self = int.__new__(cls, code)
        self._value_ = code
        self.meaning = meaning
        return self

    OK = 0, "Done; a job that was waited for SUCCEEDED."
    FAILED = 1, "The job FAILED, or the command could not do its work."
    USAGE = 2, "Invalid option, input, topic, setting or file."
    NOT_FOUND = 3, "The job, or whatever else was named, was not found."
    CONFLICT = 4, "The id or key is taken, or the job's state does not allow it (any more)."
    CANCELLED = 5, "The job was CANCELLED."
    DENIED = 6, "The job was DENIED, or the caller has no right to this."
    TIMEOUT = 7, "The job ended TIMEOUT."
    UNAVAILABLE = 8, "The engine does not answer or can't go on, or another engine owns the folder."
    NOT_YET = 9, "The job has not ended (within the time to wait)."
    MISMATCH = 10, "`verify` or `restore` found a job whose record and log disagree."
    TOO_MANY = 11, "A limit was reached; try again later."
    INTERRUPTED = 130, "Interrupted (Ctrl-C)."


EXITS: Mapping[type[errors.PenstockError], Exit] = {
    errors.PenstockError: Exit.FAILED,
    errors.InvalidRequest: Exit.USAGE,
    errors.Misconfigured: Exit.USAGE,
    errors.NotFound: Exit.NOT_FOUND,
    errors.Conflict: Exit.CONFLICT,
    errors.StaleApproval: Exit.CONFLICT,
    errors.IllegalMove: Exit.CONFLICT,
    errors.NotPermitted: Exit.DENIED,
    errors.NotAuthenticated: Exit.DENIED,
    errors.TooMany: Exit.TOO_MANY,
    errors.Unavailable: Exit.UNAVAILABLE,
    errors.WaitTimedOut: Exit.NOT_YET,
    errors.JobEnded: Exit.FAILED,
    errors.JobFailed: Exit.FAILED,
    errors.JobCancelled: Exit.CANCELLED,
    errors.JobDenied: Exit.DENIED,
    errors.JobTimedOut: Exit.TIMEOUT,
}
"""The code of each error; one that isn't here has that of its nearest ancestor."""

ENDS: Mapping[JobState, Exit] = {
    JobState.SUCCEEDED: Exit.OK,
    JobState.FAILED: Exit.FAILED,
    JobState.CANCELLED: Exit.CANCELLED,
    JobState.DENIED: Exit.DENIED,
    JobState.TIMEOUT: Exit.TIMEOUT,
}
"""The code of each end of a job."""


def exit_of(error: errors.PenstockError) -> Exit:
    return next(EXITS[kind] for kind in type(error).__mro__ if kind in EXITS)
