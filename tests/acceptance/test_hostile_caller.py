"""What somebody with a key that may only submit can do to an engine, and to another tenant.

Each attack is tried over HTTP against a real engine; after each, the same engine process serves
the other tenant as before.
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.acceptance.front_door import PATIENCE, House

DEEP = b"[" * 100_000 + b"]" * 100_000
ESCAPES = "\x1b]0;owned\x07\x1b[2K\x1b[1A\x9b31m\u202e"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("hostile"), 'default = "allow"')
    made.environment["PYTHONPATH"] = str(Path(__file__).parents[1] / "support" / "acceptance")
    made.environment["PENSTOCK_HTTP__MAX_STREAMS"] = "8"
    try:
        made.open("hostile_jobs:app")
        made.let_in(
            mallory="submit @red",
            reader="approve @red",
            victor="submit @blue",
            root="admin",
        )
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def the_other_tenant_is_served_afterwards(engine: House) -> Iterator[None]:
    yield
    assert engine.engine.poll() is None, engine.log_of(engine.engine)
    assert served(engine)


def served(engine: House) -> bool:
    """Whether the other tenant's job is accepted and runs."""
    victor = engine["victor"]
    return bool(victor.end(victor.submit("job.calm.add", {"a": 1}))["state"] == "SUCCEEDED")


def post(engine: House, path: str, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
    """What mallory is answered."""
    host = engine.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE * 2)
    try:
        headers = {**engine["mallory"].headers, "Content-Type": kind}
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# -- nested values ------------------------------------------------------------------------

BODIES = {
    "/v1/jobs": b'{"topic":"job.open.any","input":{"value":%b}}',
    "/v1/jobs/batch": b'{"jobs":[{"topic":"job.open.any","input":{"value":%b}}]}',
    "/v1/pipelines/tiny/runs": b'{"config":{"value":%b}}',
    "/v1/chat/completions": b'{"model":"m","messages":%b}',
    "/v1/batches": b'{"metadata":%b}',
}


@pytest.mark.parametrize("path", BODIES)
def test_a_nested_body_is_refused(engine: House, path: str) -> None:
    for deep in (DEEP, DEEP[:100_000], b'{"a":' * 100_000):
        status, _ = post(engine, path, BODIES[path] % deep)
        assert status == 400


def test_a_nested_line_of_a_stream_is_refused_alone(engine: House) -> None:
    line = BODIES["/v1/jobs"] % DEEP + b'\n{"topic":"job.calm.add","input":{"a":1}}\n'
    status, said = post(engine, "/v1/jobs/stream", line, "application/x-ndjson")
    first, second = map(json.loads, said.splitlines())
    assert (status, first["problem"]["code"]) == (200, "TOO_DEEP")
    assert second["job_id"]


TOPICS = ("job.open.any", "job.open.named", "job.calm.add", "job.pipeline.tiny")


@pytest.mark.parametrize("topic", TOPICS)
def test_a_nested_input_is_refused_or_fails_its_own_job_only(engine: House, topic: str) -> None:
    mallory = engine["mallory"]
    inner = b'{"value":' + b"[" * 5900 + b"]" * 5900 + b"}"
    pointers = ["data:application/json;base64," + base64.b64encode(inner).decode()]
    status, said = post(engine, "/v1/blobs", b'{"value":' + DEEP + b"}")
    assert status == 201
    pointers.append(json.loads(said)["uri"])
    for pointer in pointers:
        body = {"topic": topic, "context_ptr": pointer}
        status, _, answer = mallory.exchange("POST", "/v1/jobs", body)
        assert status in (201, 422), answer
        if status == 201:
            assert mallory.end(answer["job_id"])["state"] == "FAILED"


# -- time ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20_000, 8_000_000])
def test_a_body_of_escaped_quotes_holds_nobody_up(engine: House, size: int) -> None:
    body = b'{"topic":"job.open.any","input":[' + b"[]," * 65 + b'"' + b'\\"' * (size // 2)
    status, _ = post(engine, "/v1/jobs", body)
    assert status == 400


def test_others_are_served_while_large_bodies_are_read(engine: House) -> None:
    body = b'{"topic":"job.open.any","input":{"value":[' + b"[1]," * 400_000 + b"0]}}"
    with ThreadPoolExecutor(3) as pool:
        attacks = [pool.submit(post, engine, "/v1/jobs", body) for _ in range(3)]
        done_meanwhile = 0
        while not all(attack.done() for attack in attacks):
            done_meanwhile += served(engine)
    assert {attack.result()[0] for attack in attacks} == {201}
    assert done_meanwhile > 1


# -- what the key may not do --------------------------------------------------------------


@pytest.mark.parametrize(("token", "status"), [("reader", b" 403 "), ("nobody", b" 401 ")])
def test_a_body_that_may_not_be_sent_is_not_waited_for(
    engine: House, token: str, status: bytes
) -> None:
    key = engine[token].token if token != "nobody" else "nonsense"
    host, port = engine.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        head = (
            f"POST /v1/blobs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: text/plain\r\nContent-Length: 60000000\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert status in connection.recv(100)


def test_streams_are_left_to_others(engine: House) -> None:
    host, port = engine.url.removeprefix("http://").split(":")
    answers: list[bytes] = []
    with ExitStack() as stack:
        for name in ("mallory",) * 10 + ("victor",):
            connection = socket.create_connection((host, int(port)), timeout=PATIENCE)
            stack.enter_context(connection)
            key = engine[name].token
            head = f"GET /v1/stream HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\r\n"
            connection.sendall(head.encode())
            answers.append(connection.recv(100).split()[1])
    assert answers == [b"200"] * 2 + [b"429"] * 8 + [b"200"]


# -- another tenant's things --------------------------------------------------------------


def test_what_belongs_to_another_tenant_is_answered_as_unknown(engine: House) -> None:
    mallory, victor = engine["mallory"], engine["victor"]
    secret = "x" * 5000 + "the secret"
    theirs = victor.submit("job.open.any", {"value": secret}, labels={"who": "victor"})
    pointer = victor.end(theirs)["request"]["context_ptr"]
    assert pointer.startswith("blob:")
    nothing = {"id": "nobody-has-this", "blob": "blob:sha256-" + "0" * 64}

    def answers(method: str, path: str, body: dict[str, Any] | None = None) -> None:
        """The same for what is theirs and for what is not there."""
        said = []
        for job_id, blob in ((theirs, pointer), (nothing["id"], nothing["blob"])):
            asked = json.loads(json.dumps(body).replace("JOB", job_id).replace("BLOB", blob))
            filled = path.replace("JOB", job_id).replace("BLOB", blob.replace(":", "%3A"))
            status, _, answer = mallory.exchange(method, filled, asked)
            text = json.dumps(answer).replace(job_id, "JOB").replace(blob, "BLOB")
            assert "secret" not in text
            assert "victor" not in text
            said.append((status, text if status >= 400 else ""))
        assert said[0] == said[1], (method, path, body)

    for path in ("", "/result", "/history", "/why", "/logs", "/wait?timeout=0.01"):
        answers("GET", f"/v1/jobs/JOB{path}")
    answers("POST", "/v1/jobs/JOB/cancel", {})
    answers("POST", "/v1/jobs/JOB/retry", {})
    answers("GET", "/v1/runs/JOB")
    answers("GET", "/v1/blobs/BLOB")
    answers("GET", "/v1/jobs?parent_job_id=JOB")
    given = {"topic": "job.open.any", "input": {}}
    answers("POST", "/v1/jobs", {**given, "after": ["JOB"]})
    answers("POST", "/v1/jobs", {**given, "parent_job_id": "JOB"})
    answers("POST", "/v1/jobs", {"topic": "job.open.any", "context_ptr": "BLOB"})
    answers("POST", "/v1/pipelines/tiny/runs", {"config": {}, "retry_of": "JOB"})
    assert mallory.ask("GET", "/v1/jobs?tenant=blue")["jobs"] == []
    taken = mallory.exchange("POST", "/v1/jobs", {**given, "job_id": theirs})
    assert taken[0] == 409
    assert "secret" not in json.dumps(taken[2])


# -- what others read ---------------------------------------------------------------------


def test_escape_sequences_are_stored_and_shown_as_harmless_text(engine: House) -> None:
    mallory = engine["mallory"]
    job_id = mallory.submit(
        "job.open.fail", {"text": f"boom {ESCAPES}"}, labels={"a": "\x9b\u202e"}
    )
    assert mallory.end(job_id)["result"]["error_message"].endswith(f"boom {ESCAPES}")
    for words in (("ps",), ("show", job_id), ("job", "list", "--dead")):
        said = engine["root"].cli(*words)
        assert "boom" in said
        assert not set(said) & set("\x1b\x07\x9b\u202e")
