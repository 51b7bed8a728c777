"""Everything Penstock raises, as one tree.

    PenstockError
    ├── InvalidRequest          what was asked is wrong; names the field
    │   ├── UnknownTopic        no worker serves this topic
    │   ├── TooLarge            a payload over its limit
    │   ├── UnreadablePointer   a context_ptr that may not be, or can't be, read
    │   ├── Unstorable          a value that no database can hold
    │   └── WrongShard          the tenant is in another shard of the database
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
    │   ├── EngineUnavailable   an engine that was lost has not come back in time, or the call
    │   │                       may not be sent to it again
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

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from penstock.core.job import Job

DEBUG = "PENSTOCK_X_DEBUG"
"""The variable that asks for stack traces."""


class PenstockError(Exception):
    """The root: carries a stable `code`, a message and a hint."""

    code: ClassVar[str] = "ERROR"
    fact_names: ClassVar[tuple[str, ...]] = ()
    """Attributes that a program may want to know beside code and message."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @property
    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.fact_names}


class InvalidRequest(PenstockError):
    code = "INVALID"
    fact_names: ClassVar[tuple[str, ...]] = ("field", "problem")

    def __init__(self, field: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {problem}", hint=hint)
        self.field = field
        self.problem = problem


class UnknownTopic(InvalidRequest):
    code = "UNKNOWN_TOPIC"


class TooLarge(InvalidRequest):
    code = "TOO_LARGE"


class UnreadablePointer(InvalidRequest):
    code = "UNREADABLE_POINTER"


class Unstorable(InvalidRequest):
    code = "UNSTORABLE"


class WrongShard(InvalidRequest):
    code = "WRONG_SHARD"
    fact_names: ClassVar[tuple[str, ...]] = ("field", "problem", "shard")

    def __init__(self, field: str, problem: str, *, shard: int = 0, hint: str = "") -> None:
        super().__init__(field, problem, hint=hint)
        self.shard = shard
        """The right one."""


class Conflict(PenstockError):
    code = "CONFLICT"


class StaleApproval(Conflict):
    code = "STALE_APPROVAL"


class PipelineBusy(Conflict):
    code = "PIPELINE_BUSY"
    fact_names = ("running",)

    def __init__(self, message: str, *, running: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.running = running
        """The job that runs."""


class Superseded(Conflict):
    code = "SUPERSEDED"


class StepFailed(PenstockError):
    """A step failed in an earlier attempt of the same try of its job; see `ctx.step`."""

    code = "STEP_FAILED"


class NotFound(PenstockError):
    code = "NOT_FOUND"


class IllegalMove(PenstockError):
    code = "ILLEGAL_MOVE"
    fact_names = ("machine", "state", "event")

    def __init__(self, machine: str, state: str, event: str) -> None:
        super().__init__(f"{machine}: '{event}' can't happen to a job that is {state}")
        self.machine, self.state, self.event = machine, state, event


class MapInterrupted(PenstockError):
    """A `map` ended before all its items were submitted; `__cause__` says why."""

    code = "MAP_INTERRUPTED"

    def __init__(self, topic: str, submitted: Sequence[Any], error: BaseException) -> None:
        super().__init__(
            f"{topic}: {len(submitted)} jobs were submitted, then {type(error).__name__}: {error}",
            hint="they go on; the attribute `submitted` has their handles",
        )
        self.submitted = submitted
        """The handles of the jobs that were submitted, in the order of the items."""


class Misconfigured(PenstockError):
    code = "MISCONFIGURED"


class NotPermitted(PenstockError):
    code = "NOT_PERMITTED"


class NotAuthenticated(NotPermitted):
    code = "NOT_AUTHENTICATED"


class TooMany(PenstockError):
    code = "TOO_MANY"
    fact_names = ("retry_after",)

    def __init__(self, message: str, *, retry_after: float, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class Unavailable(PenstockError):
    code = "UNAVAILABLE"


class NotRunning(Unavailable):
    code = "NOT_RUNNING"


class EngineUnavailable(Unavailable):
    code = "ENGINE_UNAVAILABLE"


class AlreadyRunning(Unavailable):
    code = "ALREADY_RUNNING"


class OwnedByAnother(AlreadyRunning):
    """Another engine owns the database."""

    code = "OWNED_BY_ANOTHER"


class StoreFailed(Unavailable):
    code = "STORE_FAILED"


class NotOwner(StoreFailed):
    """Another engine owns the store."""

    code = "NOT_OWNER"


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
        why = self._reason(job)
        super().__init__(f"job {job.job_id} ended {job.state}" + (f": {why}" if why else ""))
        self.job = job

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.job,)

    @staticmethod
    def _reason(job: Job) -> str | None:
        return (job.result.error_message or job.result.error_code) if job.result else None

    @property
    def error_code(self) -> str | None:
        return self.job.result.error_code if self.job.result else None

    @property
    def error_message(self) -> str:
        return (self.job.result.error_message or "") if self.job.result else ""


class JobFailed(JobEnded):
    """The last try of a job failed. `__cause__` is the exception of the job, as text."""

    code = "JOB_FAILED"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if self.traceback:
            self.__cause__ = RemoteError(self.traceback)

    @staticmethod
    def _reason(job: Job) -> str | None:
        result = job.result
        return ": ".join(filter(None, (result.error_code, result.error_message))) if result else ""

    @property
    def error_type(self) -> str | None:
        """The exception's class with its module, as `builtins.ValueError`; None if the job did
        not raise one."""
        kinds = self.job.result.error_kinds if self.job.result else ()
        return next((kind for kind in kinds if "." in kind), None)

    @property
    def traceback(self) -> str | None:
        """Where the job raised it, as Python prints it."""
        return self.job.result.traceback if self.job.result else None

    @property
    def retryable(self) -> bool:
        """Whether another try could help: it is not an error that every try would repeat (as a
        wrong input), nor one that the job's retry policy leaves out."""
        from penstock.core.job import is_retryable  # it imports this module

        return self.job.result is None or is_retryable(self.job.request.retry, self.job.result)


class RemoteError(Exception):
    """An exception that was raised in a job, as text: its class is not made again here."""

    def __init__(self, traceback: str) -> None:
        super().__init__(traceback)
        self.traceback = traceback

    def __str__(self) -> str:
        return f'\n"""\n{self.traceback}\n"""'


class JobCancelled(JobEnded):
    code = "JOB_CANCELLED"


class JobDenied(JobEnded):
    code = "JOB_DENIED"


class JobTimedOut(JobEnded):
    code = "JOB_TIMED_OUT"


def job_ended(job: Job) -> JobEnded:
    """The error of a job that ended without success."""
    return _ENDS[job.state.value](job)


_ENDS: dict[str, type[JobEnded]] = {
    "FAILED": JobFailed,
    "CANCELLED": JobCancelled,
    "DENIED": JobDenied,
    "TIMEOUT": JobTimedOut,
}


def _kinds(kind: type[PenstockError]) -> dict[str, type[PenstockError]]:
    found = {kind.code: kind}
    for special in kind.__subclasses__():
        found.update(_kinds(special))
    return found


_BY_CODE = _kinds(PenstockError)


def revived(
    code: str, message: str, hint: str = "", facts: Mapping[str, object] | None = None
) -> PenstockError:
    """Rebuild an error that a remote engine sent, from its code and fields."""
    kind = _BY_CODE.get(code, PenstockError)
    facts = facts or {}
    if issubclass(kind, InvalidRequest):
        field, problem = str(facts.get("field", "request")), str(facts.get("problem", message))
        return kind(field, problem, hint=hint)
    if issubclass(kind, TooMany):
        again = facts.get("retry_after")
        wait = float(again) if isinstance(again, int | float) else 1.0
        return kind(message, retry_after=wait, hint=hint)
    if issubclass(kind, PipelineBusy):
        return kind(message, running=str(facts.get("running", "")), hint=hint)
    if issubclass(kind, IllegalMove | JobEnded):
        kind = PenstockError
    return kind(message, hint=hint)


def did_you_mean(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """A hint at the name that was probably meant; else `otherwise`, or the known names."""
    from difflib import get_close_matches  # rarely needed, and slow to import

    names = sorted(known)
    if near := get_close_matches(name, names, 1):
        return f"did you mean {near[0]}?"
    if otherwise is not None:
        return otherwise
    return f"known are {', '.join(names)}" if names else ""
