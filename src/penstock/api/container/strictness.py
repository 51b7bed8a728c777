"""`compat: strict`: what is said in the protocol's own codes only, in one table each."""

from __future__ import annotations

from penstock.workloads.container.job import Code, ContainerRecord, JobError

_ENGINE_ERROR_CODE = 125
"""The exit code of a container that could not be made, where its end has none."""

ENDS: dict[str, Code] = {
    Code.OOM_KILLED: Code.NON_ZERO_EXIT,
    Code.IMAGE_NOT_FOUND: Code.NON_ZERO_EXIT,
    Code.IMAGE_PULL_FAILED: Code.NON_ZERO_EXIT,
    Code.COMMAND_NOT_FOUND: Code.NON_ZERO_EXIT,
    Code.COMMAND_NOT_RUNNABLE: Code.NON_ZERO_EXIT,
    Code.ENGINE_ERROR: Code.NON_ZERO_EXIT,
    Code.OUTPUT_LIMIT: Code.NON_ZERO_EXIT,
    Code.ENGINE_UNAVAILABLE: Code.DOCKER_ERROR,
    Code.INPUT_UNAVAILABLE: Code.DOCKER_ERROR,
    Code.INVALID_FIELD: Code.DOCKER_ERROR,
    Code.WORKER_RESTARTED: Code.DOCKER_ERROR,
    Code.RUNTIME_ERROR: Code.DOCKER_ERROR,
    Code.BUILD_FAILED: Code.DOCKER_ERROR,
}
"""How a job failed. The protocol's worker saw only its client's exit code, and called every one
but 0 NON_ZERO_EXIT; DOCKER_ERROR is a client that could not do its work, and has no exit code."""

REFUSALS: dict[str, Code] = {
    Code.INVALID_FIELD: Code.INVALID_BODY,
    Code.INVALID_JOB_ID: Code.MISSING_JOB_ID,
    Code.INVALID_IMAGE: Code.MISSING_IMAGE,
    Code.NOT_ALLOWED: Code.INVALID_BODY,
    Code.IDEMPOTENCY_KEY_REUSED: Code.JOB_ID_ALREADY_EXISTS,
    Code.QUEUE_FULL: Code.RUNTIME_ERROR,
    Code.DRAINING: Code.RUNTIME_ERROR,
    Code.DISK_LOW: Code.RUNTIME_ERROR,
}
"""Why a submission was refused; its status says the rest."""


def strict_end(record: ContainerRecord) -> tuple[int | None, JobError | None]:
    """The exit code and the error of a record."""
    error, exit_code = record.error, record.exit_code
    if error is None:
        return exit_code, None
    code = ENDS.get(error.code, error.code)
    if code == Code.DOCKER_ERROR:
        exit_code = None
    elif code == Code.NON_ZERO_EXIT and exit_code is None:
        exit_code = _ENGINE_ERROR_CODE
    return exit_code, JobError(code, error.message)


def strict_refusal(error: JobError) -> JobError:
    return JobError(REFUSALS.get(error.code, error.code), error.message)
