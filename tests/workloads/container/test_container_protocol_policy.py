"""Names of images, the rules about them, and the variables a job may set."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.container.container_submissions import accept, code_and_field, runtime
from tests.support.rows import every

from penstock.workloads.container.config import ImageRules, WorkerConfig
from penstock.workloads.container.engine import EngineError, Image
from penstock.workloads.container.job import BuildSpec, ContainerJob, ErrorCode
from penstock.workloads.container.protocol.image_rules import (
    NotAllowedImage,
    Reference,
    check_pattern,
    check_resolved,
    chosen_runtime,
    matches,
    parse_reference,
)
from penstock.workloads.container.protocol.submission import MAX_ENV_BYTES as MAX_BYTES
from penstock.workloads.container.protocol.submission import is_denied

ONE = "sha256:" + "1" * 64
TWO = "sha256:" + "2" * 64

# --- names ---


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("alpine", Reference("alpine", "latest")),
        ("alpine:latest", Reference("alpine", "latest")),
        ("alpine:3.18_x-y", Reference("alpine", "3.18_x-y")),
        ("a/b__c/d-e.f", Reference("a/b__c/d-e.f", "latest")),
        ("registry.example:5000/a/b:1", Reference("registry.example:5000/a/b", "1")),
        ("localhost/a", Reference("localhost/a", "latest")),
        ("[::1]:5000/a", Reference("[::1]:5000/a", "latest")),
        (f"alpine@{ONE}", Reference("alpine", "", ONE)),
        (f"alpine:3@{ONE}", Reference("alpine", "", ONE)),
        (ONE, Reference(id=ONE)),
        ("x" * 255, Reference("x" * 255, "latest")),
    ],
)
def test_a_name_is_taken_apart(text: str, reference: Reference) -> None:
    assert parse_reference(text) == reference


@every(
    "text, why",
    [
        ("", "empty"),
        ("-x", "dash"),
        ("a b", "space"),
        ("a\u00a0b", "space"),
        ("x" * 256, "characters long"),
        ("a:" + "t" * 129, "not a name"),
        ("Alpine", "not a name"),
        ("a/-b", "not a name"),
        (f"a@{ONE[:-1]}", "not a name"),
        (f"a@md5:{'1' * 32}", "not a name"),
        (f"a@{ONE.replace('1', 'A')}", "not a name"),
        ("http://x/y", "not a name"),
        ("oci-archive:/etc/x", "not a name"),
        ("sha256:12ab", "part of an id"),
        ("1" * 64, "part of an id"),
    ],
)
def test_what_is_no_name_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_reference(text)


@pytest.mark.parametrize("bad", ["a-" * 127, "a." * 127, "a--" * 85, "A." * 120 + "!", "a/" * 127])
def test_no_name_takes_long_to_refuse(bad: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match="not a name"):
        parse_reference(bad)
    assert time.process_time() - began < 0.5


# --- rules ---


@every(
    "pattern, reference, expected",
    [
        ("*", "anything:1", True),
        ("alpine", "alpine", True),
        ("alpine", "alpine:latest", True),
        ("alpine:latest", "alpine", True),
        ("alpine", "alpine:3", False),
        ("alpine", "x/alpine", False),
        ("alpine", f"alpine@{ONE}", False),
        ("alpine:3", f"alpine:3@{ONE}", False),
        ("alpine:*", "alpine", True),
        ("alpine:*", "alpine:3", True),
        ("alpine:*", f"alpine@{ONE}", True),
        ("alpine:*", "alpinex:3", False),
        ("alpine:*", "alpine/x", False),
        ("a/b:*", "a/b:1", True),
        (f"alpine@{ONE}", f"alpine@{ONE}", True),
        (f"alpine@{ONE}", f"alpine:3@{ONE}", True),
        (f"alpine@{ONE}", f"alpine@{TWO}", False),
        (f"alpine@{ONE}", f"other@{ONE}", False),
        (f"alpine@{ONE}", "alpine", False),
        (ONE, ONE, True),
        (ONE, TWO, False),
        (ONE, "alpine", False),
        ("alpine:*", ONE, False),
        (":*", ONE, False),
        ("-bad", "alpine", False),
        ("", "alpine", False),
        ("alpine", "-bad", False),
    ],
)
def test_a_rule_means_the_images_that_it_names(
    pattern: str, reference: str, expected: bool
) -> None:
    assert matches(pattern, reference) is expected


def test_a_digest_is_compared_with_what_the_name_turned_out_to_mean() -> None:
    imported = Image(id=ONE)
    pulled = Image(id=TWO, digests=(f"alpine@{ONE}",))
    other = Image(id=TWO)
    for image, expected in ((imported, True), (pulled, True), (other, False)):
        assert matches(f"alpine@{ONE}", "alpine:3", image) is expected
    assert matches(ONE, "anything", imported)
    assert not matches(ONE, "anything", pulled)
    assert not matches(f"alpine@{ONE}", "other", imported)
    assert not matches(f"alpine@{ONE}", f"alpine@{ONE}", other)


@pytest.mark.seed("003", "9.5")
def test_an_image_that_is_not_what_the_list_pins_does_not_run() -> None:
    rules = ImageRules(allowed=(f"alpine@{ONE}", "tool:*"))
    check_resolved(rules, "alpine", Image(id=ONE))
    check_resolved(rules, "tool:7", Image(id=TWO))
    with pytest.raises(NotAllowedImage, match=TWO) as caught:
        check_resolved(rules, "alpine", Image(id=TWO))
    assert isinstance(caught.value, EngineError)
    assert (caught.value.code, caught.value.exit_code) == (ErrorCode.IMAGE_NOT_ALLOWED, 125)


def test_a_name_that_an_engine_took_for_the_start_of_an_id_does_not_run() -> None:
    image = Image(id="sha256:beef" + "0" * 60, tags=("secret:latest",))
    with pytest.raises(NotAllowedImage, match="beginning of another image's id"):
        check_resolved(ImageRules(), "beef", image)
    check_resolved(ImageRules(), "beef", Image(id=image.id, tags=("beef:latest",)))
    check_resolved(ImageRules(), "beef", Image(id=ONE))
    check_resolved(ImageRules(), image.id, image)


def test_a_pattern_that_can_match_nothing_is_told_to_who_reads_the_configuration() -> None:
    for good in ("*", "alpine", "alpine:*", "a/b:1", f"a@{ONE}", ONE):
        check_pattern(good)
    for bad in ("", "a b", "-x", "alpine*", "*:latest", "**", ":*"):
        with pytest.raises(ValueError, match=r"is |has |begins "):
            check_pattern(bad)


@pytest.mark.seed("003", "10.13")
def test_the_runtime_is_the_jobs_then_the_workers_unless_gvisor_is_demanded() -> None:
    config = WorkerConfig(runtime="crun", images=ImageRules(sandboxed=("wild:*", f"x@{ONE}", TWO)))
    calm = ContainerJob(job_id="a", image="alpine", runtime="runc")
    assert chosen_runtime(config, calm) == "runc"
    assert chosen_runtime(config, ContainerJob(job_id="a", image="alpine")) == "crun"
    assert chosen_runtime(WorkerConfig(), ContainerJob(job_id="a", image="alpine")) == ""
    for image in ("wild", "wild:9", "registry.example/wild:9", "localhost/wild", f"wild@{ONE}"):
        wild = ContainerJob(job_id="a", image=image, runtime="runc")
        assert chosen_runtime(config, wild) == "runsc"
    everything = WorkerConfig(images=ImageRules(sandboxed=("*",)))
    assert chosen_runtime(everything, calm) == "runsc"


def test_gvisor_is_not_escaped_by_another_name_of_the_image() -> None:
    config = WorkerConfig(images=ImageRules(sandboxed=("wild:latest", f"x@{ONE}", TWO)))
    job = ContainerJob(job_id="a", image="alias")
    assert chosen_runtime(config, job, Image(id="sha256:" + "3" * 64)) == ""
    for image in (
        Image(id="sha256:" + "3" * 64, tags=("alias:latest", "wild:latest")),
        Image(id="sha256:" + "3" * 64, tags=("registry.example/library/wild:latest",)),
        Image(id="sha256:" + "3" * 64, digests=(f"y/x@{TWO}", f"x@{ONE}")),
        Image(id=ONE),
        Image(id=TWO),
    ):
        assert chosen_runtime(config, job, image) == "runsc"
    built = ContainerJob(job_id="a", build=BuildSpec(dockerfile="", bases=("scratch", "wild")))
    assert chosen_runtime(config, built) == "runsc"


# --- variables ---


def test_variables_are_texts_or_numbers_as_in_javascript() -> None:
    env = {"A": "x=y\n", "_b1": 5, "C": 1.0, "D": True, "E": "", "F": None, "G": 1e21}
    assert accept(runtime(env=env)).job.env == {
        "A": "x=y\n",
        "_b1": "5",
        "C": "1",
        "D": "true",
        "E": "",
        "G": "1e+21",
    }


@pytest.mark.parametrize("bad", ["PATH=/", "x", "", 5, True, [], ["A=b"]])
def test_an_env_that_is_no_map_is_an_invalid_field(bad: Any) -> None:
    assert code_and_field(runtime(env=bad)) == (ErrorCode.INVALID_FIELD, "runtime.env")


@pytest.mark.parametrize(
    "name", ["", "1A", "A B", "A=B", "A-B", "ä", "A\n", "A\0", "\ud800", "A.B"]
)
def test_a_variable_needs_a_name(name: str) -> None:
    code, field = code_and_field(runtime(env={name: "x"}))
    assert code == ErrorCode.INVALID_FIELD
    assert field.startswith("runtime.env")
    field.encode()


@pytest.mark.parametrize("value", [{}, {"a": 1}, [], ["x"], "a\0b", "\ud800"])
def test_a_variable_that_is_no_text_is_an_invalid_field(value: Any) -> None:
    code, field = code_and_field(runtime(env={"A": value}))
    assert code == ErrorCode.INVALID_FIELD
    assert field.startswith("runtime.env")


DENIED = [
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_", "DYLD_INSERT_LIBRARIES", "PATH"),
    *("DOCKER_HOST", "HTTP_PROXY", "https_proxy", "ALL_PROXY", "no_proxy", "Http_Proxy"),
    *("CONTAINER", "CONTAINER_HOST", "CONTAINERS_CONF", "BASH_ENV", "ENV", "IFS"),
    *("NODE_OPTIONS", "PYTHONSTARTUP", "PENSTOCK_TOKEN", "PENSTOCK_"),
]


@every("name", DENIED)
def test_a_variable_that_changes_what_a_program_is_is_not_allowed(name: str) -> None:
    assert code_and_field(runtime(env={name: "x"})) == (
        ErrorCode.NOT_ALLOWED,
        f"runtime.env.{name}",
    )
    config = WorkerConfig(images=ImageRules(env=(name,)))
    assert accept(runtime(env={name: "x"}), config).job.env == {name: "x"}


@pytest.mark.parametrize("name", ["path", "env", "LDX", "MY_PATH", "PROXY", "PROXY_URL", "HOME"])
def test_a_variable_that_only_looks_alike_is_allowed(name: str) -> None:
    assert not is_denied(name)


def test_all_variables_together_have_a_cap() -> None:
    room = MAX_BYTES - len("A") - 2
    assert accept(runtime(env={"A": "x" * room})).job.env["A"]
    assert code_and_field(runtime(env={"A": "x" * (room + 1)})) == (
        ErrorCode.INVALID_FIELD,
        "runtime.env",
    )
    assert code_and_field(runtime(env={"A": "é" * (room // 2 + 1)}))[0] == ErrorCode.INVALID_FIELD
    assert code_and_field(runtime(env={f"A{n}": "" for n in range(20_000)}))[1] == "runtime.env"
