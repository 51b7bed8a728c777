"""A submission is checked in the protocol's order and answered with the protocol's codes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.container.container_submissions import (
    BUILDING,
    CONFIG,
    DIGEST,
    FACTS,
    accept,
    building,
    code_and_field,
    job,
    refuse,
    runtime,
)
from tests.support.rows import every

from penstock.workloads.container.config import (
    ImageRules,
    InputRules,
    WorkerConfig,
)
from penstock.workloads.container.job import ErrorCode, Mode, Priority, Rejected, StdinMode
from penstock.workloads.container.protocol.submission import (
    body_limit,
    check_job,
    read_job,
)

# --- the protocol's own checks ---


@every(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"1",
        b'"text"',
        b"true",
        b"{",
        b"{}x",
        b"{'a':1}",
        b'{"a":1,}',
        b"\xef\xbb\xbf{}",
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":01}',
        b'{"a":+1}',
        b'{"a":1.}',
        b'{"a":"\n"}',
        b'{"a":1,"a":2}',
        b'{"x":[{"a":1,"\\u0061":2}]}',
        b'{"a":' * 65 + b"1" + b"}" * 65,
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_body_that_is_no_clean_json_object_is_an_invalid_body(body: bytes) -> None:
    refused = refuse(body)
    assert (refused.error.code, refused.status, refused.job_id) == (
        ErrorCode.INVALID_BODY,
        400,
        None,
    )


def test_a_key_that_comes_twice_is_named() -> None:
    assert "'job_id'" in refuse(b'{"job_id":"a","job_id":"b"}').error.message


@pytest.mark.parametrize("body", [b"[]", b"[1]", b"{}", b'[{"protocol_version":1}]'])
def test_an_array_is_an_object_without_a_protocol_version(body: bytes) -> None:
    refused = refuse(body)
    assert refused.error.code == ErrorCode.UNSUPPORTED_PROTOCOL_VERSION
    assert refused.job_id is None


@pytest.mark.seed("003", "2.2")
@pytest.mark.parametrize("version", ["1", True, 2, 0, 1.5, None, [1], {}, ..., -1])
def test_a_protocol_version_that_is_not_the_number_1_is_refused(version: Any) -> None:
    refused = refuse(job(protocol_version=version))
    assert refused.error.code == ErrorCode.UNSUPPORTED_PROTOCOL_VERSION
    assert refused.job_id == "job-1"


@pytest.mark.parametrize("version", [b"1", b"1.0", b"1e0", b"10e-1"])
def test_every_way_to_write_the_number_1_is_a_protocol_version(version: bytes) -> None:
    body = (
        json.dumps(job())
        .encode()
        .replace(b'"protocol_version": 1', b'"protocol_version":' + version)
    )
    assert read_job(body, CONFIG).job.job_id == "job-1"


@pytest.mark.parametrize("bad", ["", None, 5, True, ["a"], {"a": "b"}])
def test_an_id_that_is_no_text_is_missing_and_comes_back_as_it_was(bad: Any) -> None:
    refused = refuse(job(job_id=bad))
    assert refused.error.code == ErrorCode.MISSING_JOB_ID
    assert refused.job_id == bad
    assert type(refused.job_id) is type(bad)


def test_an_absent_id_is_missing_and_comes_back_as_null() -> None:
    refused = refuse(job(job_id=...))
    assert (refused.error.code, refused.job_id) == (ErrorCode.MISSING_JOB_ID, None)


@pytest.mark.parametrize(
    "given", ["a", "Job-1.2_3", "a/b c", "x" * 200, ".a", "../../etc", "größe", "-rf"]
)
def test_an_id_is_any_text_that_can_be_shown(given: str) -> None:
    assert accept(job(job_id=given)).job.job_id == given


@pytest.mark.parametrize("bad", ["x" * 201, "x" * 5000, "a\nb", "a\0", "\ud800", "\x7f"])
def test_an_id_that_can_not_be_shown_is_invalid(bad: str) -> None:
    refused = refuse(job(job_id=bad))
    assert (refused.error.code, refused.error.field) == (ErrorCode.INVALID_JOB_ID, "job_id")
    assert refused.job_id == bad.replace("\ud800", "\ufffd")
    assert len(refused.error.message) < 300


@pytest.mark.parametrize("bad", [..., None, "", "image", 0, 1, True, False])
def test_a_runtime_that_is_no_object_is_missing(bad: Any) -> None:
    assert refuse(job(runtime=bad)).error.code == ErrorCode.MISSING_RUNTIME


@pytest.mark.parametrize(
    "bad",
    [
        *([], ["image"], {}, {"mode": None}, {"mode": "IMAGE"}, {"mode": ["image"]}),
        *({"mode": 1}, {"mode": {"a": 1}}, {"mode": "image "}, {"mode": ""}),
    ],
)
def test_a_mode_that_is_unknown_is_bad_even_of_an_array(bad: Any) -> None:
    assert refuse(job(runtime=bad)).error.code == ErrorCode.BAD_RUNTIME_MODE


def test_build_is_not_supported_unless_it_is_enabled_and_the_engine_can() -> None:
    asked = building("FROM scratch\n")
    unable = replace(FACTS, can_build=False)
    for config, facts in ((CONFIG, FACTS), (CONFIG, unable), (BUILDING, unable)):
        error = refuse(asked, config, facts).error
        assert error.code == ErrorCode.RUNTIME_NOT_SUPPORTED
        assert error.message == "runtime.mode=build not supported on this worker"
    assert accept(asked, BUILDING, FACTS).job.mode is Mode.BUILD


@pytest.mark.parametrize("bad", [..., None, "", 5, True, ["alpine"], {}])
def test_an_image_that_is_no_text_is_missing(bad: Any) -> None:
    assert refuse(runtime(image=bad)).error.code == ErrorCode.MISSING_IMAGE


@pytest.mark.seed("003", "2.4")
@every(
    "bad",
    [
        "-v/:/host",
        "--privileged",
        "--volume=/:/host",
        "-",
        " ",
        "alpine latest",
        "alpine\t",
        "alpine\n",
        " alpine",
        "alpine\0",
        "alpine --privileged",
        "x" * 256,
        "UPPER",
        "alpine:",
        "alpine:-x",
        "alpine@sha256:short",
        "alpine@",
        "a//b",
        "/alpine",
        "alpine/",
        "../alpine",
        "a:b:c",
        "alpine;id",
        "$(id)",
        "größe",
        "\ud800",
        "sha256:abc",
        "0123456789abcdef" * 4,
    ],
)
def test_an_image_that_is_no_name_of_one_never_reaches_an_engine(bad: str) -> None:
    assert code_and_field(runtime(image=bad)) == (ErrorCode.INVALID_IMAGE, "runtime.image")


@pytest.mark.seed("003", "10.1")
def test_the_injected_option_of_the_protocols_own_worker_is_refused() -> None:
    asked = runtime(image="--volume=/:/host", cmd=["alpine", "cat", "/host/etc/shadow"])
    refused = refuse(asked)
    assert (refused.error.code, refused.status, refused.job_id) == (
        ErrorCode.INVALID_IMAGE,
        400,
        "job-1",
    )


@pytest.mark.seed("003", "2.5")
def test_an_image_that_is_not_on_the_list_is_not_allowed() -> None:
    config = WorkerConfig(images=ImageRules(allowed=("alpine:*", "tool:1")))
    for allowed in ("alpine", "alpine:3.18", "tool:1", f"alpine@{DIGEST}"):
        assert accept(runtime(image=allowed), config).job.image == allowed
    for other in ("tool", "tool:2", "alpinex", "x/alpine", DIGEST, f"tool@{DIGEST}"):
        assert refuse(runtime(image=other), config).error.code == ErrorCode.IMAGE_NOT_ALLOWED


def test_what_a_digest_pins_is_decided_when_the_image_is_known() -> None:
    config = WorkerConfig(images=ImageRules(allowed=(f"alpine@{DIGEST}",)))
    assert accept(runtime(image="alpine"), config)
    assert refuse(runtime(image="other"), config).error.code == ErrorCode.IMAGE_NOT_ALLOWED
    by_id = WorkerConfig(images=ImageRules(allowed=(DIGEST,)))
    assert accept(runtime(image="anything"), by_id)


ORDER: list[tuple[str, str]] = [
    (ErrorCode.UNSUPPORTED_PROTOCOL_VERSION, ""),
    (ErrorCode.MISSING_JOB_ID, ""),
    (ErrorCode.MISSING_RUNTIME, ""),
    (ErrorCode.BAD_RUNTIME_MODE, ""),
    (ErrorCode.RUNTIME_NOT_SUPPORTED, ""),
    (ErrorCode.MISSING_IMAGE, ""),
    (ErrorCode.INVALID_IMAGE, "runtime.image"),
    (ErrorCode.INVALID_FIELD, "runtime.cmd"),
    (ErrorCode.NOT_ALLOWED, "runtime.env.PATH"),
    (ErrorCode.IMAGE_NOT_ALLOWED, "runtime.image"),
]


@pytest.mark.seed("003", "2.6")
def test_everything_wrong_at_once_is_answered_one_by_one_in_the_order_of_the_protocol() -> None:
    wrong: dict[str, Any] = {
        "protocol_version": 2,
        "job_id": "",
        "runtime": None,
    }
    bad_runtime: dict[str, Any] = {
        "mode": "compile",
        "image": "",
        "cmd": "ls",
        "env": {"PATH": "/"},
    }
    repairs: list[tuple[dict[str, Any], str, Any]] = [
        (wrong, "protocol_version", 1),
        (wrong, "job_id", "a"),
        (wrong, "runtime", bad_runtime),
        (bad_runtime, "mode", "build"),
        (bad_runtime, "mode", "image"),
        (bad_runtime, "image", "-x"),
        (bad_runtime, "image", "not-listed"),
        (bad_runtime, "cmd", []),
        (bad_runtime, "env", {}),
        (bad_runtime, "image", "listed"),
    ]
    config = WorkerConfig(images=ImageRules(allowed=("listed",)))
    answered = []
    for where, name, value in repairs:
        answered.append(code_and_field(wrong, config))
        where[name] = value
    assert answered == ORDER
    assert accept(wrong, config).job.image == "listed"


def test_every_refusal_is_a_400_that_echoes_the_id() -> None:
    for bad in (runtime(image="-x"), runtime(cmd=1), runtime(user=0), runtime(mode="x")):
        refused = refuse(bad)
        assert (refused.status, refused.job_id) == (400, "job-1")


# --- what is accepted ---


@pytest.mark.seed("003", "10.4")
def test_a_job_of_the_protocols_own_fields_is_complete_and_locked_down() -> None:
    made = accept(job()).job
    assert made.limits == CONFIG.defaults
    assert (made.mode, made.image, made.cmd, made.env) == (Mode.IMAGE, "alpine:latest", (), {})
    assert (made.network, made.user, made.outputs, made.inputs) == (
        "none",
        (65534, 65534),
        False,
        (),
    )
    assert (made.stdin, made.priority, made.labels) == (StdinMode.JOB, Priority.NORMAL, {})
    assert (made.build, made.runtime, made.workdir) == (None, "", "")


@pytest.mark.seed("003", "9.10")
def test_a_job_without_a_task_is_accepted_as_the_protocols_worker_does() -> None:
    assert accept(job(task=...)).job.job_id == "job-1"
    assert accept(job(task="anything")).job.job_id == "job-1"


def test_unknown_fields_are_kept_and_mean_nothing() -> None:
    asked = job(extra={"z": [1, None]}, retries=3) | {"files": "x"}
    accepted = accept(asked)
    assert json.loads(accepted.body) == asked
    assert accepted.job.stdin_bytes == accepted.body
    assert accepted.job == replace(accept(job()).job, stdin_bytes=accepted.body)


@every(
    "given, field",
    [
        ({"privileged": True}, "runtime.privileged"),
        ({"volumes": ["/:/host"]}, "runtime.volumes"),
        ({"limits": {"memroy_mb": 64}}, "runtime.limits.memroy_mb"),
        ({"limits": {"gpus": 1}}, "runtime.limits.gpus"),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_a_hint(given: Any, field: str) -> None:
    assert code_and_field(runtime(**given)) == (ErrorCode.INVALID_FIELD, field)


def test_a_misspelt_limit_is_answered_with_the_right_name() -> None:
    assert "memory_mb" in refuse(runtime(limits={"memroy_mb": 64})).error.message
    assert "did you mean runtime.gpus?" in refuse(runtime(limits={"gpus": 1})).error.message


def test_the_body_is_compact_and_every_number_as_it_was() -> None:
    body = (
        b' { "protocol_version" : 1.0 , "job_id":"a","task":{"payload":{"b":1e3,"2":-0,"1":1e400,'
        b'"s":"\\u00e9\\ud800\\/"}},\n"runtime":{"mode":"image","image":"alpine"} } '
    )
    assert read_job(body, CONFIG).body == (
        b'{"protocol_version":1.0,"job_id":"a","task":{"payload":{"b":1e3,"2":-0,"1":1e400,'
        b'"s":"\xc3\xa9\\ud800/"}},"runtime":{"mode":"image","image":"alpine"}}'
    )


def test_null_means_absent_in_every_optional_field() -> None:
    names = ("cmd", "env", "limits", "stdin", "network", "user", "workdir", "runtime", "build")
    asked = runtime(**dict.fromkeys(names))
    asked |= dict.fromkeys(("inputs", "outputs", "priority", "labels"))
    accepted = accept(asked)
    assert replace(accepted.job, stdin_bytes=b"") == replace(accept(job()).job, stdin_bytes=b"")


def test_a_decoded_value_gives_the_same_job_as_its_bytes() -> None:
    asked = runtime(cmd=["a", 1], env={"A": True}, limits={"cpus": 0.5})
    assert check_job(asked, CONFIG) == accept(asked)


@pytest.mark.parametrize("value", [b"{}", {"a": b"x"}, object(), {"a": {1}}])
def test_a_value_that_json_does_not_have_is_an_invalid_body(value: Any) -> None:
    with pytest.raises(Rejected) as caught:
        check_job(value, CONFIG)
    assert caught.value.error.code == ErrorCode.INVALID_BODY


def test_a_value_that_is_nested_too_deep_is_an_invalid_body() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"job_id": deep}
    with pytest.raises(Rejected) as caught:
        check_job(deep, CONFIG)
    assert caught.value.error.code == ErrorCode.INVALID_BODY


# --- size ---


def test_a_body_over_the_cap_is_answered_413() -> None:
    config = WorkerConfig(max_body_bytes=1000)
    refused = refuse(job(task={"payload": "x" * 1000}), config)
    assert (refused.error.code, refused.status) == (ErrorCode.INVALID_BODY, 413)
    with_files = job(inputs=[{"path": "a", "text": "x" * 1000}])
    assert accept(with_files, config).job.inputs[0].path == "a"
    with_context = building("FROM scratch", context=[{"path": "a", "text": "x" * 1000}])
    assert accept(with_context, replace(BUILDING, max_body_bytes=1000))


def test_files_have_a_cap_of_their_own() -> None:
    config = WorkerConfig(max_body_bytes=100, inputs=InputRules(max_bytes=2000))
    assert body_limit(config) == 2000
    refused = refuse(job(inputs=[{"path": "a", "text": "x" * 2000}]), config)
    assert refused.status == 413
