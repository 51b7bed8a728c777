"""CAP packets, without a bus."""

from __future__ import annotations

from typing import Any

import pytest
from cap.pb.cordum.agent.v1 import buspacket_pb2, job_pb2
from cap.validate import validate_bus_packet

from penstock.adapters.nats.codec import MAX_PACKET, Codec
from penstock.adapters.nats.packets import (
    Rejected,
    code_of,
    dispatched,
    ended,
    has_ended,
    request_of,
    result_of,
)
from penstock.core.check import check_request
from penstock.core.errors import Conflict, InvalidRequest, NotFound, NotPermitted, TooLarge
from penstock.core.job import NO_RETRY, JobResult, Priority, RetryPolicy, is_retryable
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState

NOW = 1_800_000_000.0


def packet_of(request: Any) -> Any:
    return buspacket_pb2.BusPacket(trace_id="t", sender_id="c", job_request=request)


def full_request() -> Any:
    request = job_pb2.JobRequest(
        job_id="j",
        topic="job.a",
        priority=job_pb2.JOB_PRIORITY_INTERACTIVE,
        context_ptr="redis://ctx:j",
        adapter_id="ad",
        env={"A": "1"},
        parent_job_id="p",
        workflow_id="w",
        step_index=3,
        memory_id="m",
        tenant_id="ten",
        principal_id="pri",
        labels={"l": "v"},
    )
    request.context_hints.tags.append("tag")
    request.budget.max_total_tokens = 77
    request.meta.idempotency_key = "once"
    request.meta.capability = "repo.write"
    request.meta.risk_tags.append("danger")
    request.compensation.topic = "job.undo"
    return request


def test_every_field_of_a_request_reaches_the_worker() -> None:
    asked = full_request()
    request = request_of(packet_of(asked), "blob:x", NOW)
    check_request(request, NOW)
    assert (request.tenant, request.idempotency_key) == ("ten", "once")
    assert (request.capability, request.risk_tags) == ("repo.write", ("danger",))
    assert request.priority is Priority.INTERACTIVE
    assert (request.parent_job_id, request.workflow_id, request.step_index) == ("p", "w", 3)
    given = dispatched(
        request,
        attempt=2,
        worker_id="w1",
        seconds=1.5,
        context_ptr="redis://ctx:j",
        constraints=None,
        dispatch_id="j#2",
    )
    assert given.budget.deadline_ms == 1500
    assert (given.dispatch.attempt, given.dispatch.assigned_worker_id) == (2, "w1")
    given.ClearField("dispatch")
    given.budget.ClearField("deadline_ms")
    assert given == asked


def test_a_pointer_that_others_serve_is_passed_on_unread() -> None:
    request = request_of(packet_of(full_request()), None, NOW)
    assert request.context_ptr == ""
    given = dispatched(
        request,
        attempt=1,
        worker_id="",
        seconds=1,
        context_ptr="",
        constraints=Constraints(max_memory=5),
        dispatch_id="j#1",
    )
    assert given.context_ptr == "redis://ctx:j"
    assert '"max_memory": 5' in given.env["CAP_CONSTRAINTS"]


def test_a_client_can_not_forge_what_the_bridge_keeps() -> None:
    asked = job_pb2.JobRequest(job_id="j", topic="job.a", env={"cap.request": "forged"})
    assert request_of(packet_of(asked), "", NOW).env == {"cap.trace_id": "t"}


def test_what_can_not_be_kept_is_refused() -> None:
    asked = job_pb2.JobRequest(job_id="j", topic="job.a", memory_id="x" * 4000)
    with pytest.raises(InvalidRequest, match="at most 3000"):
        request_of(packet_of(asked), "", NOW)


@pytest.mark.parametrize(
    ("milliseconds", "deadline"), [(5000, NOW + 5), (1_900_000_000_000, 1.9e9)]
)
def test_a_deadline_is_from_now_or_a_time(milliseconds: int, deadline: float) -> None:
    asked = job_pb2.JobRequest(job_id="j", topic="job.a")
    asked.budget.deadline_ms = milliseconds
    assert request_of(packet_of(asked), "", NOW).deadline == deadline


@pytest.mark.parametrize(
    ("status", "state", "again"),
    [
        (job_pb2.JOB_STATUS_SUCCEEDED, JobState.SUCCEEDED, None),
        (job_pb2.JOB_STATUS_FAILED, JobState.FAILED, True),
        (job_pb2.JOB_STATUS_FAILED_RETRYABLE, JobState.FAILED, True),
        (job_pb2.JOB_STATUS_FAILED_FATAL, JobState.FAILED, False),
        (job_pb2.JOB_STATUS_CANCELLED, JobState.CANCELLED, None),
        (job_pb2.JOB_STATUS_TIMEOUT, JobState.TIMEOUT, None),
        (job_pb2.JOB_STATUS_DENIED, JobState.FAILED, None),
        (99, JobState.FAILED, None),
    ],
)
def test_what_a_workers_status_means(status: int, state: JobState, again: bool | None) -> None:
    said = job_pb2.JobResult(job_id="j", status=status, worker_id="w", execution_ms=7)
    assert has_ended(said)
    result = result_of(said, attempt=3, worker_id="cap:w", result_ptr=None)
    assert (result.status, result.attempt, result.execution_ms) == (state, 3, 7.0)
    if again is not None:
        retry = RetryPolicy(retries=1)
        assert is_retryable(retry, result) is again
        assert retry != NO_RETRY
    running = job_pb2.JobResult(job_id="j", status=job_pb2.JOB_STATUS_RUNNING, worker_id="w")
    assert not has_ended(running)


@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED", "DENIED", "TIMEOUT"])
def test_each_end_of_a_job_is_a_valid_packet(state: str) -> None:
    result = JobResult(job_id="j", status=JobState(state), execution_ms=3.7, error_code="E")
    said = ended("j", JobState(state), "penstock", result, "redis://res:j")
    codec = Codec("penstock")
    subject = "sys.job.result"
    packet = codec.decode(codec.encode(subject, "t", NOW, job_result=said), subject, NOW)
    assert packet is not None
    assert not validate_bus_packet(packet)
    assert packet.job_result.status == job_pb2.JobStatus.Value(f"JOB_STATUS_{state}")


def test_a_packet_that_is_too_large_is_not_even_parsed() -> None:
    with pytest.raises(Rejected) as rejected:
        Codec("penstock").decode(b"\0" * (MAX_PACKET + 1), "sys.job.submit", NOW)
    assert rejected.value.code == 101


def test_errors_have_the_codes_of_cap() -> None:
    errors = (InvalidRequest("f", "p"), TooLarge("f", "p"), NotFound("x"), Conflict("x"))
    assert [code_of(error) for error in errors] == [203, 203, 204, 205]
    assert code_of(NotPermitted("x")) == 202
