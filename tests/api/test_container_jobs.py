"""Jobs over a container worker's HTTP API: the protocol's bodies to the byte, and what is more."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from tests.support.api.container_house import (
    CREATED,
    ContainerHouse,
    MemoryFacade,
    a_job,
    container_house,
)
from tests.support.waiting import soon

from penstock.api.container.views import moment
from penstock.testing.aio import run_async
from penstock.workloads.container.job import ErrorCode, JobError

NINE = [
    "job_id",
    "state",
    "created_at",
    "started_at",
    "finished_at",
    "exit_code",
    "stdout",
    "stderr",
    "error",
]

# -- submitting ---------------------------------------------------------------------------


@pytest.mark.seed("003", "2.1")
@run_async
async def test_a_submission_is_answered_as_the_protocol_says() -> None:
    async with container_house() as house:
        answer = await house.call("POST", "/jobs", a_job())
        assert answer.status == 202
        assert answer.body == b'{"accepted":true,"job_id":"job-1","state":"queued"}'
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.seed("003", "2.12")
@pytest.mark.parametrize(
    ("change", "body"),
    [
        (
            {"protocol_version": 2},
            b'{"accepted":false,"job_id":"job-1","state":"rejected","error":{"code":'
            b'"UNSUPPORTED_PROTOCOL_VERSION","message":"protocol_version must be 1"}}',
        ),
        (
            {"job_id": ""},
            b'{"accepted":false,"job_id":"","state":"rejected","error":{"code":'
            b'"MISSING_JOB_ID","message":"job_id is missing"}}',
        ),
        (
            {"job_id": 5},
            b'{"accepted":false,"job_id":5,"state":"rejected","error":{"code":'
            b'"MISSING_JOB_ID","message":"job_id is missing"}}',
        ),
        (
            {"job_id": None},
            b'{"accepted":false,"job_id":null,"state":"rejected","error":{"code":'
            b'"MISSING_JOB_ID","message":"job_id is missing"}}',
        ),
        (
            {"job_id": {"a": [1, "x"]}},
            b'{"accepted":false,"job_id":{"a":[1,"x"]},"state":"rejected","error":{"code":'
            b'"MISSING_JOB_ID","message":"job_id is missing"}}',
        ),
        (
            {"runtime": {"mode": "build"}},
            b'{"accepted":false,"job_id":"job-1","state":"rejected","error":{"code":'
            b'"RUNTIME_NOT_SUPPORTED",'
            b'"message":"runtime.mode=build not supported on this worker"}}',
        ),
        (
            {"runtime": {"mode": "image", "image": "a", "limits": {"memory_mb": 1}}},
            b'{"accepted":false,"job_id":"job-1","state":"rejected","error":{"code":'
            b'"INVALID_FIELD","message":"is less than 6","field":"runtime.limits.memory_mb"}}',
        ),
    ],
)
@run_async
async def test_a_refusal_is_answered_as_the_protocol_says(
    change: dict[str, Any], body: bytes
) -> None:
    async with container_house() as house:
        answer = await house.call("POST", "/jobs", {**a_job(), **change})
        assert (answer.status, answer.body) == (400, body)
        assert house.api.runs == {}


INVALID_BODY = (
    b'{"accepted":false,"job_id":null,"state":"rejected","error":{"code":"INVALID_BODY",'
    b'"message":"body must be a JSON object"}}'
)


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b"5", "application/json"),
        (b"null", "application/json"),
        (b"[]", "application/json"),
        (b"\xff\xfe", "application/json"),
        (json.dumps(a_job()).encode(), "text/plain"),
        (json.dumps(a_job()).encode(), "application/x-www-form-urlencoded"),
        (json.dumps(a_job()).encode(), "application/json5"),
        (json.dumps(a_job()).encode(), ""),
    ],
)
@run_async
async def test_what_is_no_json_object_or_not_said_to_be_one_is_an_invalid_body(
    data: bytes, content_type: str
) -> None:
    async with container_house() as house:
        head = house.head(
            "POST",
            "/jobs",
            f"Content-Length: {len(data)}",
            "Connection: close",
            *([f"Content-Type: {content_type}"] if content_type else []),
        )
        answer = await house.raw(head + data)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(b"\r\n\r\n" + INVALID_BODY)


@run_async
async def test_the_type_of_a_body_may_have_parameters_and_any_case() -> None:
    async with container_house() as house:
        headers = {"Content-Type": "Application/JSON; charset=utf-8"}
        assert (await house.call("POST", "/jobs", a_job(), headers=headers)).status == 202


@run_async
async def test_an_id_that_json_cant_repeat_is_left_out_of_the_refusal() -> None:
    async with container_house() as house:
        data = b'{"protocol_version":2,"job_id":"\\ud800"}'
        headers = {"Content-Type": "application/json"}
        answer = await house.call("POST", "/jobs", data=data, headers=headers)
        assert answer.status == 400
        assert answer.json["job_id"] is None
        assert answer.json["error"]["code"] == "UNSUPPORTED_PROTOCOL_VERSION"


@run_async
async def test_a_taken_id_a_full_queue_and_a_draining_worker_are_refused_with_their_status() -> (
    None
):
    async with container_house(MemoryFacade(most_queued=1)) as house:
        await house.submit()
        taken = await house.call("POST", "/jobs", a_job())
        assert taken.status == 409
        assert taken.body == (
            b'{"accepted":false,"job_id":"job-1","state":"rejected","error":{"code":'
            b'"JOB_ID_ALREADY_EXISTS","message":"job job-1 is here already"}}'
        )
        full = await house.call("POST", "/jobs", a_job("job-2"))
        assert (full.status, full.headers["Retry-After"]) == (429, "3")
        assert full.json["error"] == {"code": "QUEUE_FULL", "message": "full"}
        house.api.drain(True)
        draining = await house.call("POST", "/jobs", a_job("job-2"))
        assert (draining.status, draining.headers["Retry-After"]) == (503, "30")
        assert draining.json["error"]["code"] == "DRAINING"


@pytest.mark.seed("003", "10.10")
@run_async
async def test_the_same_idempotency_key_is_the_same_job() -> None:
    async with container_house() as house:
        headers = {"Idempotency-Key": "k"}
        for job_id in ("job-1", "job-2"):
            answer = await house.call("POST", "/jobs", a_job(job_id), headers=headers)
            assert answer.status == 202
            assert answer.json["job_id"] == "job-1"
        long = {"Idempotency-Key": "k" * 256}
        refused = await house.call("POST", "/jobs", a_job("job-3"), headers=long)
        assert (refused.status, refused.json["error"]["field"]) == (400, "Idempotency-Key")
        assert refused.json["accepted"] is False


@pytest.mark.seed("003", "10.10")
@run_async
async def test_a_submission_that_waits_is_answered_with_the_finished_record() -> None:
    async with container_house() as house:
        asked = asyncio.create_task(house.call("POST", "/jobs?wait=60", a_job()))
        await soon(lambda: house.api.waiters)
        house.api.start("job-1")
        house.api.write("job-1", "stdout", b"hello\n")
        house.api.end("job-1")
        answer = await asked
        assert (answer.status, answer.json["state"]) == (200, "finished")
        assert answer.json["stdout"] == "hello\n"


@run_async
async def test_a_submission_that_can_not_wait_is_accepted_all_the_same() -> None:
    async with container_house(limits={"max_waiting": 1}) as house:
        await house.submit("first")
        waiting = asyncio.create_task(house.call("GET", "/jobs/first?wait=60"))
        await soon(lambda: house.api.waiters)
        answer = await house.call("POST", "/jobs?wait=60", a_job())
        assert (answer.status, answer.json["accepted"]) == (202, True)
        assert (await house.call("GET", "/jobs/first?wait=60")).status == 429
        assert (await house.call("GET", "/jobs/first")).status == 200
        house.api.end("first")
        assert (await waiting).json["state"] == "finished"


# -- records ------------------------------------------------------------------------------


@pytest.mark.seed("003", "2.10")
@run_async
async def test_a_record_begins_with_the_protocols_nine_keys_to_the_byte() -> None:
    async with container_house() as house:
        await house.submit()
        assert (await house.call("GET", "/jobs/job-1")).body.startswith(
            b'{"job_id":"job-1","state":"queued","created_at":"2023-11-14T22:13:20.123Z",'
            b'"started_at":null,"finished_at":null,"exit_code":null,"stdout":"","stderr":"",'
            b'"error":null,'
        )
        house.api.start("job-1")
        house.api.write("job-1", "stdout", 'grüße "1"\n'.encode())
        assert (await house.call("GET", "/jobs/job-1")).body.startswith(
            b'{"job_id":"job-1","state":"running","created_at":"2023-11-14T22:13:20.123Z",'
            b'"started_at":"2023-11-14T22:13:21.123Z","finished_at":null,"exit_code":null,'
            b'"stdout":"","stderr":"","error":null,'
        )
        house.api.end("job-1", 3, JobError(ErrorCode.NON_ZERO_EXIT, "exit code 3"))
        assert (await house.call("GET", "/jobs/job-1")).body.startswith(
            '{"job_id":"job-1","state":"failed","created_at":"2023-11-14T22:13:20.123Z",'
            '"started_at":"2023-11-14T22:13:21.123Z","finished_at":"2023-11-14T22:13:22.623Z",'
            '"exit_code":3,"stdout":"grüße \\"1\\"\\n","stderr":"",'
            '"error":{"code":"NON_ZERO_EXIT","message":"exit code 3"},'.encode()
        )


@run_async
async def test_a_record_tells_more_after_the_protocols_keys_and_never_values_of_env() -> None:
    async with container_house() as house:
        await house.submit("other")
        await house.submit(labels={"team": "blue"}, priority="high")
        answer = await house.call("GET", "/jobs/job-1")
        assert list(answer.json)[:9] == NINE
        told = answer.json
        assert told["waiting_for"] == "a free place"
        assert (told["labels"], told["priority"]) == ({"team": "blue"}, "high")
        house.api.start("job-1")
        house.api.write("job-1", "stderr", b"x" * 10)
        house.api.leave("job-1", {"a.txt": b"1"})
        house.api.end("job-1")
        answer = await house.call("GET", "/jobs/job-1")
        told = answer.json
        assert list(told)[:9] == NINE
        assert (told["stdout_bytes"], told["stderr_bytes"]) == (0, 10)
        assert (told["stderr_truncated"], told["stderr_gap"]) == (False, False)
        assert told["usage"] == {"peak_memory_bytes": 1 << 20, "cpu_seconds": 0.25}
        assert [one["path"] for one in told["artifacts"]] == ["a.txt"]
        assert told["skipped"] == ["link: is a symbolic link"]
        assert told["waiting_for"] == ""
        for path in ("/jobs", "/jobs/job-1"):
            assert b"a-secret-value" not in (await house.call("GET", path)).body


@run_async
async def test_a_timeout_is_marked_by_a_line_in_stderr() -> None:
    async with container_house() as house:
        house.api.add("late")
        house.api.start("late")
        house.api.write("late", "stderr", b"working")
        house.api.end("late", None, JobError(ErrorCode.TIMEOUT, "stopped after 10 s"))
        told = (await house.call("GET", "/jobs/late")).json
        assert told["stderr"] == "working\n[worker] stopped after 10 s"
        assert (told["exit_code"], told["error"]["code"]) == (None, "TIMEOUT")


@run_async
async def test_unknown_parameters_and_slashes_at_the_end_are_ignored() -> None:
    async with container_house() as house:
        await house.submit()
        for path in ("/info?_=1", "/health?_=1", "/jobs/job-1?_=1", "/info/", "/jobs/job-1/"):
            assert (await house.call("GET", path)).status == 200, path


@pytest.mark.parametrize("job_id", ["a/b c", "ä" * 50, "x" * 5000, "..", "a%2Fb", "?#&", "50%"])
@run_async
async def test_an_id_of_any_characters_is_found_when_it_is_escaped(job_id: str) -> None:
    async with container_house() as house:
        await house.submit(job_id)
        path = f"/jobs/{quote(job_id, safe='')}"
        if job_id == "..":
            path = "/jobs/%2E%2E"
        answer = await house.call("GET", path)
        assert (answer.status, answer.json["job_id"]) == (200, job_id)
        assert (await house.call("GET", f"{path}/logs")).json["job_id"] == job_id
        assert (await house.call("DELETE", path)).json["job_id"] == job_id


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@run_async
async def test_an_unknown_job_is_not_found_in_the_protocols_words(method: str) -> None:
    async with container_house() as house:
        answer = await house.call(method, "/jobs/a%2Fb")
        assert answer.status == 404
        assert answer.body == b'{"job_id":"a/b","state":"not_found"}'
        long = await house.call(method, "/jobs/" + "x" * 5000)
        assert (long.status, long.json["job_id"]) == (404, "x" * 5000)


@pytest.mark.seed("003", "7.2")
@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "1970-01-01T00:00:00.000Z"),
        (CREATED, "2023-11-14T22:13:20.123Z"),
        (1_700_000_000.9996, "2023-11-14T22:13:21.000Z"),
        (1_699_999_999.0, "2023-11-14T22:13:19.000Z"),
    ],
)
def test_times_have_milliseconds_and_are_utc(seconds: float, told: str) -> None:
    assert moment(seconds) == told


# -- waiting ------------------------------------------------------------------------------


@run_async
async def test_a_wait_ends_with_the_job_or_with_its_time() -> None:
    async with container_house() as house:
        await house.submit()
        early = await house.call("GET", "/jobs/job-1?wait=0.01")
        assert (early.status, early.json["state"]) == (200, "queued")
        asked = asyncio.create_task(house.call("GET", "/jobs/job-1?wait=1000"))
        await soon(lambda: house.api.waiters)
        house.api.start("job-1")
        house.api.end("job-1")
        assert (await asked).json["state"] == "finished"
        assert (await house.call("GET", "/jobs/none?wait=5")).status == 404


@run_async
async def test_a_wait_is_broken_off_when_the_client_leaves() -> None:
    async with container_house() as house:
        await house.submit()
        for path in ("/jobs/job-1?wait=100", "/jobs/job-1/logs?wait=100"):
            _, writer = await house.connect()
            writer.write(house.head("GET", path))
            await soon(lambda: house.api.waiters)
            writer.close()
            await soon(lambda: not house.api.waiters)
        assert house.server.waiting == 0


# -- deleting -----------------------------------------------------------------------------


@pytest.mark.seed("003", "1.8")
@run_async
async def test_a_queued_job_is_cancelled_at_once() -> None:
    async with container_house() as house:
        await house.submit()
        answer = await house.call("DELETE", "/jobs/job-1")
        assert answer.status == 200
        assert answer.body == (
            b'{"job_id":"job-1","state":"failed","note":"cancelled while it was queued"}'
        )
        told = (await house.call("GET", "/jobs/job-1")).json
        assert (told["state"], told["error"]["code"]) == ("failed", "CANCELLED")


@run_async
async def test_a_running_job_is_asked_to_end_and_an_ended_one_is_left_as_it_is() -> None:
    async with container_house() as house:
        await house.submit()
        house.api.start("job-1")
        answer = await house.call("DELETE", "/jobs/job-1")
        assert answer.status == 202
        assert answer.body == (
            b'{"job_id":"job-1","state":"running","note":"cancellation requested"}'
        )
        house.api.end("job-1")
        answer = await house.call("DELETE", "/jobs/job-1")
        assert answer.status == 202
        assert answer.body == (
            b'{"job_id":"job-1","state":"finished","note":"it has ended already"}'
        )


@run_async
async def test_a_job_that_was_cancelled_before_is_not_cancelled_twice() -> None:
    async with container_house() as house:
        await house.submit()
        assert (await house.call("DELETE", "/jobs/job-1")).status == 200
        again = await house.call("DELETE", "/jobs/job-1?wait=5")
        assert (again.status, again.json["note"]) == (202, "it has ended already")


@run_async
async def test_a_delete_that_waits_is_answered_when_the_container_is_gone() -> None:
    async with container_house() as house:
        await house.submit()
        house.api.start("job-1")
        early = await house.call("DELETE", "/jobs/job-1?wait=0.01")
        assert (early.status, early.json["state"]) == (202, "running")
        asked = asyncio.create_task(house.call("DELETE", "/jobs/job-1?wait=60"))
        await soon(lambda: house.api.waiters)
        house.api.end("job-1", None, JobError(ErrorCode.CANCELLED, "cancelled"))
        answer = await asked
        assert (answer.status, answer.json["state"]) == (200, "failed")


@run_async
async def test_a_delete_that_comes_after_the_end_does_not_say_that_it_cancelled() -> None:
    async with container_house() as house:
        await house.submit()
        house.api.start("job-1")
        asked = asyncio.create_task(house.call("DELETE", "/jobs/job-1?wait=60"))
        await soon(lambda: house.api.waiters)
        house.api.end("job-1")
        answer = await asked
        assert answer.status == 202
        assert answer.body == (
            b'{"job_id":"job-1","state":"finished","note":"it has ended already"}'
        )


# -- listing ------------------------------------------------------------------------------


async def _ids(house: ContainerHouse, query: str) -> list[str]:
    answer = await house.call("GET", f"/jobs{query}")
    assert answer.status == 200, answer
    return [job["job_id"] for job in answer.json["jobs"]]


@pytest.mark.seed("003", "10.10")
@run_async
async def test_jobs_are_listed_newest_first_and_by_page() -> None:
    async with container_house() as house:
        assert (await house.call("GET", "/jobs")).body == b'{"jobs":[],"next":null}'
        for number in range(7):
            await house.submit(f"job-{number}")
        found, cursor = [], ""
        while True:
            answer = (await house.call("GET", f"/jobs?limit=3{cursor}")).json
            found.append([job["job_id"] for job in answer["jobs"]])
            if answer["next"] is None:
                break
            await house.submit(f"late-{len(found)}")
            cursor = f"&cursor={answer['next']}"
        assert found == [["job-6", "job-5", "job-4"], ["job-3", "job-2", "job-1"], ["job-0"]]


@run_async
async def test_jobs_are_found_by_state_label_image_and_code() -> None:
    async with container_house() as house:
        await house.submit("blue", labels={"team": "blue", "url": "http://x:1/"})
        await house.submit("red", labels={"team": "red"}, runtime={"mode": "image", "image": "b:1"})
        house.api.start("blue")
        house.api.end("blue", 1, JobError(ErrorCode.OOM_KILLED, "no"))
        assert await _ids(house, "?state=queued") == ["red"]
        assert await _ids(house, "?state=queued&state=failed") == ["red", "blue"]
        assert await _ids(house, "?label=team:blue") == ["blue"]
        assert await _ids(house, "?label=url:http://x:1/") == ["blue"]
        assert await _ids(house, "?image=b:1") == ["red"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("?limit=0", "limit"),
        ("?limit=x", "limit"),
        ("?state=done", "state[0]"),
        ("?label=team", "label"),
        ("?cursor=abc", "cursor"),
        ("?limit=1&limit=2", "limit"),
        ("?image=%ff", "query"),
    ],
)
@run_async
async def test_a_wrong_parameter_is_named(query: str, field: str) -> None:
    async with container_house() as house:
        answer = await house.call("GET", f"/jobs{query}")
        assert (answer.status, answer.json["error"]["field"]) == (400, field)
        assert answer.json["error"]["code"] == "INVALID_FIELD"


@pytest.mark.parametrize("wait", ["-1", "nan", "inf", "x", ""])
@run_async
async def test_a_wait_that_is_no_time_is_refused(wait: str) -> None:
    async with container_house() as house:
        await house.submit()
        for method, path in (("GET", "/jobs/job-1"), ("DELETE", "/jobs/job-1"), ("POST", "/jobs")):
            answer = await house.call(method, f"{path}?wait={wait}")
            assert (answer.status, answer.json["error"]["field"]) == (400, "wait")
        assert house.api.runs["job-1"].record.state == "queued"
