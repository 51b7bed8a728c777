"""The result of a job, from how its container ended.

What the worker did to it counts before what it did itself: the exit code of a container that was
ended for its time limit says nothing. The engine's word that memory ran out counts only for a code
that is not 0: a child may have been killed, and the program may have coped with that.
"""

from __future__ import annotations

import signal
from enum import StrEnum

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.engine import EngineError, ExitStatus
from penstock.workloads.container.job import ContainerJob, ContainerResult, ErrorCode

_FILE_TOO_LARGE = 128 + signal.SIGXFSZ
_MEMORY_KILL = 128 + signal.SIGKILL


class Cause(StrEnum):
    """Why the worker ended a container that had not ended by itself."""

    TIMEOUT = "TIMEOUT"
    CANCELLED = "CANCELLED"
    OUTPUT_LIMIT = "OUTPUT_LIMIT"


def failed(job: ContainerJob, failure: EngineError) -> ContainerResult:
    """Something kept the job from running, or from being seen to its end."""
    field = getattr(failure, "field", "")
    return _failed(failure.code, _message(job, failure), failure.exit_code, field)


def _message(job: ContainerJob, failure: EngineError) -> str:
    """What an engine's error means to the caller who submitted the job."""
    message = str(failure) or type(failure).__name__
    command = f"{job.cmd[0]!r} (runtime.cmd)" if job.cmd else "the image's own command"
    if job.entrypoint:
        command = f"{job.entrypoint[0]!r} (runtime.entrypoint)"
    image = f"image {job.image!r}" if job.image else "the image that was built"
    if failure.code is ErrorCode.COMMAND_NOT_FOUND:
        return f"{command} was not found in {image}: {message}"
    if failure.code is ErrorCode.COMMAND_NOT_RUNNABLE:
        return (
            f"{command} can't be executed in {image}; is it a program for this machine?: {message}"
        )
    return message


def ended(
    job: ContainerJob,
    cause: Cause,
    *,
    reason: str = "",
    exit: ExitStatus | None = None,
    hidden: bool = False,
    stuck: bool = False,
) -> ContainerResult:
    """The worker ended it. `reason`: of a cancel; `hidden`: for a folder in /output that the worker
    can't look into; `stuck`: the container withstood every attempt to end it."""
    exit_code = None
    if cause is Cause.TIMEOUT:
        seconds = number(job.limits.max_runtime_seconds)
        message = (
            f"ran longer than {seconds} s (runtime.limits.max_runtime_seconds); "
            "the container was ended"
        )
    elif cause is Cause.OUTPUT_LIMIT:
        message = _too_much_output(job, hidden) + "; the container was ended"
        exit_code = exit.code if exit is not None else None
    else:
        message = reason or "cancelled"
    if stuck:
        message += " (the engine has not yet said that it is gone; this worker keeps trying)"
    return _failed(ErrorCode(cause), message, exit_code)


def exited(
    job: ContainerJob, exit: ExitStatus, *, too_much_output: bool = False, hidden: bool = False
) -> ContainerResult:
    """It ended by itself."""
    known = exit.code is not None and not (exit.code == 0 and exit.error)
    if not known and exit.oom:
        return _failed(ErrorCode.OOM_KILLED, _out_of_memory(job), _MEMORY_KILL)
    if not known:
        why = exit.error or "it gave no reason"
        message = f"the container engine can't tell how the container ended: {why}"
        return _failed(ErrorCode.ENGINE_ERROR, message)
    if too_much_output or (job.outputs and exit.code == _FILE_TOO_LARGE):
        return _failed(ErrorCode.OUTPUT_LIMIT, _too_much_output(job, hidden), exit.code)
    if exit.code == 0:
        return ContainerResult(state=ContainerJobState.FINISHED, exit_code=0)
    if exit.oom:
        return _failed(ErrorCode.OOM_KILLED, _out_of_memory(job), exit.code)
    return _failed(ErrorCode.NON_ZERO_EXIT, _non_zero(exit), exit.code)


def _non_zero(exit: ExitStatus) -> str:
    said = f": {exit.error}" if exit.error else ""
    name = _signal_name(exit.code or 0)
    if exit.code == _MEMORY_KILL:
        said = said or "; neither this worker nor its memory limit did that"
    return (
        f"killed by {name} (exit code {exit.code})" if name else f"exited with {exit.code}"
    ) + said


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return ""


def _out_of_memory(job: ContainerJob) -> str:
    megabytes = number(job.limits.memory_mb)
    return (
        f"used more than {megabytes} MB of memory (runtime.limits.memory_mb); "
        "the container was killed"
    )


def _too_much_output(job: ContainerJob, hidden: bool) -> str:
    if hidden:
        return (
            "made a folder in /output that this worker can't look into; leave it readable for "
            "everybody, or run the worker as root"
        )
    most = job.limits.max_artifact_bytes
    return f"left more than {most} bytes in /output (runtime.limits.max_artifact_bytes)"


def _failed(
    code: ErrorCode, message: str, exit_code: int | None = None, field: str = ""
) -> ContainerResult:
    return ContainerResult(
        state=ContainerJobState.FAILED,
        exit_code=exit_code,
        error_code=code,
        error_message=message,
        error_field=field,
    )


def number(value: float) -> str:
    """As people write it: 10, 0.5, 1000000."""
    return str(int(value)) if value == int(value) else f"{value:.12g}"
