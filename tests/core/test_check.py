"""Every field of a request that is not acceptable is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support.rows import every

from penstock.core.check import MAX_PAIRS, MAX_POINTER, check_finite, check_request
from penstock.core.errors import InvalidRequest
from penstock.core.job import Priority, RetryPolicy
from penstock.testing.samples import T0, a_request

NAN, INF = math.nan, math.inf


def test_a_plain_request_is_acceptable() -> None:
    check_request(a_request(), T0)


def test_a_full_request_is_acceptable() -> None:
    check_request(
        a_request(
            "Job:1@host~[x]-9._",
            topic="job.a-b.c_d.E9",
            priority=Priority.CRITICAL,
            context_ptr="s3://bücket/key",
            adapter_id="adapter",
            env={"k": "", "ü": "ü" * 4096},
            labels={f"k{i}": "v" for i in range(MAX_PAIRS)},
            parent_job_id="p",
            child_of="p",
            detached=True,
            workflow_id="w",
            step_index=0,
            tenant="a.b@c",
            idempotency_key="any text, with spaces ✓",
            timeout=0.001,
            dispatch_timeout=1,
            deadline=T0 + 0.001,
            run_at=0,
            retry=RetryPolicy(retries=1000, delay=0, factor=1, max_delay=0, jitter=1),
        ),
        T0,
    )


BAD: list[tuple[str, Any, str]] = [
    ("job_id", "", "job_id"),
    ("job_id", "-x", "job_id"),
    ("job_id", "a b", "job_id"),
    ("job_id", "a/b", "job_id"),
    ("job_id", "a\n", "job_id"),
    ("job_id", "ü", "job_id"),
    ("job_id", "x" * 201, "job_id"),
    ("topic", "", "topic"),
    ("topic", "job", "topic"),
    ("topic", "job.", "topic"),
    ("topic", "job..a", "topic"),
    ("topic", "job.a.", "topic"),
    ("topic", "text.job", "topic"),
    ("topic", "job.*", "topic"),
    ("topic", "job.a\n", "topic"),
    ("topic", "job." + "a" * 200, "topic"),
    ("tenant", "", "tenant"),
    ("tenant", "a b", "tenant"),
    ("tenant", "x" * 129, "tenant"),
    ("env", {"": "v"}, "env key"),
    ("env", {"k": "a\x00b"}, "env.k"),
    ("env", {"k\n": "v"}, "env key"),
    ("env", {"k": "x" * 4097}, "env.k"),
    ("env", {"k" * 129: "v"}, "env key"),
    ("env", {str(i): "" for i in range(MAX_PAIRS + 1)}, "env"),
    ("env", {"k": "\ud800"}, "env.k"),
    ("labels", {"k": "\x7f"}, "labels.k"),
    ("labels", {"\udcff": ""}, "labels key"),
    ("labels", {str(i): "" for i in range(MAX_PAIRS + 1)}, "labels"),
    ("context_ptr", "x" * (MAX_POINTER + 1), "context_ptr"),
    ("context_ptr", "data:,\ud800", "context_ptr"),
    ("parent_job_id", "", "parent_job_id"),
    ("parent_job_id", "a", "parent_job_id"),
    ("child_of", "", "child_of"),
    ("child_of", "a", "child_of"),
    ("first_try", "b", "first_try"),
    ("workflow_id", "a b", "workflow_id"),
    ("adapter_id", "", "adapter_id"),
    ("adapter_id", "a b", "adapter_id"),
    ("idempotency_key", "", "idempotency_key"),
    ("idempotency_key", "x" * 257, "idempotency_key"),
    ("idempotency_key", "a\tb", "idempotency_key"),
    ("idempotency_key", "\udfff", "idempotency_key"),
    ("step_index", -1, "step_index"),
    ("step_index", 1_000_000_001, "step_index"),
    *((name, value, name) for name in ("timeout", "dispatch_timeout") for value in (0, -1, NAN)),
    *((name, value, name) for name in ("timeout", "dispatch_timeout") for value in (INF, 1e9)),
    ("run_at", -1, "run_at"),
    ("run_at", NAN, "run_at"),
    ("run_at", T0 + 1e9, "run_at"),
    ("deadline", T0, "deadline"),
    ("deadline", NAN, "deadline"),
    ("deadline", INF, "deadline"),
    ("retry", RetryPolicy(retries=-1), "retry.retries"),
    ("retry", RetryPolicy(retries=1001), "retry.retries"),
    ("retry", RetryPolicy(delay=-1), "retry.delay"),
    ("retry", RetryPolicy(delay=NAN), "retry.delay"),
    ("retry", RetryPolicy(factor=0.5), "retry.factor"),
    ("retry", RetryPolicy(factor=INF), "retry.factor"),
    ("retry", RetryPolicy(max_delay=-1), "retry.max_delay"),
    ("retry", RetryPolicy(jitter=1.1), "retry.jitter"),
    ("retry", RetryPolicy(on=("",)), "retry.on"),
    ("retry", RetryPolicy(never=("\n",)), "retry.never"),
]


@every("field, value, named", BAD)
def test_a_bad_field_is_refused_by_name(field: str, value: Any, named: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_request(a_request(**{field: value}), T0)
    assert refusal.value.field.startswith(named)
    assert refusal.value.problem
    str(refusal.value).encode()  # can be shown anywhere


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (NAN, "input"),
        ({"a": [1, {"b": INF}]}, "input.a[1].b"),
        ((0.0, -INF), "input[1]"),
    ],
)
def test_what_json_has_no_number_for_is_refused_at_its_place(value: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_finite("input", value)
    assert refusal.value.field == place


def test_finite_values_pass() -> None:
    check_finite("input", {"a": [1, 2.5, None, "nan", True]})
