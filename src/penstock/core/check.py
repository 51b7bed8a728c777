"""Validation of requests. Each error names the field and says what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from penstock.core.errors import InvalidRequest
from penstock.core.job import NO_RETRY, JobRequest, RetryPolicy
from penstock.core.trace import caller_span

DAY = 86_400.0
MAX_TIMEOUT = 30 * DAY
MAX_WAIT = 3650 * DAY
MAX_RETRIES = 1000
MAX_PAIRS = 64
MAX_KEY = 128
MAX_VALUE = 4096
MAX_POINTER = 16_384
MAX_PARENTS = 100_000

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@~\[\]-]{0,199}", re.ASCII)
_TOPIC = re.compile(r"job(\.[A-Za-z0-9_-]+)+", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


def check_request(request: JobRequest, now: float) -> None:
    """Raise InvalidRequest for the first invalid field."""
    check_id("job_id", request.job_id)
    check_topic(request.topic)
    check_name("tenant", request.tenant)
    if request.env:
        check_pairs("env", request.env)
    if request.labels:
        check_pairs("labels", request.labels)
    if len(request.context_ptr) > MAX_POINTER:
        raise InvalidRequest("context_ptr", f"longer than {MAX_POINTER} characters")
    _check_whole("context_ptr", request.context_ptr)
    if request.workflow_id is not None:
        check_id("workflow_id", request.workflow_id)
    if request.parent_job_id is not None:
        check_id("parent_job_id", request.parent_job_id)
        if request.parent_job_id == request.job_id:
            raise InvalidRequest("parent_job_id", "a job can't be its own parent")
    if request.child_of is not None:
        check_id("child_of", request.child_of)
        if request.child_of == request.job_id:
            raise InvalidRequest("child_of", "a job can't be its own parent")
    if request.first_try is not None:
        raise InvalidRequest("first_try", "is set by the engine")
    if request.try_number != 1:
        raise InvalidRequest("try_number", "is set by the engine")
    if request.adapter_id is not None:
        check_name("adapter_id", request.adapter_id)
    if request.idempotency_key is not None:
        _check_text("idempotency_key", request.idempotency_key, MAX_KEY * 2, empty=False)
    if request.step_index is not None:
        check_number("step_index", request.step_index, 0, 1_000_000_000)
    if request.timeout is not None:
        check_number("timeout", request.timeout, 0.001, MAX_TIMEOUT)
    if request.dispatch_timeout is not None:
        check_number("dispatch_timeout", request.dispatch_timeout, 0.001, MAX_TIMEOUT)
    if request.run_at is not None:
        check_number("run_at", request.run_at, 0, now + MAX_WAIT)
    if request.deadline is not None:
        check_number("deadline", request.deadline, 0, now + MAX_WAIT)
        if request.deadline <= now:
            raise InvalidRequest("deadline", "is already past")
    if request.retry is not NO_RETRY:
        check_retry(request.retry)
    if request.after:
        _check_after(request)
    elif request.takes_results:
        raise InvalidRequest("takes_results", "there is no job in after to take a result of")
    if request.traceparent is not None and caller_span(request) is None:
        raise InvalidRequest("traceparent", "is not a W3C trace context (00-<trace>-<span>-01)")
    if request.unique is not None:
        _check_text("unique.key", request.unique.key, MAX_KEY * 2, empty=False)
        if request.unique.period is not None:
            check_number("unique.period", request.unique.period, 0.001, MAX_WAIT)
    _check_for_rules(request)


def _check_after(request: JobRequest) -> None:
    if len(request.after) > MAX_PARENTS:
        raise InvalidRequest(
            "after", f"{len(request.after)} jobs; at most {MAX_PARENTS} are allowed"
        )
    for index, job_id in enumerate(request.after):
        check_id(f"after[{index}]", job_id)
        if job_id == request.job_id:
            raise InvalidRequest(f"after[{index}]", "a job can't wait for itself")


def _check_for_rules(request: JobRequest) -> None:
    """The fields that safety rules test."""
    if request.principal:
        check_name("principal", request.principal)
    if request.capability is not None:
        check_name("capability", request.capability)
    if len(request.risk_tags) > MAX_PAIRS:
        raise InvalidRequest(
            "risk_tags", f"{len(request.risk_tags)} tags; at most {MAX_PAIRS} are allowed"
        )
    for index, tag in enumerate(request.risk_tags):
        check_name(f"risk_tags[{index}]", tag)
    if request.estimated_cost is not None:
        check_number("estimated_cost", request.estimated_cost, 0, 1e12)
    if request.schedule is not None:
        check_name("schedule", request.schedule)


def check_id(field: str, value: str) -> None:
    if not _JOB_ID.fullmatch(value):
        raise InvalidRequest(
            field,
            f"{_shown(value)} is not a valid id",
            hint="1 to 200 of A-Z a-z 0-9 . _ : @ ~ [ ] -, beginning with a letter or digit",
        )


@lru_cache(4096)
def check_topic(topic: str) -> None:
    if len(topic) > 200 or not _TOPIC.fullmatch(topic):
        raise InvalidRequest(
            "topic",
            f"{_shown(topic)} is not a valid topic",
            hint="'job.' and then words of A-Z a-z 0-9 _ - with dots between, as job.text.shout",
        )


@lru_cache(4096)
def check_name(field: str, value: str) -> None:
    if not _NAME.fullmatch(value):
        raise InvalidRequest(
            field,
            f"{_shown(value)} is not a valid name",
            hint="1 to 128 of A-Z a-z 0-9 . _ : @ -, beginning with a letter or digit",
        )


def check_pairs(field: str, pairs: Mapping[str, str]) -> None:
    if len(pairs) > MAX_PAIRS:
        raise InvalidRequest(field, f"{len(pairs)} entries; at most {MAX_PAIRS} are allowed")
    for key, value in pairs.items():
        _check_text(f"{field} key {_shown(key)}", key, MAX_KEY, empty=False)
        _check_text(f"{field}.{key}", value, MAX_VALUE, empty=True)


def check_retry(retry: RetryPolicy) -> None:
    check_number("retry.retries", retry.retries, 0, MAX_RETRIES)
    check_number("retry.delay", retry.delay, 0, MAX_TIMEOUT)
    check_number("retry.factor", retry.factor, 1, 1000)
    check_number("retry.max_delay", retry.max_delay, 0, MAX_TIMEOUT)
    check_number("retry.jitter", retry.jitter, 0, 1)
    for field in ("on", "never"):
        for kind in getattr(retry, field):
            _check_text(f"retry.{field}", kind, MAX_KEY, empty=False)


def check_number(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value):
        raise InvalidRequest(field, f"{value} is not a number")
    if not low <= value <= high:
        raise InvalidRequest(
            field, f"{value:g} is out of range", hint=f"{_plain(low)} to {_plain(high)}"
        )


def check_finite(field: str, value: Any) -> None:
    """JSON has no NaN or infinity: refuse them rather than store something else."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(field, f"{value} can't be stored as JSON")
    elif isinstance(value, dict):
        for key, item in value.items():
            check_finite(f"{field}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_finite(f"{field}[{index}]", item)


def _check_text(field: str, value: str, most: int, *, empty: bool) -> None:
    if not value and not empty:
        raise InvalidRequest(field, "is empty")
    if len(value) > most:
        raise InvalidRequest(field, f"is {len(value)} characters long; at most {most} are allowed")
    if _CONTROL.search(value):
        raise InvalidRequest(field, "has a control character")
    _check_whole(field, value)


def _check_whole(field: str, value: str) -> None:
    if not value.isascii() and _SURROGATE.search(value):
        raise InvalidRequest(field, "has half of a character (a lone surrogate)")


def _plain(number: float) -> str:
    return f"{number:,.3f}".rstrip("0").rstrip(".")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
