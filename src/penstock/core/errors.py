"""Everything Penstock raises, as one tree.

    PenstockError
    ├── InvalidRequest          what was asked is wrong; names the field
    │   ├── UnknownTopic        nobody serves this topic
    │   ├── TooLarge            a payload over its limit
    │   ├── UnreadablePointer   a context_ptr that may not be, or can't be, read
    │   └── Unstorable          a value that no database can hold
    ├── Conflict                the id or key is taken by a different request
    │   ├── StaleApproval       what was approved is not what waits any more
    │   ├── PipelineBusy        a pipeline that runs once at a time is running
    │   └── Superseded          another run of the job has taken over
    ├── NotFound                no such job, worker or blob
    ├── IllegalMove             the lifecycle's table has no such move
    ├── Misconfigured           a settings, rule or application file is wrong
    ├── NotPermitted            the caller has no right to this
    │   └── NotAuthenticated    no key, or not a valid one
    ├── TooMany                 over a limit; says when to try again
    ├── Unavailable             the engine can't be reached or can't go on
    │   ├── NotRunning          nothing listens at this data directory or address
    │   ├── AlreadyRunning      another engine owns this data directory
    │   └── StoreFailed         the database refused to write
    │       ├── StoreFull       no space left
    │       └── StoreCorrupt    not our database, or damaged
    ├── WaitTimedOut            the caller's patience ended; the job goes on
    └── JobEnded                a job ended without the result asked for
        ├── JobFailed
        ├── JobCancelled
        ├── JobDenied
        └── JobTimedOut

Every error says what happened and, in `hint`, what to do next. `code` is stable and
meant for programs; the translation to exit codes is in `cli/exits.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from penstock.core.job import Job


class PenstockError(Exception):
    """The root: carries a stable `code`, a message and a hint."""

    code: ClassVar[str] = "ERROR"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @property
    def facts(self) -> dict[str, Any]:
        """What a program may want to know beside code and message."""
        return {}


class InvalidRequest(PenstockError):
    code = "INVALID"

    def __init__(self, field: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {problem}", hint=hint)
        self.field = field
        self.problem = problem

    @property
    def facts(self) -> dict[str, Any]:
        return {"field": self.field, "problem": self.problem}


class UnknownTopic(InvalidRequest):
    code = "UNKNOWN_TOPIC"


class TooLarge(InvalidRequest):
    code = "TOO_LARGE"


class UnreadablePointer(InvalidRequest):
    code = "UNREADABLE_POINTER"


class Unstorable(InvalidRequest):
    code = "UNSTORABLE"


class Conflict(PenstockError):
    code = "CONFLICT"


class StaleApproval(Conflict):
    code = "STALE_APPROVAL"


class PipelineBusy(Conflict):
    code = "PIPELINE_BUSY"

    def __init__(self, message: str, *, running: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.running = running
        """The job that runs."""

    @property
    def facts(self) -> dict[str, Any]:
        return {"running": self.running}


class Superseded(Conflict):
    code = "SUPERSEDED"


class NotFound(PenstockError):
    code = "NOT_FOUND"


class IllegalMove(PenstockError):
    code = "ILLEGAL_MOVE"

    def __init__(self, machine: str, state: str, event: str) -> None:
        super().__init__(f"{machine}: '{event}' can't happen to a job that is {state}")
        self.machine, self.state, self.event = machine, state, event

    @property
    def facts(self) -> dict[str, Any]:
        return {"machine": self.machine, "state": self.state, "event": self.event}


class Misconfigured(PenstockError):
    code = "MISCONFIGURED"


class NotPermitted(PenstockError):
    code = "NOT_PERMITTED"


class NotAuthenticated(NotPermitted):
    code = "NOT_AUTHENTICATED"


class TooMany(PenstockError):
    code = "TOO_MANY"

    def __init__(self, message: str, *, retry_after: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after

    @property
    def facts(self) -> dict[str, Any]:
        return {"retry_after": self.retry_after}


class Unavailable(PenstockError):
    code = "UNAVAILABLE"


class NotRunning(Unavailable):
    code = "NOT_RUNNING"


class AlreadyRunning(Unavailable):
    code = "ALREADY_RUNNING"


class StoreFailed(Unavailable):
    code = "STORE_FAILED"


class StoreFull(StoreFailed):
    code = "STORE_FULL"


class StoreCorrupt(StoreFailed):
    code = "STORE_CORRUPT"


class WaitTimedOut(PenstockError):
    code = "WAIT_TIMED_OUT"


class JobEnded(PenstockError):
    """A job ended otherwise than with a result; `job` is its last record."""

    code = "JOB_ENDED"

    def __init__(self, job: Job) -> None:
        result = job.result
        why = (result.error_message or result.error_code) if result else ""
        super().__init__(f"job {job.job_id} ended {job.state}" + (f": {why}" if why else ""))
        self.job = job

    @property
    def error_code(self) -> str | None:
        return self.job.result.error_code if self.job.result else None


class JobFailed(JobEnded):
    code = "JOB_FAILED"


class JobCancelled(JobEnded):
    code = "JOB_CANCELLED"


class JobDenied(JobEnded):
    code = "JOB_DENIED"


class JobTimedOut(JobEnded):
    code = "JOB_TIMED_OUT"
