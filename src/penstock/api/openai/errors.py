"""Errors in OpenAI's shape: every error of the engine, every end of a job without an answer."""

from __future__ import annotations

import re

from msgspec import Struct

from penstock.api.operation import NoSuchPath
from penstock.api.problems import Problem, Refused, further_headers, problem_of
from penstock.api.reply import JSON_HEADERS, Headers, Reply, encode
from penstock.core.errors import InvalidRequest, JobEnded, NotFound
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.workloads.llm.values import LlmCode


class OpenAiFault(Struct, frozen=True, kw_only=True):
    message: str
    """For people; says what to do next."""
    type: str
    param: str | None = None
    """The field that is wrong, as `messages[1].content`."""
    code: str | None = None
    """For programs."""


class OpenAiError(Struct, frozen=True):
    """What went wrong, in OpenAI's shape."""

    error: OpenAiFault


class ModelNotFound(NotFound):
    """Nobody serves this model."""

    code = "MODEL_NOT_FOUND"


class Unanswered(JobEnded):
    """The job behind a request ended without an answer; `param` is what it was asked with."""

    def __init__(self, job: Job, param: str) -> None:
        super().__init__(job)
        self.param = param


class Refusal(Struct, frozen=True):
    """An error, as a client of OpenAI's API is told of it."""

    status: int
    fault: OpenAiFault
    headers: Headers = ()


INVALID = "invalid_request_error"
TYPES = {401: INVALID, 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
"""By status; of the others, those below 500 are INVALID and the rest `server_error`."""

_CODES = {
    "NOT_AUTHENTICATED": "invalid_api_key",
    "NOT_PERMITTED": "insufficient_permissions",
    "TOO_MANY": "rate_limit_exceeded",
    "TOO_LARGE": "request_too_large",
    "INTERNAL": "internal_error",
}
"""Of the engine's codes, those that OpenAI has other words for; the rest are in lower case."""
_PROBLEMS = {
    "is missing": "missing_required_parameter",
    "unknown field": "unknown_parameter",
}

_MODEL, _FORMAT = "model", "response_format"
FAILURES: dict[str, tuple[int, str, str | None]] = {
    LlmCode.CONTEXT_EXCEEDED: (400, "context_length_exceeded", None),
    LlmCode.INVALID_PROMPT: (400, "invalid_prompt", None),
    LlmCode.INVALID_SCHEMA: (400, "invalid_schema", _FORMAT),
    LlmCode.NOT_SUPPORTED: (400, "unsupported_value", None),
    LlmCode.MODEL_NOT_FOUND: (404, "model_not_found", _MODEL),
    LlmCode.MODEL_INVALID: (500, "model_invalid", _MODEL),
    LlmCode.OUT_OF_MEMORY: (503, "out_of_memory", None),
    LlmCode.ENGINE_MISSING: (503, "engine_missing", None),
    LlmCode.ENGINE_CRASHED: (500, "engine_crashed", None),
    LlmCode.ENGINE_ERROR: (500, "engine_error", None),
    LlmCode.JOB_MISSING: (503, "job_missing", None),
    LlmCode.ORIGIN_MISMATCH: (500, "origin_mismatch", None),
    LlmCode.END_MODEL_UNAVAILABLE: (503, "end_model_unavailable", _MODEL),
    LlmCode.PREFILL_UPDATE_FAILED: (500, "prefill_update_failed", None),
    LlmCode.NO_MODEL_FOR_NEXT_LAYER: (503, "no_model_for_next_layer", _MODEL),
    LlmCode.NO_LOCAL_MODEL: (503, "no_local_model", _MODEL),
    LlmCode.JOB_UPDATE_FAILED: (500, "job_update_failed", None),
    LlmCode.PIPE_UNAVAILABLE: (503, "pipe_unavailable", _MODEL),
    LlmCode.NODE_LOST: (503, "node_lost", None),
    LlmCode.NODE_STALLED: (503, "node_stalled", None),
    LlmCode.NO_ROOM: (503, "no_room", None),
    LlmCode.WRONG_COMPUTATION: (502, "wrong_computation", None),
    "BAD_INPUT": (400, "invalid_value", None),
    "UNKNOWN_TOPIC": (404, "model_not_found", _MODEL),
}
"""Status, code and field of a failure; without a field it is what the model was given."""
_MAY_REPEAT = frozenset(
    {
        LlmCode.OUT_OF_MEMORY,
        LlmCode.ENGINE_CRASHED,
        LlmCode.JOB_MISSING,
        LlmCode.NO_MODEL_FOR_NEXT_LAYER,
        LlmCode.NO_LOCAL_MODEL,
        LlmCode.PIPE_UNAVAILABLE,
        LlmCode.NODE_LOST,
        LlmCode.NODE_STALLED,
        LlmCode.NO_ROOM,
        LlmCode.WRONG_COMPUTATION,
    }
)
"""What may go better the next time: nodes come back, and others take over."""
_ENDS = {
    JobState.FAILED: (500, "job_failed"),
    JobState.CANCELLED: (409, "job_cancelled"),
    JobState.DENIED: (403, "denied_by_policy"),
    JobState.TIMEOUT: (408, "timeout"),
}
_TOO_LATE = "DEADLINE_EXCEEDED"
"""Whether a job ran (TIMEOUT) or not (CANCELLED) when its time had come."""

_SOON = (b"retry-after", b"1")
DONT_REPEAT = (b"x-should-retry", b"false")
"""OpenAI's clients repeat what is answered with 408, 409 or 5xx by themselves, unless told not
to: a second job would end like the first."""


def tell(error: BaseException) -> Refusal:
    if isinstance(error, JobEnded):
        return _ended(error.job, error.param if isinstance(error, Unanswered) else None)
    problem = problem_of(error)
    status = 400 if problem.status == 422 else problem.status
    headers = [*further_headers(problem, error)]
    if status in (408, 409):
        headers.append(DONT_REPEAT)
    detail = problem.detail
    if isinstance(error, NoSuchPath):  # OpenAI's words, by which some clients know errors
        detail = f"Invalid URL ({error.asked})"
    elif problem.code == "NOT_AUTHENTICATED":
        detail = f"Incorrect API key provided: {detail}"
    fault = OpenAiFault(
        message=_sentence(detail, problem.hint),
        type=type_of(status),
        param=_MODEL if isinstance(error, ModelNotFound) else problem.field or None,
        code=_code(problem, error),
    )
    return Refusal(status, fault, headers)


def _code(problem: Problem, error: BaseException) -> str:
    if type(error) is InvalidRequest:
        return _PROBLEMS.get(error.problem, "invalid_value")
    if isinstance(error, Refused) and error.name == "MALFORMED":
        return "invalid_json"
    if isinstance(error, NoSuchPath):
        return "unknown_url"
    return _CODES.get(problem.code, problem.code.lower())


def _ended(job: Job, given: str | None) -> Refusal:
    result = job.result
    failed = (result.error_code if result is not None else None) or ""
    why = (result.error_message if result is not None else None) or ""
    message = f"job {job.job_id} ended {job.state}" + (f": {why}" if why else "")
    status, code = _ENDS[JobState.TIMEOUT if failed == _TOO_LATE else job.state]
    param = None
    if job.state is JobState.FAILED and failed in FAILURES:
        status, code, param = FAILURES[failed]
        param = param or (given if status == 400 else None)
        message = why or message
        if failed == LlmCode.CONTEXT_EXCEEDED:
            message = _over_context(message)
    headers = job_headers(job.job_id)
    headers = (*headers, _SOON if failed in _MAY_REPEAT else DONT_REPEAT)
    fault = OpenAiFault(message=message, type=type_of(status), param=param, code=code)
    return Refusal(status, fault, headers)


_COUNTS = re.compile(r"(\d[\d,]*)\D+(\d[\d,]*)")


def _over_context(message: str) -> str:
    """In OpenAI's sentence, by which some clients know the error."""
    if not (counts := _COUNTS.search(message[:1000])):
        return f"This model's maximum context length is exceeded: {message}"
    prompt, context = counts[1], counts[2]
    return (
        f"This model's maximum context length is {context} tokens. However, your request has"
        f" {prompt} tokens. Please reduce its length."
    )


def type_of(status: int) -> str:
    return TYPES.get(status) or (INVALID if status < 500 else "server_error")


def job_headers(job_id: str) -> Headers:
    """By which people find the job behind an answer; OpenAI's clients keep the second one."""
    name = job_id.encode()
    return ((b"x-penstock-job", name), (b"x-request-id", name))


def problem_reply(error: BaseException) -> Reply:
    told = tell(error)
    return Reply(encode(OpenAiError(told.fault)), told.status, (*JSON_HEADERS, *told.headers))


def _sentence(detail: str, hint: str) -> str:
    return f"{detail} ({hint})" if hint else detail
