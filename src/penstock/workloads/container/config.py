"""What can be set about a container worker.

The sentence below each field is its documentation. `loading` reads a YAML file and the
environment; the names worker_id, port, max_concurrent_jobs and labels are the protocol's.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from penstock.workloads.container.job import Limits

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Size = Annotated[int, Meta(ge=1, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0, le=3650 * 86_400)]


class Pull(StrEnum):
    """When an image is fetched from its registry."""

    NEVER = "never"
    MISSING = "missing"


class OnRestart(StrEnum):
    """What becomes of containers that an earlier worker left behind."""

    ADOPT = "adopt"
    END = "end"


class Compat(StrEnum):
    NORMAL = "normal"
    STRICT = "strict"
    """Only the protocol's own keys and codes are answered."""


class ImageRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What jobs may run."""

    allowed: tuple[str, ...] = ("*",)
    """Images that jobs may name: `name:tag`, `name:*`, `name@sha256:…` or `sha256:…` (an image's
    id); `*` alone is any. A digest is compared with what the name means when the job starts."""
    pull: Pull = Pull.MISSING
    """Whether an image that is not here is fetched: `missing` or `never`."""
    max_bytes: Size = 16 << 30
    """Bytes that an image may have, unpacked, where the engine is `oci`."""
    network: tuple[str, ...] = ()
    """Images, written as in `allowed`, whose jobs may ask for a network."""
    root: tuple[str, ...] = ()
    """Images, written as in `allowed`, whose jobs may run as uid 0."""
    sandboxed: tuple[str, ...] = ()
    """Images, written as in `allowed`, that always run under gVisor (`runsc`)."""
    env: tuple[str, ...] = ()
    """Names of variables that a job may set although they are usually refused, as `PATH`."""


class BuildRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mode `build`."""

    enabled: bool = False
    """Whether jobs may bring a Dockerfile."""
    bases: tuple[str, ...] = ("scratch",)
    """Images that a FROM line may name, written as in `images.allowed`."""
    max_seconds: Seconds = 300
    """Seconds that a build may take."""
    memory_mb: Annotated[float, Meta(ge=6, le=1 << 20)] = 512
    """Memory that a build may use."""


class InputRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files that come with a job."""

    max_files: Count = 1000
    """How many files, those of archives included."""
    max_file_bytes: Size = 64 << 20
    """Bytes of one file."""
    max_bytes: Size = 256 << 20
    """Bytes of all files of a job."""
    max_ratio: Annotated[float, Meta(ge=1)] = 200
    """How many times larger than itself an archive may become."""
    sources: tuple[str, ...] = ()
    """URI prefixes below which a pointer may lead, as `s3://bucket/in`, for a worker that stands
    alone; under an engine its own `sources` count."""


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a container worker."""

    worker_id: str = "worker-unnamed"
    """How it calls itself."""
    host: str = "127.0.0.1"
    """Where it listens; anything but loopback needs a token."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 9000
    """0 takes a free one."""
    token: str = ""
    """What callers must send as `Authorization: Bearer …`; empty means nothing, on loopback."""
    token_file: Path | None = None
    """A file with the token, in place of `token`."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may call it, as `http://localhost:10000`; `*` is any. Without a
    token any page may only read; one that is listed may also submit and cancel."""
    labels: tuple[str, ...] = ()
    """Told by /info, for whoever chooses among workers."""
    max_concurrent_jobs: Annotated[int, Meta(ge=1, le=1000)] = 2
    """How many containers run at once."""
    max_queued_jobs: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """How many jobs may wait; beyond that a submission is answered 429."""
    memory_mb: Annotated[float, Meta(ge=0)] = 0
    """Memory that all running jobs may ask for together; 0 means 80% of the machine's."""
    cpus: Annotated[float, Meta(ge=0)] = 0
    """Processors that all running jobs may ask for together; 0 means one for each that may run at
    once, and never fewer than a single job may ask for."""
    engine: str = "auto"
    """`auto`, `docker`, `podman`, `oci`, or the address of a socket, as `unix:///run/docker.sock`."""
    unconfined: bool = False
    """Whether a Docker or Podman that runs containers without a seccomp profile may be used."""
    runtime: str = ""
    """The runtime for containers: `runc`, `crun`, `runsc`; empty means the engine's own choice."""
    jobs_dir: Path = Path("containers")
    """Where records, the files of jobs and the images of the `oci` engine are kept; else the
    folder `containers` in Penstock's data folder."""
    docker_root_dir: Path | None = None
    """The folder whose disk /health tells of; else the one that the engine names."""
    defaults: Limits = Limits()
    """The limits of a job that names none."""
    most: Limits = Limits(
        memory_mb=4096,
        max_runtime_seconds=86_400,
        cpus=float(os.cpu_count() or 1),
        pids=4096,
        max_output_bytes=64 << 20,
        tmp_mb=1024,
        max_artifact_bytes=1 << 30,
        pull_seconds=3600,
    )
    """The limits that a job may ask for at most."""
    images: ImageRules = ImageRules()
    """What jobs may run, and how."""
    build: BuildRules = BuildRules()
    """Whether and how jobs may build an image."""
    inputs: InputRules = InputRules()
    """How much a job may bring along."""
    max_body_bytes: Size = 1 << 20
    """Bytes of a submission without input files; with them `inputs.max_bytes` is the limit."""
    stop_grace: Annotated[float, Meta(ge=0, le=3600)] = 5
    """Seconds between SIGTERM and SIGKILL."""
    on_restart: OnRestart = OnRestart.ADOPT
    """What becomes of containers that run when a worker starts: `adopt` or `end` them."""
    retention: Seconds = 7 * 86_400
    """Seconds for which records and files of ended jobs are kept; 0 means for ever."""
    max_records: Annotated[int, Meta(ge=0)] = 100_000
    """How many ended jobs are kept at most; 0 means any number."""
    image_retention: Seconds = 0
    """Seconds after which an image that this worker pulled, and no job used since, is removed; 0
    means never."""
    disk_low_mb: Annotated[float, Meta(ge=0)] = 512
    """Free space below which no job is taken."""
    compat: Compat = Compat.NORMAL
    """`strict` answers only the protocol's own keys and codes."""
