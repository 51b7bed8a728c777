"""Who may call a container worker, from where, and what becomes of bad requests."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.api.test_http_security import make_certificate
from tests.support.api.container_house import MemoryFacade, a_job, container_house

from penstock.api.container.server import http_options
from penstock.core.errors import Misconfigured
from penstock.testing.aio import run_async
from penstock.workloads.container.config import InputRules, WorkerConfig

PAGE = "http://dashboard.example:10000"


# -- the token ----------------------------------------------------------------------------


@run_async
async def test_with_a_token_only_health_answers_without_it() -> None:
    async with container_house(token="sésame") as house:
        house.api.add("job")
        paths = ["/jobs", "/jobs/job", "/jobs/job/logs", "/jobs/job/logs?follow=sse"]
        paths += ["/jobs/job/artifacts", "/jobs/job/artifacts/a", "/info", "/metrics"]
        paths += ["/openapi.json", "/docs"]
        calls = [("GET", path) for path in paths]
        calls += [("POST", "/jobs"), ("DELETE", "/jobs/job"), ("POST", "/drain")]
        calls += [("DELETE", "/drain")]
        for method, path in calls:
            answer = await house.call(method, path, token="wrong")
            assert (answer.status, answer.json["error"]["code"]) == (401, "NOT_AUTHENTICATED")
            assert answer.headers["WWW-Authenticate"] == 'Bearer realm="penstock"'
        assert (await house.call("GET", "/health", token="wrong")).status == 200
        right = {"Authorization": "bearer sésame"}
        assert (await house.call("GET", "/info", headers=right)).status == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic sesame", "sesame", "Bearer x"])
@run_async
async def test_what_is_no_token_is_refused_and_not_repeated(
    header: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with container_house(token="sesame") as house:
            given = {"Authorization": header} if header else {}
            async with house.session.get(f"{house.server.url}/info", headers=given) as answer:
                assert answer.status == 401
                assert "sesame" not in (await answer.text()) + caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "worker.example", "10.0.0.1"])
def test_without_a_token_it_listens_on_loopback_only(host: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        http_options(WorkerConfig(host=host, port=0))
    assert "token" in refused.value.hint
    http_options(WorkerConfig(host=host, token="t"))


# -- names and pages ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "host", "status"),
    [
        ({}, "localhost", 200),
        ({}, "evil.example", 421),
        ({"cors": (PAGE,)}, "evil.example", 421),
        ({"cors": ("*",)}, "evil.example", 421),
        ({"cors": ("*",), "token": "sesame"}, "evil.example", 200),
        ({"hosts": ("worker.example",)}, "worker.example:9000", 200),
        ({"hosts": ("worker.example",)}, "localhost", 200),
        ({"hosts": ("worker.example",)}, "evil.example", 421),
    ],
)
@run_async
async def test_on_loopback_only_its_own_names_are_answered_to(
    options: dict[str, Any], host: str, status: int
) -> None:
    async with container_house(**options) as house:
        answer = await house.call("GET", "/health", headers={"Host": host})
        assert answer.status == status
        if status != 200:
            assert answer.json["error"]["code"] == "WRONG_HOST"


@run_async
async def test_pages_from_elsewhere_may_read_and_change_nothing_unless_they_are_listed() -> None:
    async with container_house() as house:
        for headers in ({"Origin": PAGE}, {"Origin": "null"}):
            read = await house.call("GET", "/health", headers=headers)
            assert read.status == 200
            assert "Access-Control-Allow-Origin" not in read.headers
            for method, path in (("POST", "/drain"), ("DELETE", "/jobs/x"), ("POST", "/jobs")):
                answer = await house.call(method, path, headers=headers)
                assert (answer.status, answer.json["error"]["code"]) == (403, "ORIGIN_NOT_ALLOWED")
        assert not house.api.draining
        asked = await house.call("OPTIONS", "/jobs", headers={"Origin": PAGE})
        assert (asked.status, asked.body) == (204, b"")
        assert "Access-Control-Allow-Origin" not in asked.headers
        own = {"Origin": house.server.url}
        assert (await house.call("POST", "/drain", headers=own)).status == 200


@run_async
async def test_any_page_may_call_where_that_is_allowed_as_in_the_protocol() -> None:
    async with container_house(cors=("*",), token="sesame") as house:
        headers = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type,authorization",
        }
        for path in ("/jobs", "/jobs/x", "/nothing/at/all"):
            asked = await house.call("OPTIONS", path, headers=headers, token="wrong")
            assert (asked.status, asked.body) == (204, b"")
            told = asked.headers
            assert told["Access-Control-Allow-Origin"] == "*"
            assert told["Access-Control-Allow-Methods"] == "GET,HEAD,PUT,PATCH,POST,DELETE"
            assert told["Access-Control-Allow-Headers"] == "content-type,authorization"
            assert told["Vary"] == "Access-Control-Request-Headers"
        origin = {"Origin": PAGE}
        assert (await house.call("POST", "/jobs", a_job(), headers=origin)).status == 202
        house.api.end("job-1")
        for path in (
            "/health",
            "/jobs/job-1",
            "/jobs/none",
            "/none",
            "/jobs/job-1/logs?follow=sse",
        ):
            answer = await house.call("GET", path, headers=origin)
            assert answer.headers["Access-Control-Allow-Origin"] == "*"
        denied = await house.call("GET", "/info", headers=origin, token="wrong")
        assert (denied.status, denied.headers["Access-Control-Allow-Origin"]) == (401, "*")


@run_async
async def test_without_a_token_pages_may_only_read() -> None:
    listed = "http://board.example"
    async with container_house(cors=("*", listed)) as house:
        origin = {"Origin": PAGE}
        read = await house.call("GET", "/health", headers=origin)
        assert (read.status, read.headers["Access-Control-Allow-Origin"]) == (200, "*")
        for method, path in (("POST", "/jobs"), ("DELETE", "/jobs/x"), ("POST", "/drain")):
            answer = await house.call(method, path, a_job(), headers=origin)
            assert (answer.status, answer.json["error"]["code"]) == (403, "ORIGIN_NOT_ALLOWED")
        # A name that was made to point here is no way around that.
        rebound = {"Origin": "http://evil.example", "Host": "evil.example"}
        assert (await house.call("POST", "/jobs", a_job(), headers=rebound)).status == 421
        assert house.api.runs == {}
        asks = {"Access-Control-Request-Method": "POST"}
        asked = await house.call("OPTIONS", "/jobs", headers={**origin, **asks})
        assert asked.headers["Access-Control-Allow-Methods"] == "GET,HEAD"
        submitted = await house.call("POST", "/jobs", a_job(), headers={"Origin": listed})
        assert submitted.status == 403
    async with container_house(cors=(listed,), token="sesame") as house:
        submitted = await house.call("POST", "/jobs", a_job(), headers={"Origin": listed})
        assert submitted.status == 202


@run_async
async def test_a_listed_page_is_named_and_others_are_not() -> None:
    async with container_house(cors=(PAGE + "/",)) as house:
        answer = await house.call("GET", "/info", headers={"Origin": PAGE})
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert answer.headers["Vary"] == "Origin"
        other = await house.call("GET", "/info", headers={"Origin": "http://evil.example"})
        assert "Access-Control-Allow-Origin" not in other.headers
        assert other.headers["Vary"] == "Origin"
        assert (await house.call("POST", "/drain", headers={"Origin": PAGE})).status == 403
        evil = {"Origin": "http://evil.example"}
        assert (await house.call("POST", "/drain", headers=evil)).status == 403


# -- bad requests -------------------------------------------------------------------------


@pytest.mark.seed("003", "9.9")
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "NOT_FOUND"),
        ("GET", "/nothing", 404, "NOT_FOUND"),
        ("GET", "/jobs/%ff", 404, "NOT_FOUND"),
        ("GET", "/jobs/a/b", 404, "NOT_FOUND"),
        ("PUT", "/jobs", 405, "METHOD_NOT_ALLOWED"),
        ("PATCH", "/jobs/a", 405, "METHOD_NOT_ALLOWED"),
        ("POST", "/info", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "/health?strict=maybe", 400, "INVALID_FIELD"),
    ],
)
@run_async
async def test_every_refusal_is_json_and_says_what_is_wrong(
    method: str, path: str, status: int, code: str
) -> None:
    async with container_house() as house:
        answer = await house.call(method, path)
        assert (answer.status, answer.json["error"]["code"]) == (status, code)
        assert list(answer.json) == ["error"]
        assert list(answer.json["error"])[:2] == ["code", "message"]
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        if status == 405:
            assert "OPTIONS" in answer.headers["Allow"]


@pytest.mark.seed("003", "9.9")
@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /jobs/\xe4 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /info HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /info HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000,
    ],
)
@run_async
async def test_what_is_no_request_is_answered_with_json_too(data: bytes) -> None:
    async with container_house() as house:
        head, _, body = (await house.raw(data)).partition(b"\r\n\r\n")
        assert head.split(b" ")[1] in (b"400", b"404", b"421", b"431"), head
        told = json.loads(body)
        assert "error" in told or told["state"] == "not_found"


@run_async
async def test_a_failure_of_the_worker_tells_nothing_but_where_to_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(MemoryFacade):
        async def get(self, job_id: str) -> None:  # type: ignore[override]
            raise RuntimeError("a secret path")

    async with container_house(Broken()) as house:
        answer = await house.call("GET", "/jobs/x")
        assert (answer.status, answer.json["error"]["code"]) == (500, "INTERNAL")
        assert b"secret" not in answer.body
        assert b"Traceback" not in answer.body
        assert "a secret path" in caplog.text
        posted = await house.call("DELETE", "/jobs/x")
        assert posted.status == 500


@run_async
async def test_a_body_over_its_limit_is_refused_in_the_protocols_shape() -> None:
    async with container_house(max_body_bytes=1000, inputs=InputRules(max_bytes=3000)) as house:
        for job in (a_job(task={"x": "y" * 1000}), a_job(inputs=[{"text": "y" * 5000}])):
            answer = await house.call("POST", "/jobs", job)
            assert answer.status == 413
            assert list(answer.json) == ["accepted", "job_id", "state", "error"]
            assert (answer.json["accepted"], answer.json["job_id"]) == (False, None)
            assert answer.json["error"]["code"] == "INVALID_BODY"
        with_files = a_job(inputs=[{"path": "a", "text": "y" * 3000}])
        assert (await house.call("POST", "/jobs", with_files)).status == 202
        reader, writer = await house.connect()  # refused before all of it has come
        writer.write(house.head("POST", "/jobs", "Content-Length: 9999999"))
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)
        chunked = house.head("POST", "/jobs", "Transfer-Encoding: chunked", "Connection: close")
        assert b" 413 " in (await house.raw(chunked + b"1770\r\n" + b"x" * 6000))[:20]
        assert list(house.api.runs) == ["job-1"]


@run_async
async def test_a_body_that_does_not_come_is_not_waited_for_for_ever() -> None:
    limits = {"body_grace": 0.1, "body_timeout": 0.2}
    async with container_house(limits=limits) as house:
        slow = house.head("POST", "/jobs", "Content-Length: 100", "Content-Type: application/json")
        answer = await house.raw(slow + b'{"prot')
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["accepted"] is False


@run_async
async def test_a_head_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async with container_house(limits={"head_timeout": 0.2}) as house:
        answer = await house.raw(b"GET /info HTTP/1.1\r\nHost: loc")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "SLOW"


@run_async
async def test_an_encoded_body_is_refused() -> None:
    async with container_house() as house:
        headers = {"Content-Encoding": "gzip"}
        answer = await house.call("POST", "/jobs", a_job(), headers=headers)
        assert (answer.status, answer.json["accepted"]) == (415, False)


# -- ways in ------------------------------------------------------------------------------


@run_async
async def test_info_is_public_where_the_owner_says_so() -> None:
    for public, status in ((False, 401), (True, 200)):
        async with container_house(token="sesame", public_info=public) as house:
            for path, wanted in (("/health", 200), ("/info", status), ("/jobs", 401)):
                async with house.session.get(f"{house.server.url}{path}") as answer:
                    assert answer.status == wanted, path


@run_async
async def test_it_speaks_tls_and_nothing_else_if_it_has_a_certificate(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    async with container_house(tls_certificate=cert, tls_key=key, token="secret") as house:
        url, head = house.server.url, {"Authorization": "Bearer secret"}
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(cert))
        async with house.session.post(f"{url}/jobs", json=a_job(), headers=head, ssl=trust) as it:
            assert it.status == 202
        with pytest.raises(aiohttp.ClientError):
            await house.session.get(f"http{url.removeprefix('https')}/health")


@run_async
async def test_it_listens_on_a_unix_socket_that_only_its_owner_can_open(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    async with container_house(socket=path):
        assert path.stat().st_mode & 0o777 == 0o600
        connector = aiohttp.UnixConnector(str(path))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.post("http://worker/jobs", json=a_job()) as answer,
        ):
            assert answer.status == 202
        with pytest.raises(Misconfigured, match="another process listens"):
            async with container_house(socket=path):
                pass
    async with container_house(socket=path):  # one that was left behind is replaced
        pass
