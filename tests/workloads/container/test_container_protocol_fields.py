"""What a job can ask for, field by field, and what it is told when it can't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.container.container_submissions import (
    CONFIG,
    DIGEST,
    FACTS,
    accept,
    code_and_field,
    job,
    refuse,
    runtime,
)
from tests.support.rows import every

from penstock.workloads.container.config import (
    ImageRules,
    SandboxDefaults,
    WorkerConfig,
)
from penstock.workloads.container.job import ErrorCode, Limits, Priority, Rejected, StdinMode
from penstock.workloads.container.protocol.submission import (
    check_job,
)

# --- cmd and stdin ---


def test_parts_of_a_command_are_texts_or_numbers_as_in_javascript() -> None:
    assert accept(runtime(cmd=["a", "", 1, 1.0, 1.5, 1e21, True, False])).job.cmd == (
        *("a", "", "1", "1", "1.5", "1e+21", "true", "false"),
    )


@every(
    "cmd, field",
    [
        ("ls -l", "runtime.cmd"),
        ({"0": "ls"}, "runtime.cmd"),
        (5, "runtime.cmd"),
        (True, "runtime.cmd"),
        (["ls", None], "runtime.cmd[1]"),
        ([["ls"]], "runtime.cmd[0]"),
        ([{"a": 1}], "runtime.cmd[0]"),
        (["a\0b"], "runtime.cmd[0]"),
        (["a\ud800"], "runtime.cmd[0]"),
        (["x"] * 1025, "runtime.cmd"),
        (["x" * (128 << 10)], "runtime.cmd"),
        (["ü" * (65 << 10)], "runtime.cmd"),
    ],
)
def test_a_command_that_is_no_list_of_texts_is_an_invalid_field(cmd: Any, field: str) -> None:
    assert code_and_field(runtime(cmd=cmd)) == (ErrorCode.INVALID_FIELD, field)


def test_a_number_too_large_for_a_double_is_no_part_of_a_command() -> None:
    body = json.dumps(runtime(cmd=["?"])).encode().replace(b'"?"', b"1e400")
    assert code_and_field(body) == (ErrorCode.INVALID_FIELD, "runtime.cmd[0]")


@pytest.mark.seed("003", "10.8")
@pytest.mark.parametrize(
    ("stdin", "task", "mode", "read"),
    [
        ({"base64": "AP8K"}, None, StdinMode.BYTES, b"\x00\xff\n"),
        ("none", {}, StdinMode.NONE, b""),
        ("payload", {"payload": {"b": 1.0, "1": 2}}, StdinMode.PAYLOAD, b'{"b":1.0,"1":2}'),
        ("payload", {"payload": "as it is\n"}, StdinMode.PAYLOAD, b"as it is\n"),
        ("payload", {"payload": ""}, StdinMode.PAYLOAD, b""),
        ("payload", {"payload": None}, StdinMode.PAYLOAD, b"null"),
        ({"text": "é\0"}, {}, StdinMode.TEXT, b"\xc3\xa9\0"),
        ({"text": ""}, {}, StdinMode.TEXT, b""),
    ],
)
def test_a_container_reads_what_the_job_says(
    stdin: Any, task: Any, mode: StdinMode, read: bytes
) -> None:
    made = accept(runtime(stdin=stdin) | {"task": task}).job
    assert (made.stdin, made.stdin_bytes) == (mode, read)


@pytest.mark.parametrize(
    ("stdin", "task"),
    [
        ("", {}),
        ("all", {}),
        ("text", {}),
        (True, {}),
        (5, {}),
        ([], {}),
        ({}, {}),
        ("payload", {}),
        ("payload", "text"),
        ("payload", None),
    ],
)
def test_a_stdin_that_says_nothing_is_an_invalid_field(stdin: Any, task: Any) -> None:
    asked = runtime(stdin=stdin) | {"task": task}
    assert code_and_field(asked) == (ErrorCode.INVALID_FIELD, "runtime.stdin")


@pytest.mark.parametrize("given", ["A", "****", 7])
def test_a_stdin_that_is_no_base64_is_an_invalid_field(given: Any) -> None:
    asked = runtime(stdin={"base64": given})
    assert code_and_field(asked) == (ErrorCode.INVALID_FIELD, "runtime.stdin.base64")


def test_a_stdin_of_half_a_character_can_not_be_written() -> None:
    assert code_and_field(runtime(stdin={"text": "\ud800"}))[1] == "runtime.stdin.text"
    assert code_and_field(runtime(stdin={"text": 5}))[1] == "runtime.stdin.text"
    asked = runtime(stdin="payload") | {"task": {"payload": "\udc00"}}
    assert code_and_field(asked) == (ErrorCode.INVALID_FIELD, "task.payload")


# --- limits ---

LIMITS = tuple(Limits.__struct_fields__)


@every("name", LIMITS)
@every("bad", [0, -1, -0.0, True, False, "64", "", [], {}, 1e-9, -1e400])
def test_a_limit_that_is_no_sane_number_is_an_invalid_field(name: str, bad: Any) -> None:
    body = json.dumps(runtime(limits={name: bad})).replace("-Infinity", "-1e400").encode()
    assert code_and_field(body) == (ErrorCode.INVALID_FIELD, f"runtime.limits.{name}")


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_that_is_not_finite_is_an_invalid_field(name: str) -> None:
    body = json.dumps(runtime(limits={name: "?"})).encode().replace(b'"?"', b"1e400")
    assert code_and_field(body) == (ErrorCode.INVALID_FIELD, f"runtime.limits.{name}")
    with pytest.raises(Rejected, match="not JSON"):
        check_job(runtime(limits={name: float("nan")}), CONFIG)


@pytest.mark.seed("003", "2.5")
@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_granted_up_to_the_workers_most_and_never_clamped(name: str) -> None:
    most = getattr(CONFIG.max_limits, name)
    assert getattr(accept(runtime(limits={name: most})).job.limits, name) == most
    for more in (most + 1, 2_147_484 * most, 1e300, 10**400):
        body = json.dumps(runtime(limits={name: more})).encode()
        code = ErrorCode.INVALID_FIELD if more == 10**400 else ErrorCode.NOT_ALLOWED
        assert code_and_field(body) == (code, f"runtime.limits.{name}")


def test_memory_below_what_engines_take_is_an_invalid_field() -> None:
    assert accept(runtime(limits={"memory_mb": 6})).job.limits.memory_mb == 6
    assert code_and_field(runtime(limits={"memory_mb": 5.9}))[0] == ErrorCode.INVALID_FIELD


@pytest.mark.seed("003", "9.5")
def test_limits_that_are_not_named_are_the_workers_defaults() -> None:
    config = WorkerConfig(defaults=Limits(memory_mb=32, max_runtime_seconds=7))
    made = accept(runtime(limits={"cpus": 0.5, "pids": None}), config).job
    assert made.limits == Limits(memory_mb=32, max_runtime_seconds=7, cpus=0.5)


@pytest.mark.parametrize("name", ["pids", "max_output_bytes", "max_artifact_bytes"])
def test_a_count_is_a_whole_number(name: str) -> None:
    made = accept(runtime(limits={name: 64.0})).job.limits
    assert getattr(made, name) == 64
    assert isinstance(getattr(made, name), int)
    assert code_and_field(runtime(limits={name: 64.5}))[0] == ErrorCode.INVALID_FIELD


@pytest.mark.parametrize("bad", ["", "64", 5, True, [], [1]])
def test_limits_that_are_no_object_are_an_invalid_field(bad: Any) -> None:
    assert code_and_field(runtime(limits=bad)) == (ErrorCode.INVALID_FIELD, "runtime.limits")


def test_a_job_that_could_never_start_is_refused_rather_than_queued() -> None:
    config = WorkerConfig(memory_mb=512, cpus=1)
    assert accept(runtime(limits={"memory_mb": 512}), config)
    asked = runtime(limits={"memory_mb": 513})
    assert code_and_field(asked, config) == (ErrorCode.NOT_ALLOWED, "runtime.limits.memory_mb")
    small = WorkerConfig(cpus=0.5)
    assert code_and_field(job(), small) == (ErrorCode.NOT_ALLOWED, "runtime.limits.cpus")


# --- the rest of what a job can ask for ---


def test_a_network_is_for_images_that_the_rules_list() -> None:
    config = WorkerConfig(images=ImageRules(network=("net:*", f"pinned@{DIGEST}")))
    assert accept(runtime(image="net", network=True), config).job.network == "bridge"
    assert accept(runtime(image=f"pinned@{DIGEST}", network=True), config).job.network == "bridge"
    assert accept(runtime(network=False), config).job.network == "none"
    for image in ("alpine", "pinned", "x/net"):
        asked = runtime(image=image, network=True)
        assert code_and_field(asked, config) == (ErrorCode.NOT_ALLOWED, "runtime.network")
    bad: Any
    for bad in (1, []):
        assert code_and_field(runtime(network=bad))[0] == ErrorCode.INVALID_FIELD
    for bad in ("host", "container:x", "true"):
        assert code_and_field(runtime(image="net", network=bad), config)[0] == ErrorCode.NOT_ALLOWED


def test_a_network_by_name_is_one_of_the_workers_list() -> None:
    config = WorkerConfig(images=ImageRules(network=("net",)), networks=("lab",))
    assert accept(runtime(image="net", network="lab"), config).job.network == "lab"
    assert code_and_field(runtime(image="net", network=True), config)[0] == ErrorCode.NOT_ALLOWED
    assert code_and_field(runtime(network="lab"), config)[0] == ErrorCode.NOT_ALLOWED


def test_the_owner_of_a_worker_opens_the_sandbox_for_jobs_that_say_nothing() -> None:
    sandbox = SandboxDefaults(user="0", network="bridge", read_only=False)
    made = accept(job(), WorkerConfig(sandbox=sandbox)).job
    assert (made.user, made.network, made.read_only) == ((0, 0), "bridge", False)
    locked = runtime(user=1000, network=False, read_only=True)
    made = accept(locked, WorkerConfig(sandbox=sandbox)).job
    assert (made.user, made.network, made.read_only) == ((1000, 1000), "none", True)


def test_a_writable_root_is_for_images_that_the_rules_list() -> None:
    asked = runtime(read_only=False)
    assert code_and_field(asked) == (ErrorCode.NOT_ALLOWED, "runtime.read_only")
    config = WorkerConfig(images=ImageRules(writable=("alpine",)))
    assert not accept(asked, config).job.read_only


def test_a_mount_is_below_a_folder_of_the_workers_list(tmp_path: Path) -> None:
    models, secret = tmp_path / "models", tmp_path / "secret"
    models.mkdir()
    secret.mkdir()
    (models / "link").symlink_to(secret)
    config = WorkerConfig(mounts=(models,))

    def mounted(source: Path, target: str = "/models") -> Any:
        return runtime(mounts=[{"source": str(source), "target": target}])

    (mount,) = accept(mounted(models / "llama"), config).job.mounts
    assert (mount.source, mount.target, mount.read_only) == (models / "llama", "/models", True)
    for elsewhere in (secret, models / ".." / "secret", models / "link", Path("/")):
        field = "runtime.mounts[0].source"
        assert code_and_field(mounted(elsewhere), config) == (ErrorCode.NOT_ALLOWED, field)
    for taken in ("/", "/proc", "/input", "/tmp/"):
        assert code_and_field(mounted(models, taken), config)[0] == ErrorCode.INVALID_FIELD
    assert code_and_field(mounted(models))[0] == ErrorCode.NOT_ALLOWED


@every("given, gpus", [("all", "all"), (2, "2"), ("0,1", "0,1"), (0, ""), (None, "")])
def test_gpus_are_all_a_number_or_ids(given: Any, gpus: str) -> None:
    assert accept(runtime(gpus=given)).job.gpus == gpus


@every("bad", [-1, True, "a b", [], 1.5])
def test_gpus_that_can_not_be_read_are_an_invalid_field(bad: Any) -> None:
    assert code_and_field(runtime(gpus=bad)) == (ErrorCode.INVALID_FIELD, "runtime.gpus")


@every("asked", ["all", 1, "0,1"])
def test_gpus_are_refused_with_the_reason_where_there_are_none(asked: Any) -> None:
    error = refuse(runtime(gpus=asked), CONFIG, replace(FACTS, no_gpus="there is none")).error
    assert (error.code, error.field) == (ErrorCode.NOT_ALLOWED, "runtime.gpus")
    assert error.message == "runtime.gpus: there is none"
    assert accept(runtime(gpus=asked), CONFIG, replace(FACTS, no_gpus=""))
    assert accept(runtime(gpus=0), CONFIG, FACTS)


def test_a_network_is_refused_where_the_engine_has_none() -> None:
    config = WorkerConfig(images=ImageRules(network=("*",)))
    asked = runtime(network="bridge")
    assert accept(asked, config, FACTS).job.network == "bridge"
    refused = code_and_field(asked, config, replace(FACTS, networks=False))
    assert refused == (ErrorCode.NOT_ALLOWED, "runtime.network")


@pytest.mark.parametrize(
    ("given", "user"),
    [(1000, (1000, 1000)), ("1000:1001", (1000, 1001)), ("7", (7, 7))],
)
def test_a_job_may_choose_its_user(given: Any, user: tuple[int, int]) -> None:
    assert accept(runtime(user=given)).job.user == user


@pytest.mark.parametrize("root", [0, "0", "0:0", "0:5", "5:0", "00:1"])
def test_a_job_is_never_root_unless_the_rules_list_its_image(root: Any) -> None:
    assert code_and_field(runtime(user=root)) == (ErrorCode.NOT_ALLOWED, "runtime.user")
    config = WorkerConfig(images=ImageRules(root=("alpine",)))
    assert 0 in accept(runtime(user=root), config).job.user
    assert code_and_field(runtime(user=root, image="other"), config)[0] == ErrorCode.NOT_ALLOWED


@every(
    "bad",
    ["root", "", ":", "1:", ":1", "1:2:3", "-1", -1, 1.5, True, [], 2**31, "2147483648", "1 "],
)
def test_a_user_that_is_no_number_is_an_invalid_field(bad: Any) -> None:
    assert code_and_field(runtime(user=bad)) == (ErrorCode.INVALID_FIELD, "runtime.user")


def test_an_entrypoint_is_a_list_of_words_of_which_the_first_is_not_empty() -> None:
    assert accept(runtime()).job.entrypoint is None
    assert accept(runtime(entrypoint=None)).job.entrypoint is None
    assert accept(runtime(entrypoint=["sh", "-c", 5])).job.entrypoint == ("sh", "-c", "5")
    assert accept(runtime(entrypoint=[], cmd=["a"])).job.entrypoint == ()
    field = "runtime.entrypoint"
    for bad, where in (
        ("sh", field),
        ([""], f"{field}[0]"),
        (["\0"], f"{field}[0]"),
        ([{}], f"{field}[0]"),
    ):
        assert code_and_field(runtime(entrypoint=bad)) == (ErrorCode.INVALID_FIELD, where)
    assert code_and_field(runtime(entrypoint=[], cmd=[])) == (ErrorCode.INVALID_FIELD, field)
    assert code_and_field(runtime(entrypoint=["x" * (200 << 10)])) == (
        ErrorCode.INVALID_FIELD,
        field,
    )


def test_a_workdir_is_an_absolute_path() -> None:
    assert accept(runtime(workdir="/a//b/./c/")).job.workdir == "/a/b/c"
    assert accept(runtime(workdir="//")).job.workdir == "/"
    for bad in ("", "a", "./a", "/a/../b", "/..", "/a\0", "/a\n", "/" + "x" * 1024, 5, "/\ud800"):
        assert code_and_field(runtime(workdir=bad)) == (ErrorCode.INVALID_FIELD, "runtime.workdir")


def test_a_runtime_must_be_offered_and_no_weaker_than_the_workers() -> None:
    offered = replace(FACTS, runtimes=("runc", "runsc"))
    assert accept(runtime(runtime="runsc"), CONFIG, offered).job.runtime == "runsc"
    assert accept(runtime(runtime="runc"), CONFIG, offered).job.runtime == "runc"
    field = "runtime.runtime"
    assert code_and_field(runtime(runtime="kata"), CONFIG, offered) == (
        ErrorCode.NOT_ALLOWED,
        field,
    )
    assert code_and_field(runtime(runtime="runsc")) == (ErrorCode.NOT_ALLOWED, field)
    strong = WorkerConfig(runtime="runsc")
    assert code_and_field(runtime(runtime="runc"), strong, offered) == (
        ErrorCode.NOT_ALLOWED,
        field,
    )
    bad: Any
    for bad in ("", "-x", "a b", "a/b", 5, True, [], "x" * 65):
        assert code_and_field(runtime(runtime=bad), CONFIG, offered) == (
            ErrorCode.INVALID_FIELD,
            field,
        )


def test_an_image_that_must_be_sandboxed_can_not_ask_for_less() -> None:
    config = WorkerConfig(images=ImageRules(sandboxed=("wild:*",)))
    offered = replace(FACTS, runtimes=("runc", "runsc"))
    assert accept(runtime(image="wild"), config, offered).job.runtime == ""
    assert accept(runtime(image="wild", runtime="runsc"), config, offered)
    for image in ("wild", "wild:2", "registry.example/wild", f"wild@{DIGEST}"):
        asked = runtime(image=image, runtime="runc")
        assert code_and_field(asked, config, offered) == (
            ErrorCode.NOT_ALLOWED,
            "runtime.runtime",
        )
    assert (
        code_and_field(runtime(image="wild"), config, replace(FACTS, runtimes=("runc",)))[0]
        == ErrorCode.NOT_ALLOWED
    )


def test_a_priority_is_one_of_three() -> None:
    for name in ("high", "normal", "low"):
        assert accept(job(priority=name)).job.priority is Priority(name)
    bad: Any
    for bad in ("", "HIGH", 1, True, [], {}):
        assert code_and_field(job(priority=bad)) == (ErrorCode.INVALID_FIELD, "priority")


def test_labels_are_a_small_map_of_texts() -> None:
    labels = {"a": "", "team.example/x": "é" * 256, "1": "one"}
    assert accept(job(labels=labels)).job.labels == labels
    assert code_and_field(job(labels=["gpu"])) == (ErrorCode.INVALID_FIELD, "labels")
    assert code_and_field(job(labels={f"k{n}": "" for n in range(33)}))[1] == "labels"
    for name in ("", "-a", "a b", "x" * 64, "ä", "a\n", "\ud800"):
        code, field = code_and_field(job(labels={name: "v"}))
        assert code == ErrorCode.INVALID_FIELD
        assert field.startswith("labels")
        field.encode()
    value: Any
    for value in (5, None, [], "x" * 257, "a\nb", "\ud800"):
        code, field = code_and_field(job(labels={"a": value}))
        assert (code, field.partition(".")[0]) == (ErrorCode.INVALID_FIELD, "labels")
    forged = job(labels={"penstock.owner": "me"})
    assert code_and_field(forged)[0] == ErrorCode.NOT_ALLOWED


def test_outputs_are_asked_for_by_a_truth_value() -> None:
    assert accept(job(outputs=True)).job.outputs is True
    bad: Any
    for bad in ("true", 1, [], "/output"):
        assert code_and_field(job(outputs=bad)) == (ErrorCode.INVALID_FIELD, "outputs")
