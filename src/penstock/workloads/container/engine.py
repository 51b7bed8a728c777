"""The seam between container jobs and container engines.

A `ContainerSpec` says everything about a container, and every engine keeps to it, so a job sees the
same sandbox whichever engine runs it. Errors have a code each, so that a job's end is reported
alike too.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from penstock.workloads.container.job import ErrorCode, Stream, Usage
from penstock.workloads.container.job import Mount as Mount

OWNER_LABEL = "penstock.owner"
"""Whose container it is: of a worker's folder, under one job engine."""
JOB_LABEL = "penstock.job"
"""The job's id."""
IMAGE_LABEL = "penstock.image"
"""Id of the image that the container was made from."""

NO_INIT = "no init"
"""In `EngineFacts.security`: the engine has no init program."""
NO_NETWORK = "none"
BRIDGE = "bridge"


class EngineError(Exception):
    """The engine did not do what it was asked."""

    code = ErrorCode.ENGINE_ERROR
    exit_code: int | None = 125


class EngineUnavailable(EngineError):
    """The engine can't be reached, or its answer makes no sense."""

    code = ErrorCode.ENGINE_UNAVAILABLE
    exit_code = None


class WorkerFailure(EngineError):
    """The worker itself failed, not the engine."""

    code = ErrorCode.RUNTIME_ERROR
    exit_code = None


class ImageNotFound(EngineError):
    code = ErrorCode.IMAGE_NOT_FOUND


class PullFailed(EngineError):
    code = ErrorCode.IMAGE_PULL_FAILED


class BuildFailed(EngineError):
    code = ErrorCode.BUILD_FAILED
    exit_code = None


class CommandNotFound(EngineError):
    code = ErrorCode.COMMAND_NOT_FOUND
    exit_code = 127


class CommandNotRunnable(EngineError):
    code = ErrorCode.COMMAND_NOT_RUNNABLE
    exit_code = 126


_INIT_FAILED = re.compile(
    rb"(?:\[FATAL tini \(\d+\)\] exec .* failed|ERROR \(catatonit:\d+\): failed to exec pid1)"
    rb": (.+)\n"
)


def command_failure(stderr: bytes) -> EngineError | None:
    """What the init program of a container says if it can't run the command; None if it is not
    that."""
    if (found := _INIT_FAILED.fullmatch(stderr)) is None:
        return None
    why = found[1].decode(errors="replace")
    return (CommandNotFound if "No such file" in why else CommandNotRunnable)(why)


class ContainerNotFound(EngineError):
    """There is no such container."""


class Unsupported(EngineError):
    """This engine, or this machine, can't do that at all."""

    code = ErrorCode.RUNTIME_NOT_SUPPORTED


class Image(Struct, frozen=True, kw_only=True):
    """An image on this machine."""

    id: str
    """`sha256:…`, of its configuration."""
    digests: tuple[str, ...] = ()
    """`name@sha256:…`, by which registries know it; empty for an imported image."""
    tags: tuple[str, ...] = ()
    size: int = 0
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    """As `NAME=value`."""
    workdir: str = ""
    created: float = 0
    labels: Mapping[str, str] = {}


class RegistryAuth(Struct, frozen=True, kw_only=True):
    """Credentials of one registry. They come from the worker's files, never from a job."""

    server: str
    username: str = ""
    password: str = ""
    identity_token: str = ""
    """An OAuth refresh token, in place of name and password."""

    def __repr__(self) -> str:
        return f"RegistryAuth(server={self.server!r})"


class Gpus(Struct, frozen=True):
    """Which GPUs a container gets: none, all, a number of them, or these."""

    count: int = 0
    """-1 means all."""
    ids: tuple[str, ...] = ()
    """Indexes or UUIDs, as `nvidia-smi -L` lists them."""

    def __bool__(self) -> bool:
        return self.count != 0 or bool(self.ids)

    @classmethod
    def parse(cls, text: str) -> Gpus:
        """`all`, a number, `device=0,1` or a list of ids `0,1`. Raises ValueError."""
        text = text.strip()
        if text in ("", "0", "none"):
            return cls()
        if text == "all":
            return cls(-1)
        if text.isdecimal():
            return cls(int(text))
        ids = tuple(one.strip() for one in text.removeprefix("device=").split(","))
        if not all(one[:1].isalnum() and set(one) <= _GPU_ID for one in ids):
            raise ValueError(f"invalid GPUs: {text!r} (all, a number, or ids as 0,1)")
        return cls(ids=ids)


_GPU_ID = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-.:_/")


class ContainerSpec(Struct, frozen=True, kw_only=True):
    """Everything about a container. What is not here is locked down on every engine: no
    capabilities, no-new-privileges, a seccomp profile, private namespaces, no devices, an init that
    forwards signals and reaps orphans, core dumps off, at most 1024 open files."""

    name: str
    """`penstock-` and letters and digits: safe as a path and as a container's name."""
    image: str
    """Its id, as resolved."""
    cmd: tuple[str, ...] = ()
    """After the entrypoint; empty means the image's own command."""
    entrypoint: tuple[str, ...] | None = None
    """In place of the image's entrypoint and of its command; None means the image's own."""
    env: Mapping[str, str] = {}
    user: tuple[int, int] = (65534, 65534)
    user_namespace: bool = False
    """Map `user` to an unprivileged user of the machine. Raises Unsupported where the engine
    can't."""
    workdir: str = ""
    home: str = "/tmp"
    """HOME, unless `env` has one."""
    memory: int
    """Bytes, swap included."""
    cpus: float
    pids: int
    tmp: int
    """Bytes of /tmp: a tmpfs, nosuid, nodev, noexec, writable by every user of the container."""
    shm: int = 64 << 20
    """Bytes of /dev/shm; what is used of it counts as memory."""
    file_size: int = 0
    """Bytes that a single file may have (a resource limit); 0 means no limit."""
    network: str = NO_NETWORK
    """`none` (only loopback), `bridge`, or the name of a network that the engine has."""
    mounts: tuple[Mount, ...] = ()
    gpus: Gpus = Gpus()
    """Raises Unsupported where there are none, or the engine can't pass them on."""
    read_only_root: bool = True
    """False gives the container a writable layer on disk, which is removed with it."""
    runtime: str = ""
    """Empty means the engine's default."""
    labels: Mapping[str, str] = {}

    def args(self, image: Image) -> tuple[str, ...]:
        """The whole command of the container."""
        if self.entrypoint is not None:
            return (*self.entrypoint, *self.cmd)
        return (*image.entrypoint, *(self.cmd or image.cmd))


class BuildRequest(Struct, frozen=True, kw_only=True):
    """An image to build, without network and without pulling."""

    tag: str
    context: Path
    """A folder that the worker made, with a file `Dockerfile`; no links in it lead outside."""
    memory: int
    cpus: float
    labels: Mapping[str, str] = {}


class ContainerState(StrEnum):
    CREATED = "created"
    """Made, never started."""
    RUNNING = "running"
    EXITED = "exited"


class ContainerSummary(Struct, frozen=True):
    """A container as the engine lists it."""

    name: str
    state: ContainerState
    labels: Mapping[str, str]
    created: float = 0


class ExitStatus(Struct, frozen=True):
    """How a container's main process ended."""

    code: int | None
    """None where the engine can't tell; 128 + n after signal n."""
    oom: bool = False
    """Whether the memory limit killed something in it (maybe not the main process)."""
    error: str = ""
    """What the engine says went wrong, if anything."""


class Chunk(Struct, frozen=True):
    """Some output of a container."""

    stream: Stream
    data: bytes
    gap: bool = False
    """Whether output before this chunk may be missing."""


class AttachSession(Protocol):
    """The standard streams of a container."""

    def output(self) -> AsyncIterator[Chunk]:
        """The output, live; ends when the container has closed both streams. The caller must keep
        reading: otherwise the container blocks, and a kill may block too."""

    async def send(self, data: bytes) -> None:
        """Write to standard input; returns quietly if the container does not read any more."""

    async def end_input(self) -> None:
        """Close standard input."""

    def close(self) -> None:
        """Detach at once, without waiting; output() then ends. May be called twice."""


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What an engine reports about itself."""

    name: str
    version: str
    runtimes: tuple[str, ...] = ()
    """Those that `ContainerSpec.runtime` may name."""
    root_dir: str = ""
    """Where it keeps images."""
    can_build: bool = False
    can_pull: bool = False
    networks: bool = False
    """Whether it can give containers a network."""
    no_gpus: str = "this engine gives containers no GPUs"
    """Why containers can't have GPUs; empty if they can, as far as is known."""
    user_namespaces: bool = False
    where: str = ""
    """Its socket or its program."""
    security: tuple[str, ...] = ()
    """Its security options, in its own words; with `NO_INIT` if it has no init program."""

    @property
    def has_seccomp(self) -> bool:
        """Whether containers run under a seccomp profile."""
        return any("seccomp" in word and "unconfined" not in word for word in self.security)


class ContainerEngine(Protocol):
    """Safe for use by many jobs at once, in one event loop.

    Every method raises EngineUnavailable when the engine gives no sensible answer in time.
    `remove`, `signal` and `kill` of a container that does not exist do nothing.
    """

    @property
    def name(self) -> str:
        """`docker`, `podman`, `oci`, or a plug-in's."""

    async def facts(self) -> EngineFacts: ...

    async def image(self, reference: str) -> Image:
        """By name or id. Raises ImageNotFound."""

    async def pull(self, reference: str, auth: RegistryAuth | None = None) -> Image:
        """Fetch it. Raises ImageNotFound if the registry has none, or PullFailed."""

    async def build(self, request: BuildRequest, on_log: Callable[[bytes], None]) -> Image:
        """Build it; `on_log` gets the build's log. Raises BuildFailed, Unsupported. After a
        cancellation nothing of the build goes on."""

    async def create(self, spec: ContainerSpec) -> None:
        """Make a container, not yet started. Raises ImageNotFound, CommandNotFound, Unsupported,
        EngineError; a name that is taken is an EngineError. After any error nothing is left."""

    async def attach(self, name: str, *, stdin: bool) -> AttachSession:
        """Attach to a container before `start`."""

    async def reattach(self, name: str, received: Mapping[Stream, int]) -> AttachSession:
        """The output of a started container, running or ended, from these offsets on: what was
        written while nobody was attached comes from the engine's own log. A chunk with `gap`
        marks where the log may not reach back far enough."""

    async def start(self, name: str) -> None:
        """Raises CommandNotFound, CommandNotRunnable; or the container ends at once, with the words
        of its init program (`command_failure`)."""

    async def wait(self, name: str) -> ExitStatus:
        """Until the main process has ended; at once if it has. Raises ContainerNotFound."""

    async def usage(self, name: str) -> Usage:
        """Peak memory and processor time, also after the container's end until it is removed; None
        for what the engine can't tell. Raises only EngineUnavailable."""

    async def signal(self, name: str, number: int) -> None: ...

    async def kill(self, name: str) -> None:
        """SIGKILL to everything in it."""

    async def remove(self, name: str) -> None:
        """Remove the container, running or not. When this returns, no process, mount, cgroup or
        file of it is left."""

    async def find(self, labels: Mapping[str, str]) -> list[ContainerSummary]:
        """Containers that have all of these labels; an empty value matches any."""

    async def images(self, labels: Mapping[str, str]) -> list[Image]: ...

    async def remove_image(self, reference: str) -> None: ...

    async def close(self) -> None: ...
