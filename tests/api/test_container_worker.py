"""A container worker's artifacts, what it says of itself, and what its API says of itself."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import pairwise

import pytest
from tests.support.api.container_house import MemoryFacade, container_house
from tests.support.rows import every

from penstock.testing.aio import run_async

LARGE = bytes(range(256)) * 4096


def with_files() -> MemoryFacade:
    api = MemoryFacade()
    api.add("job")
    api.start("job")
    api.leave("job", {"a.txt": b"hello", "sub/ä b.bin": LARGE, "empty": b"", "x%2Fy": b"odd"})
    api.end("job")
    return api


# -- artifacts ----------------------------------------------------------------------------


@run_async
async def test_artifacts_are_listed_and_downloaded() -> None:
    async with container_house(with_files()) as house:
        told = (await house.call("GET", "/jobs/job/artifacts")).json
        assert list(told) == ["job_id", "artifacts", "skipped"]
        assert told["artifacts"][0] == {
            "path": "a.txt",
            "size": 5,
            "sha256": sha256(b"hello").hexdigest(),
        }
        answer = await house.call("GET", "/jobs/job/artifacts/a.txt")
        assert (answer.status, answer.body) == (200, b"hello")
        headers = answer.headers
        assert headers["Content-Length"] == "5"
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["Content-Disposition"] == "attachment; filename*=UTF-8''a.txt"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["ETag"] == f'"{sha256(b"hello").hexdigest()}"'
        assert (await house.call("GET", "/jobs/job/artifacts/empty")).body == b""
        for path in ("sub/%C3%A4%20b.bin", "sub%2F%C3%A4%20b.bin"):
            deep = await house.call("GET", f"/jobs/job/artifacts/{path}")
            assert deep.body == LARGE
            said = deep.headers["Content-Disposition"]
            assert said == "attachment; filename*=UTF-8''%C3%A4%20b.bin"
        assert (await house.call("GET", "/jobs/job/artifacts/x%252Fy")).body == b"odd"


@run_async
async def test_an_artifact_that_is_known_or_wanted_in_part_is_not_sent_whole() -> None:
    async with container_house(with_files()) as house:
        path = "/jobs/job/artifacts/a.txt"
        etag = (await house.call("GET", path)).headers["ETag"]
        known = await house.call("GET", path, headers={"If-None-Match": etag})
        assert (known.status, known.body) == (304, b"")
        part = await house.call("GET", path, headers={"Range": "bytes=1-2"})
        assert (part.status, part.body) == (206, b"el")
        beyond = await house.call("GET", path, headers={"Range": "bytes=9-"})
        assert (beyond.status, beyond.json["error"]["code"]) == (416, "NO_SUCH_RANGE")
        head = await house.call("HEAD", path)
        assert (head.status, head.headers["Content-Length"], head.body) == (200, "5", b"")


@every(
    "path",
    [
        "nope",
        "../a.txt",
        "..%2fa.txt",
        "%2e%2e/%2e%2e/etc/passwd",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "./a.txt",
        "sub",
        "sub/",
        "a.txt%00",
        "%ff",
        "C:%5Ca.txt",
        "x" * 5000,
    ],
)
@run_async
async def test_a_name_that_is_not_listed_is_not_found(path: str) -> None:
    async with container_house(with_files()) as house:
        answer = await house.raw(
            house.head("GET", f"/jobs/job/artifacts/{path}", "Connection: close")
        )
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "NOT_FOUND"


@run_async
async def test_artifacts_of_an_unknown_job_are_not_found() -> None:
    async with container_house() as house:
        listed = await house.call("GET", "/jobs/nope/artifacts")
        assert (listed.status, listed.body) == (404, b'{"job_id":"nope","state":"not_found"}')
        assert (await house.call("GET", "/jobs/nope/artifacts/a")).status == 404


# -- the worker ---------------------------------------------------------------------------

HEALTH = (
    b'{"status":"ok","uptime_seconds":12,"load_average":[0.5,0.25,0.125],"running_jobs":0,'
    b'"max_concurrent_jobs":2,"temperature_c":null,"health_protocol_version":2,'
    b'"timestamp_unix_ms":1700000000123,"cpu_threads":2,"dedicated_reserved_cpu_ids":[],'
    b'"dedicated_reserved_count":0,"memory_total_mb":2048,"memory_available_mb":1024,'
    b'"jobs_path":"jobs","jobs_disk_total_mb":null,"jobs_disk_available_mb":null,'
    b'"docker_root_dir":"docker","docker_disk_total_mb":10,"docker_disk_available_mb":5'
)
INFO = (
    b'{"worker_id":"worker001","hostname":"worker001","os":"linux","os_architecture":"x64",'
    b'"protocol_version":1,"cpu_model":null,"cpu_cores":null,"cpu_threads":2,"memory_mb":2048,'
    b'"labels":["gpu"]'
)


@run_async
async def test_health_and_info_begin_with_the_protocols_keys() -> None:
    async with container_house() as house:
        health = (await house.call("GET", "/health")).body
        assert health.startswith(HEALTH + b',"queued_jobs":0,"max_queued_jobs":100,')
        assert (await house.call("GET", "/info")).body.startswith(INFO + b',"version":')


@pytest.mark.seed("003", "10.12")
@run_async
async def test_a_degraded_worker_answers_200_unless_it_is_asked_strictly() -> None:
    async with container_house() as house:
        assert (await house.call("GET", "/health?strict=true")).status == 200
        house.api.problems = ("no engine answers",)
        answer = await house.call("GET", "/health")
        assert (answer.status, answer.json["status"]) == (200, "degraded")
        assert answer.json["problems"] == ["no engine answers"]
        assert (await house.call("GET", "/health?strict=true")).status == 503


@run_async
async def test_a_worker_is_drained_and_takes_jobs_again() -> None:
    async with container_house() as house:
        assert (await house.call("POST", "/drain")).body == b'{"draining":true}'
        assert house.api.draining
        assert (await house.call("DELETE", "/drain")).body == b'{"draining":false}'
        assert not house.api.draining


@pytest.mark.seed("003", "10.12")
@run_async
async def test_figures_are_told_to_prometheus() -> None:
    async with container_house() as house:
        answer = await house.call("GET", "/metrics")
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.body == b"penstock_jobs 0\n"


# -- the API itself -----------------------------------------------------------------------


@run_async
async def test_the_document_and_the_page_tell_of_every_operation() -> None:
    async with container_house() as house:
        told = (await house.call("GET", "/openapi.json")).json
        assert told["info"]["title"] == "Penstock container worker"
        asked = {(path, method) for path, entries in told["paths"].items() for method in entries}
        assert asked == {
            ("/jobs", "post"),
            ("/jobs", "get"),
            ("/jobs/{job_id}", "get"),
            ("/jobs/{job_id}", "delete"),
            ("/jobs/{job_id}/logs", "get"),
            ("/jobs/{job_id}/artifacts", "get"),
            ("/jobs/{job_id}/artifacts/{path}", "get"),
            ("/info", "get"),
            ("/health", "get"),
            ("/drain", "post"),
            ("/drain", "delete"),
            ("/metrics", "get"),
            ("/openapi.json", "get"),
            ("/docs", "get"),
        }
        page = await house.call("GET", "/docs")
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"Penstock container worker" in page.body


@run_async
async def test_a_record_is_as_the_document_says_in_order_too() -> None:
    async with container_house(with_files()) as house:
        schemas = (await house.call("GET", "/openapi.json")).json["components"]["schemas"]
        told = (await house.call("GET", "/jobs/job")).json
        assert list(told) == list(schemas["JobRecord"]["properties"])
        listed = (await house.call("GET", "/jobs")).json["jobs"][0]
        assert list(listed) == list(schemas["JobSummary"]["properties"])
        places = [list(told).index(key) for key in listed]
        assert all(a < b for a, b in pairwise(places))
