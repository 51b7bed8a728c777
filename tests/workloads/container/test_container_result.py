"""The result of a container job, from how its container ended."""

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
    command_failure,
)
from penstock.workloads.container.job import ContainerJob, ContainerResult, ErrorCode, Limits
from penstock.workloads.container.result import Cause, ended, exited, failed, number

LIMITS = Limits(memory_mb=64, max_runtime_seconds=2.5, max_artifact_bytes=1000)
JOB = ContainerJob(job_id="j", image="alpine", cmd=("serve",), limits=LIMITS, outputs=True)

# What was seen of the exit, and what that alone comes to: code and exit_code of the record.
EXITS = {
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


def check(result: ContainerResult, code: ErrorCode | None, exit_code: int | None) -> None:
    assert (result.error_code, result.exit_code) == (code, exit_code)
    finished = result.state is ContainerJobState.FINISHED
    assert finished is (code is None)
    assert finished or result.state is ContainerJobState.FAILED
    assert finished is (result.error is None)
    assert result.error is None or result.error.message


@pytest.mark.seed("003", "6.15")
@every("too_much", [False, True])
def test_every_exit_has_one_result(too_much: bool) -> None:
    for exit, (code, exit_code) in EXITS.items():
        known = exit.code is not None and not (exit.code == 0 and exit.error)
        expected = ErrorCode.OUTPUT_LIMIT if too_much and known else code
        check(exited(JOB, exit, too_much_output=too_much), expected, exit_code)


@every("stuck", [False, True])
@every("cause", [*Cause])
def test_a_container_that_the_worker_ended_has_that_result_whatever_its_exit(
    cause: Cause, stuck: bool
) -> None:
    for exit in (None, *EXITS):
        code = exit.code if exit is not None and cause is Cause.OUTPUT_LIMIT else None
        check(ended(JOB, cause, exit=exit, stuck=stuck), ErrorCode(cause), code)


def said(result: ContainerResult) -> str:
    assert result.error is not None
    return result.error.message


@pytest.mark.seed("003", "6.16")
def test_a_stranger_is_told_which_limit_it_was() -> None:
    assert said(exited(JOB, ExitStatus(137, oom=True))) == (
        "used more than 64 MB of memory (runtime.limits.memory_mb); the container was killed"
    )
    assert said(ended(JOB, Cause.TIMEOUT, exit=ExitStatus(143))) == (
        "ran longer than 2.5 s (runtime.limits.max_runtime_seconds); the container was ended"
    )
    assert said(exited(JOB, ExitStatus(0), too_much_output=True)) == (
        "left more than 1000 bytes in /output (runtime.limits.max_artifact_bytes)"
    )


def test_a_cancel_says_who_asked_for_it() -> None:
    assert said(ended(JOB, Cause.CANCELLED, reason="deleted by its owner")) == (
        "deleted by its owner"
    )
    assert said(ended(JOB, Cause.CANCELLED)) == "cancelled"


def test_a_signal_is_called_by_its_name() -> None:
    assert said(exited(JOB, ExitStatus(139))) == "killed by SIGSEGV (exit code 139)"
    assert said(exited(JOB, ExitStatus(137))) == (
        "killed by SIGKILL (exit code 137); neither this worker nor its memory limit did that"
    )
    assert said(exited(JOB, ExitStatus(3))) == "exited with 3"
    assert said(exited(JOB, ExitStatus(3, error="odd"))) == "exited with 3: odd"
    assert said(exited(JOB, ExitStatus(128))) == "exited with 128"


def test_a_file_that_was_cut_off_is_no_output_limit_without_an_output_folder() -> None:
    job = ContainerJob(job_id="j", image="alpine")
    assert said(exited(job, ExitStatus(153))) == "killed by SIGXFSZ (exit code 153)"


def test_a_container_that_would_not_end_is_told() -> None:
    for cause in Cause:
        assert "keeps trying" in said(ended(JOB, cause, stuck=True))


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
    result = failed(JOB, error)
    assert (result.error_code, result.exit_code) == (code, exit_code)
    assert said(failed(JOB, error)).endswith("x")


def test_a_command_that_is_missing_is_named_with_its_image() -> None:
    assert said(failed(JOB, CommandNotFound("no such file"))) == (
        "'serve' (runtime.cmd) was not found in image 'alpine': no such file"
    )
    built = ContainerJob(job_id="j")
    assert said(failed(built, CommandNotRunnable("exec format"))).startswith(
        "the image's own command can't be executed in the image that was built"
    )


def test_an_error_without_words_is_told_by_its_kind() -> None:
    assert said(failed(JOB, EngineError())) == "EngineError"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (b"[FATAL tini (8)] exec nope failed: No such file or directory\n", CommandNotFound),
        (b"[FATAL tini (7)] exec /etc failed: Permission denied\n", CommandNotRunnable),
        (b"ERROR (catatonit:2): failed to exec pid1: No such file or directory\n", CommandNotFound),
        (b"sh: nope: not found\n", type(None)),
        (b"x\n[FATAL tini (8)] exec nope failed: No such file or directory\n", type(None)),
    ],
)
def test_an_init_program_that_can_not_run_the_command_is_understood(
    words: bytes, kind: type
) -> None:
    assert type(command_failure(words)) is kind


def test_numbers_are_written_as_people_write_them() -> None:
    numbers = (10, 10.0, 0.5, 1_000_000.0, 2.75)
    assert [number(one) for one in numbers] == ["10", "10", "0.5", "1000000", "2.75"]


def test_the_table_has_every_kind_of_exit() -> None:
    kinds = {(seen.code is None, seen.code == 0, seen.oom) for seen in EXITS}
    possible = itertools.product((True, False), repeat=3)
    assert kinds == {kind for kind in possible if not (kind[0] and kind[1])}
