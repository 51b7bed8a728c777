"""Errors as problem documents."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.support.rows import every

from penstock.api.problems import STATUS, TITLES, Refused, problem_of, problem_reply, status_of
from penstock.core import errors
from penstock.core.errors import PenstockError
from penstock.lifecycles.canonical import JobState
from penstock.testing.samples import a_job


def kinds(kind: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    for special in kind.__subclasses__():
        if special.__module__ == errors.__name__:
            yield special
            yield from kinds(special)


def made(kind: type[PenstockError]) -> PenstockError:
    if issubclass(kind, errors.InvalidRequest):
        return kind("labels.a", "is wrong", hint="mend it")
    if issubclass(kind, errors.TooMany):
        return kind("too many", retry_after=2.2)
    if issubclass(kind, errors.IllegalMove):
        return kind("canonical", "FAILED", "start")
    if issubclass(kind, errors.MapInterrupted):
        return kind("job.a", [], ValueError("no more"))
    if issubclass(kind, errors.JobEnded):
        return kind(a_job("a", JobState.FAILED))
    return kind("it went wrong", hint="mend it")


@every("kind", list(kinds()))
def test_every_error_of_ours_has_a_status_that_blames_the_right_side(
    kind: type[PenstockError],
) -> None:
    error = made(kind)
    status = status_of(error)
    assert 400 <= status < 500 or (status == 503 and isinstance(error, errors.Unavailable))
    problem = problem_of(error)
    assert (problem.status, problem.code, problem.title) == (status, kind.code, TITLES[status])
    assert problem.detail == error.message


def test_an_error_has_the_status_of_the_nearest_kind() -> None:
    assert status_of(errors.UnknownTopic("topic", "x")) == 422
    assert status_of(errors.TooLarge("body", "x")) == 413
    assert status_of(errors.StaleApproval("x")) == 409
    assert status_of(errors.StoreFull("x")) == 503
    assert status_of(errors.NotAuthenticated("x")) == 401
    assert errors.UnknownTopic not in STATUS


def test_a_wrong_field_is_named() -> None:
    reply = problem_reply(errors.InvalidRequest("labels.a", "is empty", hint="give a value"))
    assert json.loads(reply.body) == {
        "type": "urn:penstock:problem:invalid",
        "title": "Invalid value",
        "status": 422,
        "detail": "labels.a: is empty",
        "code": "INVALID",
        "hint": "give a value",
        "field": "labels.a",
        "problem": "is empty",
    }
    assert dict(reply.headers)[b"content-type"] == b"application/problem+json"


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.01, b"1"), (2.2, b"3"), (1e12, b"86400"), (0, b"1")]
)
def test_too_many_says_when_to_come_back(seconds: float, told: bytes) -> None:
    reply = problem_reply(errors.TooMany("slow down", retry_after=seconds))
    assert (reply.status, dict(reply.headers)[b"retry-after"]) == (429, told)


def test_a_missing_key_is_asked_for() -> None:
    reply = problem_reply(errors.NotAuthenticated("no"))
    assert dict(reply.headers)[b"www-authenticate"].startswith(b"Bearer")


def test_a_job_without_a_result_tells_how_it_ended() -> None:
    problem = problem_of(errors.JobFailed(a_job("a", JobState.FAILED)))
    assert (problem.status, problem.job_id, problem.state) == (410, "a", "FAILED")


@pytest.mark.parametrize("error", [RuntimeError("secret"), KeyError("secret"), PenstockError("s")])
def test_what_was_not_foreseen_is_logged_under_a_number_and_not_told(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.code) == (500, "INTERNAL")
    assert "secret" not in problem.detail + problem.hint
    (record,) = caplog.records
    assert problem.incident in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error


def test_what_only_http_knows_keeps_its_status_and_headers() -> None:
    reply = problem_reply(Refused(405, "NO", "not here", headers=((b"allow", b"GET"),)))
    assert (reply.status, dict(reply.headers)[b"allow"]) == (405, b"GET")
    assert json.loads(reply.body)["code"] == "NO"
