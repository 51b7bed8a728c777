"""What a careless or hostile client may send: each is refused with a problem, none harms."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.api.house import House, house
from tests.support.waiting import soon

from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async

JSON = {"Content-Type": "application/json"}


def parsed(raw: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the problem of an answer that came over a bare socket."""
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def still_answers(one: House) -> None:
    assert (await one.call("GET", "/healthz")).status == 200


# -- bodies -------------------------------------------------------------------------------

DEEP = b'{"topic": "job.text.shout", "input": ' + b'{"a": ' * 100 + b"1" + b"}" * 100 + b"}"
HIDDEN = b'{"topic": "job.text.shout", "labels": {"x": "' + b"[{" * 200 + b'"}}'


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        (b'{"topic": "job.a", "topic": "job.b"}', 400, "DUPLICATE_FIELD", "'topic' twice"),
        (b'{"topic": "job.a", "input": {"x": 1, "x": 2}}', 400, "DUPLICATE_FIELD", "'x' twice"),
        (b'{"topic": "job.a", "\\u0074opic": "job.b"}', 400, "DUPLICATE_FIELD", "'topic' twice"),
        (DEEP, 400, "TOO_DEEP", "nested deeper than 64"),
        (b"[" * 100_000, 400, "TOO_DEEP", "nested deeper than 64"),
        (b'{"topic": "job.\xff\xfe"}', 400, "MALFORMED", "not UTF-8"),
        (b'{"topic": "job.\xed\xa0\x80"}', 400, "MALFORMED", "not UTF-8"),
        (b'\xef\xbb\xbf{"topic": "job.a"}', 400, "MALFORMED", "byte order mark"),
        (b'{"topic": "job.a", "timeout": NaN}', 400, "MALFORMED", "NaN is not JSON"),
        (b'{"topic": "job.a", "input": {"x": Infinity}}', 400, "MALFORMED", "Infinity"),
        (b'{"topic": "job.a"', 400, "MALFORMED", ""),
        (b'{"topic": "job.a"} x', 400, "MALFORMED", ""),
        (b"", 400, "MALFORMED", ""),
        (b"null", 422, "INVALID", "body: expected object"),
        (b"[]", 422, "INVALID", "body: expected object"),
        (b"{}", 422, "INVALID", "topic: is missing"),
        (b'{"topic": 5}', 422, "INVALID", "topic: expected str"),
        (b'{"topic": "job.a", "principal": "owner"}', 422, "INVALID", "principal: unknown field"),
        (
            b'{"topic": "job.a", "retry": {"retris": 3}}',
            422,
            "INVALID",
            "retry.retris: unknown",
        ),
        (b'{"topic": "job.a", "labels": {"ok": "a", "n": 1}}', 422, "INVALID", "labels.n: exp"),
        (b'{"topic": "job.a", "after": ["a", 2]}', 422, "INVALID", "after[1]: expected str"),
        (b'{"topic": "job.a", "input": [1]}', 422, "INVALID", "input: is not a JSON object"),
        (b'{"topic": "job.a", "timeout": 1e999}', 422, "INVALID", "timeout: number out of"),
        (b'{"topic": "job.text.shout", "timeout": 1' + b"0" * 5000 + b"}", 422, "INVALID", "time"),
        (
            b'{"topic": "job.text.shout", "labels": {"a": "x\\r\\nSet-Cookie: y"}}',
            422,
            "INVALID",
            "labels.a: has a control character",
        ),
        (
            b'{"topic": "job.text.shout", "job_id": "x\\r\\nSet-Cookie: y"}',
            422,
            "INVALID",
            "job_id: ",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, bytes) else None,
)
@run_async
async def test_a_body_that_is_wrong_is_refused_and_says_where(
    body: bytes, status: int, code: str, says: str, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("POST", "/v1/jobs", data=body, headers=JSON)
        assert (answer.status, answer.json["code"]) == (status, code)
        assert says in answer.json["detail"]
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json["type"].startswith("urn:penstock:problem:")
        assert (await one.call("GET", "/v1/jobs")).json["jobs"] == []


@run_async
async def test_brackets_within_a_text_are_not_nesting(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        assert (await one.call("POST", "/v1/jobs", data=HIDDEN, headers=JSON)).status == 201


@pytest.mark.parametrize("given", ["", "text/plain", "application/xml", "application/jsonx"])
@run_async
async def test_a_body_of_another_type_is_refused(given: str, tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        head = one.head("POST", "/v1/jobs", f"Content-Type: {given}", "Content-Length: 19")
        raw = await one.raw(
            head.replace(b"Host", b"Connection: close\r\nHost") + b'{"topic": "job.a"} '
        )
        status, problem = parsed(raw)
        assert (status, problem["code"]) == (415, "WRONG_TYPE")


@run_async
async def test_an_encoded_body_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        answer = await one.call(
            "POST",
            "/v1/jobs",
            data=b"\x1f\x8b",
            headers={**JSON, "Content-Encoding": "gzip"},
        )
        assert (answer.status, answer.json["code"]) == (415, "WRONG_ENCODING")


@run_async
async def test_ten_megabytes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        reader, writer = await one.connect()
        head = one.head("POST", "/v1/jobs", "Content-Type: application/json")
        writer.write(head[:-2] + b"Content-Length: 10000000\r\n\r\n")
        said = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)  # nothing was sent yet
        assert b" 413 " in said.splitlines()[0]
        writer.close()
        answer = await one.call(
            "POST", "/v1/jobs", data=io.BytesIO(b"x" * 10_000_000), headers=JSON
        )
        assert (answer.status, answer.json["code"]) == (413, "TOO_LARGE")


@run_async
async def test_a_body_of_no_told_length_is_refused_when_it_passes_the_limit(tmp_path: Path) -> None:
    async with house(tmp_path, max_body=100_000) as one:

        async def endless() -> Any:
            while True:
                yield b" " * 10_000

        answer = await one.call("POST", "/v1/jobs", data=endless(), headers=JSON)
        assert (answer.status, answer.json["code"]) == (413, "TOO_LARGE")
        await still_answers(one)


@run_async
async def test_a_line_of_a_stream_without_an_end_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path, max_body=10_000) as one:
        answer = await one.call(
            "POST",
            "/v1/jobs/stream",
            data=b'{"topic": "job.text.shout"}\n' + b"x" * 50_000,
            headers={"Content-Type": "application/x-ndjson"},
        )
        first, last = (json.loads(line) for line in answer.body.splitlines())
        assert "job_id" in first
        assert last["problem"]["field"] == "line"


# -- slowly -------------------------------------------------------------------------------


@run_async
async def test_a_body_that_comes_too_slowly_is_given_up(tmp_path: Path) -> None:
    async with house(tmp_path, body_grace=0.1, min_rate=1_000_000) as one:
        head = one.head(
            "POST", "/v1/jobs", "Content-Type: application/json", "Content-Length: 1000"
        )
        status, problem = parsed(await one.raw(head + b'{"topic":'))
        assert (status, problem["code"]) == (408, "SLOW")
        await still_answers(one)


async def status_of_a_dripping_body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bytes:
    """The first line of the answer to a body that comes byte by byte and never ends."""

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    dripping.cancel()
    writer.close()
    return answer.splitlines()[0]


@run_async
async def test_a_body_that_drips_is_given_up_however_long_it_lasts(tmp_path: Path) -> None:
    async with house(tmp_path, body_grace=0.2, min_rate=1000) as one:
        reader, writer = await one.connect()
        writer.write(
            one.head("POST", "/v1/jobs", "Content-Type: application/json", "Content-Length: 100000")
        )
        assert b" 408 " in await status_of_a_dripping_body(reader, writer)


@run_async
async def test_an_upload_that_drips_is_given_up(tmp_path: Path) -> None:
    async with house(tmp_path, body_grace=0.2, min_rate=1000) as one:
        reader, writer = await one.connect()
        form = "Content-Type: multipart/form-data; boundary=b"
        writer.write(one.head("POST", "/v1/files", form, "Content-Length: 100000"))
        writer.write(b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n')
        assert b" 408 " in await status_of_a_dripping_body(reader, writer)


@run_async
async def test_a_form_with_an_endless_header_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path) as one:

        async def endless() -> Any:
            yield b"--b\r\nContent-Disposition: form-data; name="
            for _ in range(1000):
                yield b"x" * 10_000

        form = {"Content-Type": "multipart/form-data; boundary=b"}
        answer = await one.call("POST", "/v1/files", data=endless(), headers=form)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json")
        await still_answers(one)


@run_async
async def test_a_head_that_comes_too_slowly_is_given_up(tmp_path: Path) -> None:
    async with house(tmp_path, head_timeout=0.2) as one:
        status, problem = parsed(await one.raw(b"GET /healthz HTTP/1.1\r\nHost: local"))
        assert (status, problem["code"]) == (408, "SLOW")
        assert await one.raw(b"") == b""
        assert parsed(await one.raw(b"\r\n\r\n"))[0] == 408


@run_async
async def test_a_connection_may_idle_only_so_long(tmp_path: Path) -> None:
    async with house(tmp_path, head_timeout=0.2, keep_alive=0.2) as one:
        said = await one.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 200 OK")
        trickle = await one.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /h")
        assert b"HTTP/1.1 408" in trickle


@run_async
async def test_a_head_without_an_end_is_refused(tmp_path: Path) -> None:
    async with house(tmp_path, max_head=10_000) as one:
        raw = await one.raw(b"GET / HTTP/1.1\r\nX-Long: " + b"a" * 20_000)
        assert parsed(raw)[0] == 431


# -- HTTP itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX\x00: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
@run_async
async def test_what_is_not_clean_http_is_refused(data: bytes, tmp_path: Path) -> None:
    async with house(tmp_path, head_timeout=1.0) as one:
        raw = await one.raw(data)
        assert raw.startswith(b"HTTP/1.1 400"), raw
        await still_answers(one)


@run_async
async def test_a_request_for_an_upgrade_is_answered_and_the_connection_closed(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as one:
        raw = await one.raw(
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\n\r\nrubbish"
        )
        assert raw.startswith(b"HTTP/1.1 200")


@run_async
async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        get = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        raw = await one.raw(get % b"healthz" + get % b"nothing" + last)
        assert re.findall(rb"HTTP/1.1 (\d+)", raw) == [b"200", b"404", b"200"]


@run_async
async def test_a_client_that_asks_first_is_told_to_send_its_body(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        reader, writer = await one.connect()
        body = b'{"topic": "job.text.shout"}'
        said = ("Content-Type: application/json", f"Content-Length: {len(body)}")
        writer.write(one.head("POST", "/v1/jobs", *said, "Expect: 100-Continue"))
        assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 100 Continue\r\n"
        writer.write(body)
        assert b"HTTP/1.1 201" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n{"), 10)


@run_async
async def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        for path in (
            "/v1",
            "/v1/jobs/",
            "/v2/jobs",
            "/v1//jobs",
            "/v1/jobs/a/b/c",
            "/V1/jobs",
        ):
            answer = await one.call("GET", path)
            assert (answer.status, answer.json["code"]) == (404, "NOT_FOUND")
        wrong = await one.call("DELETE", "/v1/jobs")
        assert (wrong.status, wrong.headers["Allow"]) == (405, "GET, HEAD, OPTIONS, POST")
        streams = await one.call("HEAD", "/v1/stream")
        assert (streams.status, streams.headers["Allow"]) == (405, "GET, OPTIONS")
        options = await one.call("OPTIONS", "/v1/jobs", token="")
        assert (options.status, options.headers["Allow"]) == (204, "GET, HEAD, OPTIONS, POST")
        assert not [name for name in options.headers if name.lower().startswith("access-control")]
        head = await one.call("HEAD", "/v1/status")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["Content-Length"]) > 0


@run_async
async def test_an_error_that_nobody_foresaw_tells_nothing_but_a_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with house(tmp_path) as one:

        async def broken(*_: Any) -> Any:
            raise RuntimeError("the secret is 42")

        one.engine.store.tally = broken  # type: ignore[assignment, method-assign]
        with caplog.at_level(logging.ERROR):
            answer = await one.call("GET", "/v1/status")
        assert (answer.status, answer.json["code"]) == (500, "INTERNAL")
        assert b"42" not in answer.body.replace(answer.json["incident"].encode(), b"")
        logged = [record for record in caplog.records if record.name == "penstock.api.problems"]
        assert answer.json["incident"] in logged[0].getMessage()


# -- too many -----------------------------------------------------------------------------


@run_async
async def test_a_key_that_asks_too_fast_is_told_when_to_come_back(tmp_path: Path) -> None:
    async with house(tmp_path, rate=1.0, burst=3) as one:
        answers = [await one.call("GET", "/v1/status") for _ in range(6)]
        assert [answer.status for answer in answers[:3]] == [200, 200, 200]
        assert answers[-1].status == 429
        assert answers[-1].headers["Retry-After"] == "1"
        other = await one.key("other", KeyRole.SUBMIT)
        assert (await one.call("GET", "/v1/status", token=other)).status == 200
        assert (await one.call("GET", "/healthz")).status == 200


async def open_stream(one: House, token: str = "") -> tuple[bytes, asyncio.StreamWriter]:
    reader, writer = await one.connect()
    writer.write(one.head("GET", "/v1/stream", token=token or None))
    return (await asyncio.wait_for(reader.readline(), 20)), writer


@run_async
async def test_streams_beyond_the_limit_are_refused_and_come_free_again(tmp_path: Path) -> None:
    async with house(tmp_path, max_streams=6, max_streams_per_key=4) as one:
        other = await one.key("other", KeyRole.SUBMIT)
        mine = [await open_stream(one) for _ in range(8)]
        theirs = [await open_stream(one, other) for _ in range(4)]
        assert [said.split()[1] for said, _ in mine] == [b"200"] * 4 + [b"429"] * 4
        assert [said.split()[1] for said, _ in theirs] == [b"200"] * 2 + [b"429"] * 2
        for _, writer in mine[:4]:
            writer.close()
        while True:
            said, writer = await open_stream(one)
            writer.close()
            if said.split()[1] == b"200":
                break
        for _, writer in [*mine, *theirs]:
            writer.close()


@pytest.mark.parametrize("kind", ["events", "wait"])
@run_async
async def test_one_key_leaves_streams_and_waits_to_the_others(kind: str, tmp_path: Path) -> None:
    async with house(tmp_path, max_streams=8, max_waiting=8) as one:
        mine = await one.key("mine", KeyRole.SUBMIT)
        job = await one.submit("job.text.slow")
        path = "/v1/stream" if kind == "events" else f"/v1/jobs/{job['job_id']}/wait?timeout=60"
        taken = [await one.connect() for _ in range(20)]
        for _, writer in taken:
            writer.write(one.head("GET", path, token=mine))
        answers = [asyncio.create_task(reader.readline()) for reader, _ in taken]
        await soon(lambda: sum(it.done() and b" 429 " in it.result() for it in answers) >= 12)
        answer = await one.call("GET", f"/v1/jobs/{job['job_id']}/wait?timeout=0.01")
        assert answer.status == 202
        said, writer = await open_stream(one)
        assert b" 200 " in said
        writer.close()
        for told in answers:
            told.cancel()


@run_async
async def test_few_large_bodies_of_one_key_are_in_memory_at_a_time(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        mine = await one.key("mine", KeyRole.SUBMIT)
        part = bytes(30 << 20)  # more than the sockets hold between them

        async def send() -> asyncio.StreamWriter:
            _, writer = await one.connect()
            length = f"Content-Length: {len(part) + 1}"
            writer.write(one.head("POST", "/v1/blobs", length, token=mine))
            writer.write(part)
            await writer.drain()
            await soon(lambda: not writer.transport.get_write_buffer_size())
            return writer

        sending = [asyncio.create_task(send()) for _ in range(10)]
        await soon(lambda: sum(task.done() for task in sending) >= 8)
        await asyncio.sleep(0.3)
        taken = [task for task in sending if task.done()]
        assert len(taken) == 8
        put = await one.call("POST", "/v1/blobs", data=io.BytesIO(part[: 1 << 20]))
        assert put.status == 201  # another key
        assert (await one.call("GET", "/v1/jobs", token=mine)).status == 200
        taken[0].result().write(b"x")  # it is complete, and makes room
        await soon(lambda: sum(task.done() for task in sending) >= 9)
        for task in sending:
            task.cancel()


@run_async
async def test_connections_beyond_the_limit_are_turned_away(tmp_path: Path) -> None:
    async with house(tmp_path, max_connections=5) as one:
        held = [await one.connect() for _ in range(5)]
        await asyncio.sleep(0)
        status, problem = parsed(await one.raw(b""))
        assert (status, problem["code"]) == (503, "TOO_MANY_CONNECTIONS")
        for _, writer in held:
            writer.close()
        while (await one.raw(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n"))[9:12] != b"200":
            pass


@contextmanager
def many_files(wanted: int) -> Iterator[int]:
    """As many open files as may be had, up to `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield max(soft, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@run_async
async def test_ten_thousand_streams_are_attempted_and_the_engine_goes_on(tmp_path: Path) -> None:
    with many_files(21_000) as files:
        count = min(10_000, (files - 200) // 2)
        async with house(
            tmp_path, max_streams=500, max_streams_per_key=500, max_connections=count + 100
        ) as one:
            opened: list[tuple[bytes, asyncio.StreamWriter]] = []
            for start in range(0, count, 200):
                batch = [open_stream(one) for _ in range(start, min(count, start + 200))]
                opened += await asyncio.gather(*batch)
            statuses = [said.split()[1] for said, _ in opened]
            assert statuses.count(b"200") == 500
            assert statuses.count(b"429") == count - 500
            job = await one.submit()
            done = await one.call("GET", f"/v1/jobs/{job['job_id']}/wait?timeout=20")
            assert done.json["state"] == "SUCCEEDED"
            for _, writer in opened:
                writer.close()
