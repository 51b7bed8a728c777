"""Submissions that a container worker refuses: it says what is wrong, and nothing is stored."""

from __future__ import annotations

import json
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
from tests.support.container.serving import Served, a_job, new_id
from tests.support.waiting import eventually
from tests.workloads.container.live.conftest import INPUTS, MIB

from penstock.testing.images import IMAGE


def refused(served: Served, body: Any, code: str, field: str = "", status: int = 400) -> None:
    """It is answered with this code, and nothing of it is there."""
    before = served.ids()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    told, answer = served.send("POST", "/jobs", data)
    said = json.loads(answer)
    assert (told, said["accepted"], said["state"]) == (status, False, "rejected"), said
    assert (said["error"]["code"], said["error"].get("field", "")) == (code, field)
    assert b"Traceback" not in answer
    assert served.ids() == before
    given = body.get("job_id") if isinstance(body, dict) else None
    if isinstance(given, str) and given and status != 409:
        assert served.ask("GET", f"/jobs/{quote(given, safe='')}")[0] == 404


@pytest.mark.seed("003", "10.1")
@pytest.mark.parametrize(
    "image",
    [
        *("-v", "-v/:/host", "--volume=/:/host", "--privileged", "--mount=type=bind,src=/,dst=/h"),
        *(
            "--",
            "-",
            " --privileged",
            f"{IMAGE} --privileged",
            f"{IMAGE}\n-v",
            f"{IMAGE}\0",
            "a\tb",
        ),
        *("../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "a" * 256, "Upper:1", ":latest"),
        *("a:b:c", "a@sha256:12", "a//b", "$(id)", "`id`", ";id", "a|b", "größe:1"),
    ],
)
def test_an_image_that_is_no_name_of_one_is_refused_and_no_option(
    served: Served, image: str
) -> None:
    job = a_job(new_id(), IMAGE, "cat", "/host/etc/passwd", image=image)
    refused(served, job, "INVALID_IMAGE", "runtime.image")


def test_words_of_a_command_are_never_options(served: Served, mark: str) -> None:
    words = ("--privileged", "-v", "/:/host", "--", "$(id)", "a b", "", "*", "'", '"', "\n", mark)
    record = served.run(new_id(), "sh", "-c", 'for w; do echo "<$w>"; done', "sh", *words)
    assert record["stdout"] == "".join(f"<{word}>\n" for word in words)


LIMITS = (
    *("memory_mb", "max_runtime_seconds", "cpus", "pids"),
    *("max_output_bytes", "tmp_mb", "max_artifact_bytes", "pull_seconds"),
)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_number_that_is_none_or_out_of_range_is_refused_by_name(
    served: Served, limit: str
) -> None:
    field = f"runtime.limits.{limit}"
    value: Any
    for value in (0, -1, -0.5, True, False, "1", "", [], [1], {}):
        refused(served, a_job(new_id(), "true", limits={limit: value}), "INVALID_FIELD", field)
    for value in (1e9 * MIB, 2**53, 1e308):
        refused(served, a_job(new_id(), "true", limits={limit: value}), "NOT_ALLOWED", field)
    for raw in (b"NaN", b"Infinity", b"-Infinity", b"01", b"0x10", b"1.", b"+1"):
        refused(served, raw_limit(limit, raw), "INVALID_BODY")
    refused(served, raw_limit(limit, b"1e400"), "INVALID_FIELD", field)
    refused(served, raw_limit(limit, b"9" * 5000), "INVALID_FIELD", field)


def raw_limit(limit: str, raw: bytes) -> bytes:
    job = json.dumps(a_job(new_id(), "true", limits={limit: "here"})).encode()
    return job.replace(b'"here"', raw)


@pytest.mark.parametrize("env", [[], ["A=1"], "A=1", "", 1, 0, True, False, 1.5])
def test_an_env_that_is_no_map_is_refused(served: Served, env: Any) -> None:
    refused(served, a_job(new_id(), "env", env=env), "INVALID_FIELD", "runtime.env")


@pytest.mark.parametrize(
    ("env", "code", "field"),
    [
        ({"A": {}}, "INVALID_FIELD", "A"),
        ({"A": [1]}, "INVALID_FIELD", "A"),
        ({"A": "b\0c"}, "INVALID_FIELD", "A"),
        ({"": "1"}, "INVALID_FIELD", ""),
        ({"A=B": "1"}, "INVALID_FIELD", "A=B"),
        ({"1A": "1"}, "INVALID_FIELD", "1A"),
        ({"A\0": "1"}, "INVALID_FIELD", "A"),
        ({"A": "b" * 40_000}, "INVALID_FIELD", ""),
        ({"LD_PRELOAD": "/input/evil.so"}, "NOT_ALLOWED", "LD_PRELOAD"),
        ({"PATH": "/input"}, "NOT_ALLOWED", "PATH"),
        ({"http_proxy": "http://1.2.3.4"}, "NOT_ALLOWED", "http_proxy"),
        ({"DOCKER_HOST": "tcp://1.2.3.4"}, "NOT_ALLOWED", "DOCKER_HOST"),
    ],
)
def test_a_variable_that_can_not_be_one_or_may_not_is_refused_by_name(
    served: Served, env: dict[str, Any], code: str, field: str
) -> None:
    status, answer = served.submit(new_id(), "env", env=env)
    assert (status, answer["error"]["code"]) == (400, code)
    assert answer["error"]["field"].startswith("runtime.env")
    assert field in answer["error"]["field"]
    assert served.ask("GET", f"/jobs/{answer['job_id']}")[0] == 404


@pytest.mark.seed("003", "2.3")
@pytest.mark.parametrize("job_id", ["x" * 5000, "x" * 201, "a\0b", "a\nb", "a\x9bb"])
def test_an_id_that_is_too_long_or_has_control_characters_is_refused(
    served: Served, job_id: str
) -> None:
    refused(served, a_job(job_id, "true"), "INVALID_JOB_ID", "job_id")


@pytest.mark.parametrize(
    "job_id",
    ["a/b c", "../../etc/passwd", "/etc/passwd", ".hidden", "--help", "größe", "🚰", "$(id);id"],
)
def test_an_id_of_any_other_characters_is_a_name_and_nothing_else(
    served: Served, job_id: str
) -> None:
    assert served.ask("POST", "/jobs", a_job(job_id, "echo", "it ran"))[0] == 202
    found = eventually(lambda: ended(served, job_id), f"{job_id} ends")
    assert (found["job_id"], found["state"], found["stdout"]) == (job_id, "finished", "it ran\n")


def ended(served: Served, job_id: str) -> Any:
    status, answer = served.ask("GET", f"/jobs/{quote(job_id, safe='')}")
    assert status == 200
    return answer if answer["state"] in ("finished", "failed") else None


@pytest.mark.parametrize("job_id", ["", None, 7, True, [], {}, ["a"], 1e300])
def test_an_id_that_is_no_text_is_missing_and_repeated_as_it_was(
    served: Served, job_id: Any
) -> None:
    refused(served, a_job(job_id, "true"), "MISSING_JOB_ID")
    assert served.ask("POST", "/jobs", a_job(job_id, "true"))[1]["job_id"] == job_id


def test_ids_in_paths_lead_nowhere_but_to_jobs(served: Served) -> None:
    for path in ("..%2F..%2Fetc%2Fshadow", "%00", "x" * 5000, "q%2Fz", "%ff", "..", "%2e%2e"):
        for rest in ("", "/logs", "/artifacts", "/artifacts/x"):
            status, answer = served.send("GET", f"/jobs/{path}{rest}")
            assert status in (400, 404), answer
            assert json.loads(answer)
        assert served.send("DELETE", f"/jobs/{path}")[0] in (400, 404, 405)


def text(path: Any, **others: Any) -> dict[str, Any]:
    return {"path": path, "text": "x", **others}


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        *[
            ([text(path)], "inputs[0].path")
            for path in (
                *("../x", "a/../../x", "/etc/cron.d/x", "..", ".", "", "a/..", "~/x/../../..", "/"),
                *("C:\\x", "\\\\host\\x", "a\\..\\b", "a\0b", "a\nb", "a" * 5000, 7, None),
                list[str](),
            )
        ],
        ([text("a"), text("a")], "inputs[1].path"),
        ([text("a"), text("a/b")], "inputs[1].path"),
        ([text("a"), text("./a")], "inputs[1].path"),
        ([text("a", base64="eA==")], "inputs[0]"),
        ([{"path": "a"}], "inputs[0]"),
        ([{"path": "a", "base64": "?"}], "inputs[0].base64"),
        ([text("a", archive="rar")], "inputs[0].archive"),
        (["a"], "inputs[0]"),
        ("a", "inputs"),
        ({"a": "b"}, "inputs"),
    ],
)
def test_an_input_that_would_lie_elsewhere_or_is_none_is_refused(
    served: Served, inputs: Any, field: str
) -> None:
    refused(served, a_job(new_id(), "true", inputs=inputs), "INVALID_FIELD", field)


def test_inputs_beyond_what_the_worker_allows_are_refused(served: Served) -> None:
    many = [text(f"f{n}") for n in range(INPUTS["max_files"] + 1)]
    refused(served, a_job(new_id(), "true", inputs=many), "NOT_ALLOWED", "inputs")
    large = [{"path": "a", "text": "x" * (INPUTS["max_file_bytes"] + 1)}]
    refused(served, a_job(new_id(), "true", inputs=large), "NOT_ALLOWED", "inputs[0].text")


@pytest.mark.seed("003", "2.11")
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"{", b"}", b"nul", b"null", b"7", b'"text"', b"true", b"{'a': 1}", b"{a: 1}"),
        *(b'{"a": 1,}', b'{"a": 1} {}', b'{"a": 1}x', b'{"a": 1, "a": 2}', b'{"a": {"b":1,"b":2}}'),
        *(
            b"\xef\xbb\xbf{}",
            b'{"a": "\xff"}',
            "{}".encode("utf-16"),
            b'{"a": NaN}',
            b'{"a": "\n"}',
        ),
        *(b"[" * 100_000, b'{"a":' * 50_000, b"[" * 70 + b"]" * 70, b"<html>", b"\0" * 100),
    ],
)
def test_a_body_that_is_no_clean_json_is_refused(served: Served, body: bytes) -> None:
    refused(served, body, "INVALID_BODY")


def test_a_body_that_is_not_said_to_be_json_counts_as_missing(served: Served) -> None:
    data = json.dumps(a_job(new_id(), "true")).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"):
        status, answer = served.send("POST", "/jobs", data, kind)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "INVALID_BODY")


def test_a_body_over_the_cap_is_refused_with_files_or_without(served: Served) -> None:
    refused(served, a_job(new_id(), "true", x="x" * MIB), "INVALID_BODY", status=413)
    files = [{"path": f"f{n}", "text": "x" * 3 * MIB} for n in range(3)]
    refused(served, a_job(new_id(), "true", inputs=files), "INVALID_BODY", status=413)
    fits = [{"path": "a", "text": "x" * 2 * MIB}]
    record = served.run(new_id(), "sh", "-c", "wc -c < /input/a", inputs=fits, stdin="none")
    assert record["stdout"] == f"{2 * MIB}\n"


def test_a_body_that_only_says_that_it_is_huge_is_refused_before_it_comes(served: Served) -> None:
    before = served.ids()
    head = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served.connection() as line:
        line.sendall(head + b"Content-Length: 100000000000\r\n\r\n{")
        assert line.recv(100).startswith(b"HTTP/1.1 413 ")
    with served.connection() as line:
        line.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        assert poured(line, 1000) < 1000
    assert served.ids() == before


def poured(line: socket.socket, most: int) -> int:
    """Pieces of 64 KiB that could be sent until there was an answer, or an end."""
    for n in range(most):
        if select.select([line], [], [], 0)[0]:
            return n
        try:
            line.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        except OSError:
            return n
    return most


@pytest.mark.seed("003", "2.16")
def test_an_id_is_taken_once_however_many_want_it_at_once(served: Served, mark: str) -> None:
    name = new_id()
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: served.submit(name, "echo", str(n), mark), range(16)))
    assert sorted(status for status, _ in answers) == [202] + [409] * 15
    assert {answer["error"]["code"] for status, answer in answers if status == 409} == {
        "JOB_ID_ALREADY_EXISTS"
    }
    (winner,) = (n for n, (status, _) in enumerate(answers) if status == 202)
    first = served.ended(name)
    assert first["stdout"] == f"{winner} {mark}\n"
    refused(served, a_job(name, "echo", "again"), "JOB_ID_ALREADY_EXISTS", "", 409)
    assert served.ask("GET", f"/jobs/{name}")[1] == first


def test_fields_that_nobody_knows_are_kept_and_reach_the_container(
    served: Served, mark: str
) -> None:
    unknown = {"deep": [{"er": [None, True, 1.5, "größe 🚰", ""]}], "__proto__": {"a": 1}, "": "e"}
    job = a_job(new_id(), "cat", unknown=unknown, retries="many", webhook={"url": mark})
    for name, value in {"privileged": True, "volumes": ["/:/host"], "x": mark}.items():
        asked = {**job, "runtime": {**job["runtime"], name: value}}
        status, answer = served.ask("POST", "/jobs", asked)
        assert (status, answer["error"]["field"]) == (400, f"runtime.{name}")
    assert served.ask("POST", "/jobs", job)[0] == 202
    record = served.ended(job["job_id"])
    assert record["stdout"] == json.dumps(job, separators=(",", ":"), ensure_ascii=False)
    assert record["stderr"] == ""
