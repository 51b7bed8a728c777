"""Whatever is submitted: a refusal or a job within the caps, and always the same."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.workloads.container.config import BuildRules, ImageRules, WorkerConfig
from penstock.workloads.container.engine import EngineFacts
from penstock.workloads.container.job import Limits, Rejected
from penstock.workloads.container.protocol.dockerfile import bases_of
from penstock.workloads.container.protocol.image_rules import parse_reference
from penstock.workloads.container.protocol.paths import checked_folder
from penstock.workloads.container.protocol.submission import (
    Accepted,
    check_job,
    read_job,
)

CONFIGS = [
    WorkerConfig(build=BuildRules(enabled=True, bases=("*",))),
    WorkerConfig(images=ImageRules(allowed=("alpine:*",), root=("*",), network=("*",))),
]
FACTS = EngineFacts(name="docker", version="1", can_build=True, runtimes=("runc", "runsc"))

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=4)
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def either(*choices: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Each as often as it is named; `|` would count the branches within them too."""
    return st.sampled_from(choices).flatmap(lambda chosen: chosen)


def mostly(*values: Any) -> st.SearchStrategy[Any]:
    """Values that are right, and now and then anything."""
    return either(*[st.sampled_from(values)] * 29, ANYTHING)


def some_of(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


NUMBERS = mostly(16, 32, 64, 64.0, *[20] * 20, 0.5, 1e9, -1, 0, True)
LIMITS = some_of(dict.fromkeys(Limits.__struct_fields__, NUMBERS))
FILES = st.lists(
    st.fixed_dictionaries(
        {
            "path": mostly("a", "b/c", "./d", "e", "f", "b", ".", "Dockerfile"),
            "text": mostly(*["x"] * 9, None),
            "base64": mostly(*[None] * 9, "AAAA"),
            "pointer": mostly(*[None] * 9, "data:,x"),
            "archive": mostly(None, "tar", "zip"),
            "executable": mostly(True, False),
        }
    ),
    max_size=3,
)
LINES = st.sampled_from(
    ["FROM scratch", "FROM alpine AS x", "FROM x", "RUN a \\", "COPY --from=0 a b", "USER 1"]
)
DOCKERFILES = st.lists(either(*[LINES] * 9, st.text(max_size=10)), max_size=4).map(
    lambda lines: "\n".join(["FROM alpine", *lines])
)
RUNTIME = st.fixed_dictionaries(
    {
        "mode": mostly("image", "image", "build"),
        "image": mostly(*["alpine", "alpine:3"] * 5, "-x", "other"),
    },
    optional={
        "cmd": either(mostly([], ["a", 1, True]), st.lists(SCALARS, max_size=2)),
        "env": either(mostly({"A": "b"}), st.dictionaries(st.text("ABC_", max_size=4), SCALARS)),
        "limits": either(*[LIMITS] * 9, ANYTHING),
        "stdin": mostly("job", "none", {"text": "x"}, "payload"),
        "network": mostly(*[False] * 9, True),
        "user": mostly(*[1000, "1:2"] * 5, 0),
        "workdir": mostly(*["/a", "/a/./b"] * 5, "/a/../b"),
        "runtime": mostly(*["runc", "runsc"] * 5, "other"),
        "build": st.fixed_dictionaries({"dockerfile": DOCKERFILES}, optional={"context": FILES}),
    },
)
JOBS = st.fixed_dictionaries(
    {
        "protocol_version": mostly(1, 1, 1.0),
        "job_id": mostly("a", "b-1", "c", "d"),
        "runtime": either(*[RUNTIME] * 19, ANYTHING),
    },
    optional={
        "task": either(some_of({"payload": ANYTHING}), ANYTHING),
        "inputs": either(*[FILES] * 9, ANYTHING),
        "outputs": mostly(True, False),
        "priority": mostly("high", "low"),
        "labels": either(
            *[mostly({"a": "b"})] * 9, st.dictionaries(st.text(max_size=4), SCALARS, max_size=2)
        ),
        "unknown": ANYTHING,
        "7": ANYTHING,
    },
)


def answer(value: Any, config: WorkerConfig) -> Accepted | Rejected:
    """What a decoded value, or bytes, are answered."""
    read: Any = read_job if isinstance(value, bytes) else check_job
    try:
        accepted: Accepted = read(value, config, FACTS)
    except Rejected as refused:
        return refused
    return accepted


def check_refusal(refused: Rejected) -> None:
    """It can be answered: as UTF-8, in a sentence of bearable length."""
    assert refused.status in (400, 413)
    assert 0 < len(refused.error.message) < 1000
    refused.error.message.encode()
    refused.error.field.encode()
    msgspec.json.encode(refused.job_id)


def check_acceptance(accepted: Accepted, config: WorkerConfig) -> None:
    job = accepted.job
    for name in Limits.__struct_fields__:
        value = getattr(job.limits, name)
        assert math.isfinite(value)
        assert 0 < value <= getattr(config.max_limits, name)
    assert job.limits.memory_mb >= 6
    assert "\0" not in "".join(job.cmd) + "".join(job.env) + "".join(job.env.values())
    assert len("".join(job.cmd).encode()) <= 128 << 10
    if job.build is None:
        assert not job.image.startswith("-")
        parse_reference(job.image)
    else:
        assert bases_of(job.build.dockerfile) == job.build.bases
    for file in (*job.inputs, *(job.build.context if job.build else ())):
        assert checked_folder(file.path) == file.path
    assert job.workdir == "" or job.workdir.startswith("/")
    assert ".." not in job.workdir.split("/")
    assert 0 not in job.user or config.images.root
    json.loads(accepted.body)


@settings(max_examples=600)
@given(JOBS | ANYTHING, st.sampled_from(CONFIGS))
def test_any_value_is_refused_in_a_sentence_or_accepted_within_the_caps(
    value: Any, config: WorkerConfig
) -> None:
    answered = answer(value, config)
    if isinstance(answered, Rejected):
        check_refusal(answered)
    else:
        check_acceptance(answered, config)


@settings(max_examples=400)
@example(
    {
        "protocol_version": 1,
        "job_id": "a",
        "runtime": {"mode": "image", "image": "alpine"},
        "task": {"payload": {"\x7f": "\ud800"}},
    },
    CONFIGS[0],
)
@given(JOBS, st.sampled_from(CONFIGS))
def test_what_is_accepted_is_accepted_again_from_its_own_body(
    value: Any, config: WorkerConfig
) -> None:
    first = answer(value, config)
    if isinstance(first, Accepted):
        assert answer(value, config) == first
        assert read_job(first.body, config, FACTS) == first


@settings(max_examples=300)
@given(JOBS, st.sampled_from(CONFIGS))
def test_bytes_and_their_value_are_answered_alike(value: Any, config: WorkerConfig) -> None:
    def finite(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: finite(inner) for key, inner in part.items()}
        if isinstance(part, list):
            return [finite(inner) for inner in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    value = finite(value)
    by_value = answer(value, config)
    by_bytes = answer(json.dumps(value, allow_nan=False).encode(), config)
    if isinstance(by_value, Rejected):
        assert isinstance(by_bytes, Rejected)
        assert by_bytes.error == by_value.error
    else:
        assert by_bytes == by_value


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b'{"protocol_version":1,"job_id":' + b"[" * 63 + b"]" * 63 + b"}")
@example(b'{"protocol_version":' + b"9" * 5000 + b"}")
def test_any_bytes_are_refused_and_never_a_crash(body: bytes) -> None:
    for config in CONFIGS:
        answered = answer(body, config)
        assert isinstance(answered, Rejected)
        check_refusal(answered)


@given(st.text(st.sampled_from("FROMCPYasx \\\n\t#=<-\"'$:/0.")) | DOCKERFILES)
def test_a_dockerfile_is_refused_or_all_it_names_are_images(text: str) -> None:
    try:
        bases = bases_of(text)
    except ValueError:
        return
    assert bases
    for base in bases:
        parse_reference(base)
