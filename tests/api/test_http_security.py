"""Who is let in, what is told to whom, and how the server comes and goes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import subprocess
from io import BytesIO
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from tests.support.api.house import House, house
from tests.support.waiting import soon

from penstock.api.about import Health
from penstock.api.operation import PUBLIC
from penstock.api.operations import OPERATIONS
from penstock.api.options import HttpOptions
from penstock.core.errors import Misconfigured
from penstock.ports.engine_api import KeyRole
from penstock.testing.aio import run_async

# -- keys ---------------------------------------------------------------------------------


@run_async
async def test_nothing_but_the_public_operations_answers_without_a_key(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        for operation in OPERATIONS:
            path = re.sub(r"\{\w+(\.\.\.)?\}", "x", operation.path)
            answer = await one.call(operation.method, path, token="")
            if operation.role is PUBLIC:
                open_paths = ("/healthz", "/readyz", "/openapi.json", "/docs", "/sign-in")
                signs_in = operation.method == "POST"  # which needs a key, or a link, in its body
                assert answer.status == (415 if signs_in else 200), operation.path
                is_page = operation.path == "/" or operation.path.startswith("/dashboard")
                assert is_page or operation.path in (*open_paths, "/v1/session")
            else:
                assert answer.status == 401
                if operation.problem is None:
                    assert answer.json["code"] == "NOT_AUTHENTICATED"
                else:
                    assert _says_bad_key(answer.json["error"]), operation.path
                assert answer.headers["WWW-Authenticate"] == 'Bearer realm="penstock"'


def _says_bad_key(error: Any) -> bool:
    """In OpenAI's shape, in Anthropic's, or in Ollama's."""
    if isinstance(error, str):
        return "key" in error
    return error.get("code") == "invalid_api_key" or error.get("type") == "authentication_error"


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", "Basic b3duZXI6eA==", "Bearer nonsense", "Bearer pst_a_b", "\xe4"],
)
@run_async
async def test_a_key_that_is_none_is_refused_and_not_repeated(
    header: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with house(tmp_path) as one:
            answer = await one.call("GET", "/v1/jobs", headers={"Authorization": header})
            assert (answer.status, answer.json["code"]) == (401, "NOT_AUTHENTICATED")
            secret = header.rpartition(" ")[2]
            if secret not in ("", "Bearer"):
                assert secret not in answer.body.decode() + caplog.text


@run_async
async def test_a_token_is_in_no_log_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with house(tmp_path) as one:
            await one.submit()
            refused = await one.call("POST", "/v1/jobs", {"topic": "job.nobody"})
            await one.raw(b"NONSENSE " + one.head("GET", "/v1/jobs"))
            assert one.token not in caplog.text + refused.body.decode()


@run_async
async def test_requests_are_logged_where_that_is_asked_for_without_their_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock.access"):
        async with house(tmp_path) as one:
            await one.call("GET", "/v1/topics")
        assert not [record for record in caplog.records if record.name == "penstock.access"]
        async with house(tmp_path / "logged", access_log=True) as one:
            await one.call("GET", "/v1/topics")
            await one.call("GET", "/v1/jobs/a%0Ab?why=secret", token="pst_x_nobody")
            await one.call("GET", "/healthz", token="")
    lines = [one.getMessage() for one in caplog.records if one.name == "penstock.access"]
    said = [re.sub(r"[\d.]+ ms$", "ms", line) for line in lines]
    assert said == [
        '127.0.0.1 owner "GET /v1/topics" 200 ms',
        '127.0.0.1 - "GET /v1/jobs/a%0Ab" 401 ms',
        '127.0.0.1 - "GET /healthz" 200 ms',
    ]


@run_async
async def test_the_word_bearer_may_be_written_in_any_case(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("GET", "/v1/jobs", headers={"Authorization": f"bEARER {one.token}"})
        assert answer.status == 200


@run_async
async def test_who_lacks_the_role_is_refused_without_sending_a_body(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        keys = {role: await one.key(role.value, role) for role in KeyRole}
        for operation in OPERATIONS:
            role = operation.role
            if operation.body is None or not isinstance(role, KeyRole):
                continue
            other = KeyRole.SUBMIT if role is not KeyRole.SUBMIT else KeyRole.APPROVE
            path = re.sub(r"\{\w+\}", "it", operation.path)
            head = one.head(operation.method, path, "Content-Length: 8000000", token=keys[other])
            reader, writer = await one.connect()
            writer.write(head)  # and no body: who waits for it waits in vain
            assert b" 403 " in await asyncio.wait_for(reader.readline(), 20), operation.path
        audit = (await one.call("GET", "/v1/audit?action=schedule.put")).json["entries"]
        told = [(entry["principal"], entry["subject"], entry["outcome"]) for entry in audit]
        assert told == [("submit", "it", "refused")]


@run_async
async def test_a_large_body_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    """The longest time that the loop stood still is a small part of what reading took."""
    async with house(tmp_path) as one:
        body = b'{"topic":"job.text.shout","input":{"n":[' + b"[1]," * (1 << 19) + b"0]}}"
        gaps: list[float] = []

        async def tick() -> None:
            last = monotonic()
            while True:
                await asyncio.sleep(0.001)
                now = monotonic()
                gaps.append(now - last)
                last = now

        ticking = asyncio.create_task(tick())
        begun = monotonic()
        answer = await one.call(
            "POST", "/v1/jobs", data=BytesIO(body), headers={"Content-Type": "application/json"}
        )
        took = monotonic() - begun
        ticking.cancel()
        assert answer.status == 201
        assert max(gaps) < took / 3


# -- tenants ------------------------------------------------------------------------------


@run_async
async def test_anothers_job_is_answered_exactly_as_one_that_does_not_exist(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        roles = tuple(KeyRole(role) for role in ("submit", "operate", "approve"))
        acme = await one.key("ann", *roles, tenant="acme")
        beta = await one.key("bob", *roles, tenant="beta")
        theirs = (await one.submit("job.text.risky", token=acme, job_id="there-is-one"))["job_id"]
        nobodys = "there-is-non"
        for operation in OPERATIONS:
            if "{job_id}" not in operation.path:
                continue
            answers = []
            for job_id in (theirs, nobodys):
                path = operation.path.replace("{job_id}", job_id)
                answer = await one.call(operation.method, path, token=beta)
                answers.append((answer.status, answer.body.replace(job_id.encode(), b"ID")))
            assert answers[0][0] == 404, operation.path
            assert answers[0] == answers[1]
        assert (await one.call("GET", "/v1/jobs", token=beta)).json["jobs"] == []
        assert (await one.call("GET", "/v1/jobs?tenant=acme", token=beta)).json["jobs"] == []
        wrong = await one.call(
            "POST", "/v1/jobs", {"topic": "job.text.shout", "tenant": "acme"}, token=beta
        )
        assert wrong.status == 403


# -- names and headers --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8700", 421),
        ("localhost.evil.example", 421),
        ("", 421),
    ],
)
@run_async
async def test_on_loopback_only_its_own_names_are_answered_to(
    host: str, status: int, tmp_path: Path
) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("GET", "/healthz", headers={"Host": host})
        assert answer.status == status


@run_async
async def test_names_can_be_allowed_and_none_is_missing(tmp_path: Path) -> None:
    async with house(tmp_path, allowed_hosts=("jobs.example",)) as one:
        for host, status in (("jobs.example:443", 200), ("localhost", 421)):
            answer = await one.call("GET", "/healthz", headers={"Host": host})
            assert answer.status == status
        assert b" 400 " in (await one.raw(_last(b"")))[:20]


def _last(host: bytes) -> bytes:
    return b"GET /healthz HTTP/1.1\r\n%bConnection: close\r\n\r\n" % host


@run_async
async def test_every_answer_has_the_security_headers_and_none_names_the_software(
    tmp_path: Path,
) -> None:
    async with house(tmp_path) as one:
        for path in ("/v1/jobs", "/v1/nothing", "/docs", "/healthz", "/v1/openapi.json"):
            answer = await one.call("GET", path)
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"
            assert answer.headers["Cache-Control"] == "no-store"
            assert "Server" not in answer.headers
            assert "Access-Control-Allow-Origin" not in answer.headers
        raw = await one.raw(b"rubbish\r\n\r\n")
        assert b"nosniff" in raw


@run_async
async def test_the_docs_page_needs_no_script_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        answer = await one.call("GET", "/docs", token="")
        page = answer.body.decode()
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "<script" not in page
        assert re.findall(r'(?:src|href)="(?!#|/openapi\.json")', page) == []
        for operation in OPERATIONS:
            path = operation.path.replace("...}", "}")  # as OpenAPI has it
            assert f"<code>{path}</code>" in page


# -- listening ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "jobs.example"])
def test_listening_beyond_this_machine_without_tls_is_refused(host: str) -> None:
    with pytest.raises(Misconfigured, match="without TLS"):
        HttpOptions(host=host).check()
    HttpOptions(host=host, insecure=True).check()


@run_async
async def test_an_address_in_use_is_told_clearly(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        with pytest.raises(Misconfigured, match=f"can't listen at 127.0.0.1:{one.port}: Address"):
            async with house(tmp_path / "other", port=one.port):
                pass


@run_async
async def test_a_certificate_that_is_none_is_told_clearly(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nonsense")
    with pytest.raises(Misconfigured, match="can't use the certificate"):
        async with house(tmp_path, certfile=wrong, keyfile=wrong):
            pass
    with pytest.raises(Misconfigured, match="there is no file"):
        async with house(tmp_path, certfile=tmp_path / "missing.pem"):
            pass


def make_certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run(
        [*new, "-nodes", "-days", "2", "-keyout", key, "-out", cert, *subject],
        check=True,
        capture_output=True,
    )
    return cert, key


@run_async
async def test_it_speaks_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    async with house(tmp_path, certfile=cert, keyfile=key) as one:
        assert one.url.startswith("https://127.0.0.1:")
        trust = ssl.create_default_context(cafile=str(cert))
        async with one.session.get(f"{one.url}/healthz", ssl=trust) as response:
            assert response.status == 200


# -- coming and going ---------------------------------------------------------------------


@run_async
async def test_readiness_is_what_the_engine_says(tmp_path: Path) -> None:
    health = [Health()]
    async with house(tmp_path, health=lambda: health[0]) as one:
        assert (await one.call("GET", "/readyz", token="")).status == 200
        health[0] = Health(False, ("the disk is full",))
        answer = await one.call("GET", "/readyz", token="")
        assert (answer.status, answer.json["problems"]) == (503, ["the disk is full"])
        assert (await one.call("GET", "/healthz", token="")).status == 200


async def _stream(one: House, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await one.connect()
    writer.write(one.head("GET", path))
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    return reader, writer


@run_async
async def test_closing_ends_streams_cleanly_and_waits_with_503(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        reader, writer = await _stream(one, "/v1/stream")
        job = await one.submit("job.text.slow")
        waiting = asyncio.create_task(one.call("GET", f"/v1/jobs/{job['job_id']}/wait?timeout=60"))
        await soon(lambda: one.server.waiting)
        await one.server.close()
        assert (await asyncio.wait_for(reader.read(-1), 10)).endswith(b"0\r\n\r\n")
        writer.close()
        answer = await waiting
        assert (answer.status, answer.json["code"]) == (503, "ENGINE_UNAVAILABLE")
        with pytest.raises(ConnectionRefusedError):
            await one.connect()


@run_async
async def test_who_stops_waiting_is_not_waited_for(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        job = await one.submit("job.text.slow")
        _, writer = await one.connect()
        writer.write(one.head("GET", f"/v1/jobs/{job['job_id']}/wait?timeout=60"))
        await soon(lambda: one.server.waiting)
        writer.close()
        await soon(lambda: not one.server.waiting)


@run_async
async def test_a_stream_ends_when_its_key_is_revoked(tmp_path: Path) -> None:
    async with house(tmp_path, head_timeout=0.2) as one:
        made = await one.engine.api.keys.create("ann", (KeyRole.SUBMIT,))
        reader, writer = await one.connect()
        writer.write(one.head("GET", "/v1/stream", token=made.token))
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        await one.engine.api.keys.revoke(made.key.key_id)
        await asyncio.wait_for(reader.readuntil(b"\r\n0\r\n\r\n"), 10)


@run_async
async def test_a_connection_serves_each_request_by_its_own_key(tmp_path: Path) -> None:
    async with house(tmp_path) as one:
        made = await one.engine.api.keys.create("ann", (KeyRole.SUBMIT,))
        reader, writer = await one.connect()

        async def status(token: str) -> bytes:
            writer.write(one.head("GET", "/v1/keys", token=token))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            length = re.search(rb"content-length: (\d+)", head)
            assert length is not None
            await reader.readexactly(int(length[1]))
            return head.split()[1]

        assert [await status(one.token), await status(made.token)] == [b"200", b"403"]
        assert [await status(made.token), await status(one.token)] == [b"403", b"200"]
        assert [await status(made.token), await status("nonsense")] == [b"403", b"401"]
        assert await status(made.token) == b"403"
        await one.engine.api.keys.revoke(made.key.key_id)
        assert [await status(made.token), await status(one.token)] == [b"401", b"200"]


@run_async
async def test_a_reader_that_takes_nothing_is_cut_off_and_others_read_on(tmp_path: Path) -> None:
    async with house(tmp_path, stall=0.3) as one:
        lazy, _ = await _stream(one, "/v1/stream")
        lazy._transport.pause_reading()  # type: ignore[attr-defined]
        keen, _ = await _stream(one, "/v1/stream")
        lines = [json.dumps({"topic": "job.text.shout"}) for _ in range(500)]
        body = "\n".join(lines).encode()
        read = 0

        async def take() -> None:
            nonlocal read
            while True:
                read += len(await keen.read(1 << 16))

        taking = asyncio.create_task(take())
        while one.server.streams == 2:
            await one.call(
                "POST",
                "/v1/jobs/stream",
                data=body,
                headers={"Content-Type": "application/x-ndjson"},
            )
        assert one.server.streams == 1
        assert read > 1_000_000
        taking.cancel()
