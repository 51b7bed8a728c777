"""How a container job ended, told from what was seen of it."""

from __future__ import annotations

import itertools

import pytest
from tests.support.rows import every

from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.engine import (
    BuildFailed,
    CommandNotFound,
    CommandNotRunnable,
    EngineError,
    EngineUnavailable,
    ExitStatus,
    ImageNotFound,
    PullFailed,
)
from penstock.workloads.container.job import ContainerJob, ErrorCode, Limits
from penstock.workloads.container.observation import (
    Cause,
    Observation,
    number,
    result_of,
)

LIMITS = Limits(memory_mb=64, max_runtime_seconds=2.5, max_artifact_bytes=1000)
JOB = ContainerJob(job_id="j", image="alpine", cmd=("serve",), limits=LIMITS, outputs=True)
LOST = EngineUnavailable("away")

# What was seen of the exit, and what that alone comes to: code and exit_code of the record.
EXITS = {
    None: (ErrorCode.RUNTIME_ERROR, None),
    ExitStatus(0): (None, 0),
    ExitStatus(0, oom=True): (None, 0),
    ExitStatus(0, error="lost"): (ErrorCode.ENGINE_ERROR, None),
    ExitStatus(None): (ErrorCode.ENGINE_ERROR, None),
    ExitStatus(None, error="lost"): (ErrorCode.ENGINE_ERROR, None),
    ExitStatus(None, oom=True): (ErrorCode.OOM_KILLED, 137),
    ExitStatus(1): (ErrorCode.NON_ZERO_EXIT, 1),
    ExitStatus(1, oom=True): (ErrorCode.OOM_KILLED, 1),
    ExitStatus(125): (ErrorCode.NON_ZERO_EXIT, 125),
    ExitStatus(137): (ErrorCode.NON_ZERO_EXIT, 137),
    ExitStatus(137, oom=True): (ErrorCode.OOM_KILLED, 137),
    ExitStatus(143): (ErrorCode.NON_ZERO_EXIT, 143),
    ExitStatus(153): (ErrorCode.OUTPUT_LIMIT, 153),
    ExitStatus(255): (ErrorCode.NON_ZERO_EXIT, 255),
}


def expected(seen: ExitStatus | None, observed: Observation) -> tuple[ErrorCode | None, int | None]:
    if observed.cause is Cause.OUTPUT_LIMIT:
        return ErrorCode.OUTPUT_LIMIT, seen.code if seen is not None else None
    if observed.cause is not None:
        return ErrorCode(observed.cause), None
    if observed.failure is not None:
        return observed.failure.code, observed.failure.exit_code
    code, exit_code = EXITS[seen]
    known = seen is not None and seen.code is not None and not (seen.code == 0 and seen.error)
    return (
        (ErrorCode.OUTPUT_LIMIT, exit_code)
        if observed.too_much_output and known
        else (code, exit_code)
    )


@pytest.mark.seed("003", "6.15")
@every("stuck", [False, True])
@every("too_much", [False, True])
@every("failure", [None, LOST, ImageNotFound("none")])
@every("cause", [None, *Cause])
def test_every_combination_of_what_was_seen_has_one_end(
    cause: Cause | None, failure: EngineError | None, too_much: bool, stuck: bool
) -> None:
    for seen in EXITS:
        observed = Observation(
            exit=seen, cause=cause, failure=failure, too_much_output=too_much, stuck=stuck
        )
        end = result_of(JOB, observed)
        code, exit_code = expected(seen, observed)
        assert (end.error.code if end.error else None, end.exit_code) == (code, exit_code), observed
        finished = end.state is ContainerJobState.FINISHED
        assert finished is (code is None)
        assert finished or end.state is ContainerJobState.FAILED
        assert end.error is None or end.error.message


def said(observed: Observation, job: ContainerJob = JOB) -> str:
    error = result_of(job, observed).error
    assert error is not None
    return error.message


@pytest.mark.seed("003", "6.16")
def test_a_stranger_is_told_which_limit_it_was() -> None:
    assert said(Observation(exit=ExitStatus(137, oom=True))) == (
        "used more than 64 MB of memory (runtime.limits.memory_mb); the container was killed"
    )
    assert said(Observation(exit=ExitStatus(143), cause=Cause.TIMEOUT)) == (
        "ran longer than 2.5 s (runtime.limits.max_runtime_seconds); the container was ended"
    )
    assert said(Observation(exit=ExitStatus(0), too_much_output=True)) == (
        "left more than 1000 bytes in /output (runtime.limits.max_artifact_bytes)"
    )


def test_a_cancel_says_who_asked_for_it() -> None:
    assert said(Observation(cause=Cause.CANCELLED, reason="deleted by its owner")) == (
        "deleted by its owner"
    )
    assert said(Observation(cause=Cause.CANCELLED)) == "cancelled"


def test_a_signal_is_called_by_its_name() -> None:
    assert said(Observation(exit=ExitStatus(139))) == "killed by SIGSEGV (exit code 139)"
    assert said(Observation(exit=ExitStatus(137))) == (
        "killed by SIGKILL (exit code 137); neither this worker nor its memory limit did that"
    )
    assert said(Observation(exit=ExitStatus(3))) == "exited with 3"
    assert said(Observation(exit=ExitStatus(3, error="odd"))) == "exited with 3: odd"
    assert said(Observation(exit=ExitStatus(128))) == "exited with 128"


def test_a_file_that_was_cut_off_is_no_output_limit_without_an_output_folder() -> None:
    job = ContainerJob(job_id="j", image="alpine")
    assert said(Observation(exit=ExitStatus(153)), job) == "killed by SIGXFSZ (exit code 153)"


def test_a_container_that_would_not_end_is_told() -> None:
    for cause in Cause:
        assert "keeps trying" in said(Observation(cause=cause, stuck=True))


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (EngineError("x"), ErrorCode.ENGINE_ERROR, 125),
        (EngineUnavailable("x"), ErrorCode.ENGINE_UNAVAILABLE, None),
        (ImageNotFound("x"), ErrorCode.IMAGE_NOT_FOUND, 125),
        (PullFailed("x"), ErrorCode.IMAGE_PULL_FAILED, 125),
        (BuildFailed("x"), ErrorCode.BUILD_FAILED, None),
        (CommandNotFound("x"), ErrorCode.COMMAND_NOT_FOUND, 127),
        (CommandNotRunnable("x"), ErrorCode.COMMAND_NOT_RUNNABLE, 126),
    ],
)
def test_an_engines_error_is_the_jobs(
    error: EngineError, code: ErrorCode, exit_code: int | None
) -> None:
    result = result_of(JOB, Observation(failure=error))
    assert (result.error_code, result.exit_code) == (code, exit_code)
    assert said(Observation(failure=error)).endswith("x")


def test_a_command_that_is_missing_is_named_with_its_image() -> None:
    assert said(Observation(failure=CommandNotFound("no such file"))) == (
        "'serve' (runtime.cmd) was not found in image 'alpine': no such file"
    )
    built = ContainerJob(job_id="j")
    assert said(Observation(failure=CommandNotRunnable("exec format")), built).startswith(
        "the image's own command can't be executed in the image that was built"
    )


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert said(Observation(failure=EngineError())) == "EngineError"


def test_numbers_are_written_as_people_write_them() -> None:
    numbers = (10, 10.0, 0.5, 1_000_000.0, 2.75)
    assert [number(one) for one in numbers] == ["10", "10", "0.5", "1000000", "2.75"]


def test_the_table_has_every_kind_of_exit() -> None:
    kinds = {(seen.code is None, seen.code == 0, seen.oom) for seen in EXITS if seen is not None}
    possible = itertools.product((True, False), repeat=3)
    assert kinds == {kind for kind in possible if not (kind[0] and kind[1])}
