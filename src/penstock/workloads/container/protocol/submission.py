"""What a submission is, and in which order it is checked.

The protocol's own fields are `protocol_version` (1), `job_id`, `task` (anything; `payload` is the
part that matters) and `runtime` with `mode`, `image`, `cmd`, `env` and, in `limits`, `memory_mb`
and `max_runtime_seconds`. These are added, none is needed, and null means absent:

    runtime.limits     cpus, pids, max_output_bytes, tmp_mb, max_artifact_bytes, pull_seconds
    runtime.stdin      "job" (the whole job, compact), "payload", "none",
                       {"text": "…"} or {"base64": "…"}
    inputs             [{"path", "text" | "base64" | "pointer", "archive"?, "executable"?}, …]
    outputs            true: a folder to leave artifacts in
    runtime.network    true, where the worker's rules list the image
    runtime.user       a uid, or "uid:gid"; 0 only where the rules list the image
    runtime.workdir    an absolute path
    runtime.runtime    one that the worker offers, and no weaker than its own
    priority           "high", "normal" or "low"
    labels             up to 32 names with texts
    runtime.build      {"dockerfile": "…", "context": [as inputs]} with mode "build"

A field that nobody knows is kept in the body and means nothing.

The order: body, protocol_version, job_id, runtime, mode known, mode supported, image; then the
grammar of the image's name; then cmd, env, limits, stdin, inputs, outputs, network, user, workdir,
runtime, priority, labels, build; and last the list of allowed images. The first that is wrong is
what the answer names. Whether the id is taken is for whoever stores the job.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from penstock.workloads.container.config import Compat, WorkerConfig
from penstock.workloads.container.job import (
    PROTOCOL_VERSION,
    BuildSpec,
    Code,
    ContainerJob,
    Mode,
    Rejected,
)
from penstock.workloads.container.protocol.asked import (
    check_sandbox,
    read_cmd,
    read_labels,
    read_network,
    read_priority,
    read_runtime,
    read_stdin,
    read_user,
    read_workdir,
)
from penstock.workloads.container.protocol.body import Unreadable, check_depth, read_body
from penstock.workloads.container.protocol.dockerfile import bases_of
from penstock.workloads.container.protocol.environment import read_env
from penstock.workloads.container.protocol.fields import (
    Unacceptable,
    flag_of,
    object_of,
    refuse,
    shown,
    text_of,
)
from penstock.workloads.container.protocol.inputs import read_files
from penstock.workloads.container.protocol.javascript import as_double, stringify
from penstock.workloads.container.protocol.limits import read_limits
from penstock.workloads.container.protocol.policy import could_match, granted, names_of
from penstock.workloads.container.protocol.reference import parse_reference

MAX_COMPAT_ID = 200
DOCKERFILE = "Dockerfile"

_JOB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)
_COMPAT_ID = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_COMPAT_ID}}}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Accepted(Struct, frozen=True):
    """A submission that passed."""

    job: ContainerJob
    body: bytes
    """The whole job as compact JSON: what is stored, and what `stdin: job` reads."""


def body_limit(config: WorkerConfig) -> int:
    """Bytes that a submission can have at most, whatever is in it."""
    return max(config.max_body_bytes, config.inputs.max_bytes)


def read_job(
    body: bytes, config: WorkerConfig, *, can_build: bool = False, runtimes: Collection[str] = ()
) -> Accepted:
    """Check a submission as it came. Raises Rejected, and nothing else, for any bytes."""
    if len(body) > body_limit(config):
        raise _too_large(len(body), body_limit(config))
    value = _decoded(body)
    if len(body) > config.max_body_bytes and not _brings_files(value):
        raise _too_large(len(body), config.max_body_bytes)
    return check_job(value, config, can_build=can_build, runtimes=runtimes)


def recall_job(
    body: bytes, config: WorkerConfig, *, can_build: bool = False, runtimes: Collection[str] = ()
) -> Accepted:
    """The same for an `Accepted.body` that was stored. Its size is not looked at again: the limit
    may be lower now. Raises Rejected where the worker's rules have become stricter since."""
    return check_job(_decoded(body), config, can_build=can_build, runtimes=runtimes)


def _decoded(body: bytes) -> Any:
    try:
        return read_body(body)
    except Unreadable as error:
        raise Rejected(Code.INVALID_BODY, str(error)) from None


def check_job(
    value: Any, config: WorkerConfig, *, can_build: bool = False, runtimes: Collection[str] = ()
) -> Accepted:
    """The same for a value that was decoded elsewhere."""
    try:
        return _check(value, config, can_build, runtimes)
    except Unacceptable as error:
        job_id = None if error.code is Code.INVALID_BODY else _echo(value)
        raise Rejected(error.code, str(error), field=error.field, job_id=job_id) from None


def _check(
    value: Any, config: WorkerConfig, can_build: bool, runtimes: Collection[str]
) -> Accepted:
    job, body = _check_body(value)
    _check_version(job.get("protocol_version"))
    job_id = _check_id(job.get("job_id"), config)
    runtime = _check_runtime(job.get("runtime"))
    mode = _check_mode(runtime.get("mode"), config, can_build)
    image = _check_image(runtime.get("image")) if mode is Mode.IMAGE else ""
    cmd = read_cmd(runtime.get("cmd"))
    env = read_env(runtime.get("env"), config.images.env)
    limits = read_limits(runtime.get("limits"), config)
    stdin, stdin_bytes = read_stdin(runtime.get("stdin"), job, body)
    made = ContainerJob(
        job_id=job_id,
        mode=mode,
        image=image,
        cmd=cmd,
        env=env,
        limits=limits,
        stdin=stdin,
        stdin_bytes=stdin_bytes,
        inputs=read_files("inputs", job.get("inputs"), config.inputs),
        outputs=flag_of("outputs", job.get("outputs")),
        network=read_network(runtime.get("network"), image, config),
        user=read_user(runtime.get("user"), image, config),
        workdir=read_workdir(runtime.get("workdir")),
        runtime=read_runtime(runtime.get("runtime"), config, runtimes),
        priority=read_priority(job.get("priority")),
        labels=read_labels(job.get("labels")),
        build=_check_build(runtime.get("build"), config) if mode is Mode.BUILD else None,
    )
    check_sandbox(made.runtime, names_of(made), config, runtimes)
    _check_allowed(made, config)
    return Accepted(made, body)


def _check_body(value: Any) -> tuple[Mapping[str, Any], bytes]:
    """An array is an object to JavaScript: one without a protocol_version."""
    if not isinstance(value, dict | list):
        raise Unacceptable(Code.INVALID_BODY, "the body must be a JSON object")
    try:
        check_depth(value)
        body = stringify(value).encode()
    except ValueError as error:
        raise Unacceptable(Code.INVALID_BODY, str(error)) from None
    return (value if isinstance(value, dict) else {}), body


def _check_version(value: Any) -> None:
    if isinstance(value, bool) or value != PROTOCOL_VERSION:
        raise Unacceptable(
            Code.UNSUPPORTED_PROTOCOL_VERSION,
            f"protocol_version must be the number {PROTOCOL_VERSION}",
        )


def _check_id(value: Any, config: WorkerConfig) -> str:
    if not isinstance(value, str) or not value:
        raise Unacceptable(Code.MISSING_JOB_ID, "job_id must be a string that is not empty")
    if config.compat is Compat.STRICT:
        grammar, rule = _COMPAT_ID, f"1 to {MAX_COMPAT_ID} characters without control characters"
    else:
        grammar, rule = _JOB_ID, "1 to 128 of A-Z a-z 0-9 . _ -, not a dot or a dash first"
    if not grammar.fullmatch(value):
        raise Unacceptable(Code.INVALID_JOB_ID, f"job_id {shown(value)} is not {rule}", "job_id")
    return value


def _check_runtime(value: Any) -> Mapping[str, Any]:
    """An array gets past this check, and fails for its lack of a mode, as in JavaScript."""
    if not isinstance(value, dict | list):
        raise Unacceptable(Code.MISSING_RUNTIME, "runtime must be an object")
    return value if isinstance(value, dict) else {}


def _check_mode(value: Any, config: WorkerConfig, can_build: bool) -> Mode:
    if not isinstance(value, str) or value not in tuple(Mode):
        raise Unacceptable(Code.BAD_RUNTIME_MODE, "runtime.mode must be 'image' or 'build'")
    mode = Mode(value)
    if mode is Mode.BUILD and not (config.build.enabled and can_build):
        raise Unacceptable(
            Code.RUNTIME_NOT_SUPPORTED, "runtime.mode=build not supported on this worker"
        )
    return mode


def _check_image(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Unacceptable(Code.MISSING_IMAGE, "runtime.image must be a string that is not empty")
    try:
        parse_reference(value)
    except ValueError as error:
        message = f"runtime.image {shown(value)} {error}"
        raise Unacceptable(Code.INVALID_IMAGE, message, "runtime.image") from None
    return value


def _check_build(value: Any, config: WorkerConfig) -> BuildSpec:
    field = "runtime.build"
    build = object_of(field, value)
    dockerfile = text_of(f"{field}.dockerfile", build.get("dockerfile"))
    try:
        bases = bases_of(dockerfile)
    except ValueError as error:
        refuse(f"{field}.dockerfile", str(error))
    context = read_files(
        f"{field}.context", build.get("context"), config.inputs, taken=(DOCKERFILE,)
    )
    return BuildSpec(dockerfile=dockerfile, context=context, bases=bases)


def _check_allowed(job: ContainerJob, config: WorkerConfig) -> None:
    """By name; what the name means is looked at when the job starts. A builder asks for its bases
    itself, so of these a digest must stand in the Dockerfile."""
    if job.build is None:
        patterns = config.images.allowed
        if not any(could_match(pattern, job.image) for pattern in patterns):
            message = f"image {shown(job.image)} is not allowed on this worker"
            raise Unacceptable(Code.IMAGE_NOT_ALLOWED, message, "runtime.image")
        return
    for base in job.build.bases:
        if not granted(config.build.bases, base):
            message = f"base image {shown(base)} is not allowed on this worker"
            raise Unacceptable(Code.IMAGE_NOT_ALLOWED, message, "runtime.build.dockerfile")


def _brings_files(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    runtime = value.get("runtime")
    build = runtime.get("build") if isinstance(runtime, dict) else None
    return bool(value.get("inputs") or (isinstance(build, dict) and build.get("context")))


def _too_large(size: int, limit: int) -> Rejected:
    message = f"the body is {size} bytes long; at most {limit} are allowed"
    return Rejected(Code.INVALID_BODY, message, status=413)


def _echo(value: Any) -> Any:
    """The id as it was given, in a form that every writer of JSON can write."""
    given = value.get("job_id") if isinstance(value, dict) else None
    return _writable(given)


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_writable(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if type(value) is int and abs(value) < 2**63 else as_double(value)
    return value
