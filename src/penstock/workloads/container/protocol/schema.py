"""A submission as the protocol has it, and what Penstock adds: the structs that check its shape and
make the OpenAPI document.

The protocol's own fields are `protocol_version`, `job_id`, `task` and `runtime` with `mode`,
`image`, `cmd`, `env` and, in `limits`, `memory_mb` and `max_runtime_seconds`. The others are added,
none is required, and null means absent. Unknown fields of the job itself and of `task` are kept and
passed to the container; unknown ones of `runtime` and its `limits` are refused, because a job that
asked for something must not run without it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.workloads.container.job import InputFile, Priority

MAX_CMD_PARTS = 1024
MAX_WORKDIR = 1024
MAX_ID = 2**31 - 1
"""Of a user or a group."""
MAX_LABELS = 32
MAX_LABEL = 256

Word = str | int | float | bool
"""Text, or a number or truth value, which is written as in JSON."""
Seconds = Annotated[float, Meta(ge=0.001)]
Megabytes = Annotated[float, Meta(ge=1)]
Bytes = Annotated[int, Meta(ge=1)]


class LimitsBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the job may use. `GET /info` shows the defaults and the maximum of each."""

    memory_mb: Annotated[float, Meta(ge=6)] | None = None
    """Memory, and no swap beyond it."""
    max_runtime_seconds: Seconds | None = None
    cpus: Annotated[float, Meta(ge=0.01)] | None = None
    pids: Annotated[int, Meta(ge=16)] | None = None
    max_output_bytes: Bytes | None = None
    """Bytes of each of the two streams in the record, half from the start, half from the end."""
    max_log_bytes: Bytes | None = None
    """Bytes of each stream that are kept, in the same way; beyond `max_output_bytes` as the
    artifacts `stdout.log` and `stderr.log`."""
    tmp_mb: Megabytes | None = None
    """Size of /tmp, which is memory."""
    shm_mb: Megabytes | None = None
    """Size of /dev/shm, which is memory."""
    max_artifact_bytes: Bytes | None = None
    """Bytes that the output folder may hold in all."""
    pull_seconds: Seconds | None = None
    """Seconds that fetching the image may take, and again its files; they don't count as run
    time."""


class StdinBody(Struct, frozen=True, forbid_unknown_fields=True):
    """What the container reads: a text, or bytes as base64."""

    text: str | None = None
    base64: str | None = None


class MountBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A folder of the worker's machine, read-only, from the worker's list (`mounts`)."""

    source: Annotated[str, Meta(pattern="^/", max_length=4096)]
    target: Annotated[str, Meta(pattern="^/", max_length=MAX_WORKDIR)]


class BuildBody(Struct, frozen=True, forbid_unknown_fields=True):
    """An image that is made for this job and removed after it."""

    dockerfile: str
    """Its text."""
    context: list[InputFile] | None = None


class RuntimeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the job is run."""

    mode: Literal["image", "build"]
    """`build` where the worker allows it."""
    image: str | None = None
    """Required for mode `image`."""
    cmd: Annotated[list[Word], Meta(max_length=MAX_CMD_PARTS)] | None = None
    """Put after the entrypoint; none means the image's own command."""
    entrypoint: Annotated[list[Word], Meta(max_length=MAX_CMD_PARTS)] | None = None
    """In place of the image's entrypoint and of its command; an empty list: `cmd` is the whole
    command."""
    env: dict[str, Word | None] | None = None
    """A variable that is null is left out."""
    limits: LimitsBody | None = None
    stdin: Literal["job", "payload", "none"] | StdinBody | None = None
    """What the container reads: the whole job as compact JSON (the default), `task.payload`,
    nothing, or what is given."""
    network: bool | str | None = None
    """true or `bridge`, or the name of a network, where the worker's rules list the image."""
    user: Annotated[int, Meta(ge=0, le=MAX_ID)] | str | None = None
    """A uid, or `uid:gid`; 0 only where the rules list the image."""
    workdir: Annotated[str, Meta(pattern="^/", max_length=MAX_WORKDIR)] | None = None
    """Absolute; the image's own without it."""
    runtime: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """One that the worker offers, and no weaker than its own."""
    gpus: Annotated[int, Meta(ge=0, le=1024)] | str | None = None
    """`all`, a number, or ids as `0,1`; refused where there are none."""
    mounts: Annotated[list[MountBody], Meta(max_length=64)] | None = None
    """Folders of the worker's machine, from its list."""
    read_only: bool | None = None
    """false: a root file system that can be written to, where the rules list the image."""
    build: BuildBody | None = None
    """For mode `build`."""


class JobBody(Struct, frozen=True, kw_only=True):
    """A job as the protocol has it, and more; unknown fields are kept and passed on."""

    protocol_version: Literal[1]
    job_id: str
    """Unique on this worker, chosen by the caller."""
    runtime: RuntimeBody
    task: Any = None
    """`type` and a free `payload`, for the container."""
    inputs: list[InputFile] | None = None
    """Files below `/input`, which can't be written to."""
    outputs: bool | None = None
    """Whether it has a folder `/output`, of which artifacts are collected."""
    attach: bool | None = None
    """Whether its output is also streamed byte for byte, to readers that follow the job."""
    priority: Priority | None = None
    labels: (
        Annotated[
            dict[str, Annotated[str, Meta(max_length=MAX_LABEL)]], Meta(max_length=MAX_LABELS)
        ]
        | None
    ) = None
