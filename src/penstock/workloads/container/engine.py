"""What a worker needs of whatever runs containers.

An engine decides nothing: a `Plan` says everything, and every engine keeps to it. Errors are
of four kinds, so that a job's end can be told truthfully whichever engine it was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from penstock.workloads.container.job import Code, Stream, Usage

OWNER_LABEL = "penstock.owner"
"""Whose it is: an id that a worker keeps in its folder."""
JOB_LABEL = "penstock.job"
"""The job's id."""
DEADLINE_LABEL = "penstock.deadline"
"""Unix seconds after which nobody can want it any more."""

IMAGE_LABEL = "penstock.image"
"""The id of the image it was made from."""


NO_INIT = "no init"
"""A word of `EngineFacts.security`."""


class EngineError(Exception):
    """The engine did not do what it was asked."""

    code = Code.ENGINE_ERROR
    exit_code: int | None = 125


class EngineUnavailable(EngineError):
    """It can't be reached, or answers nonsense."""

    code = Code.ENGINE_UNAVAILABLE
    exit_code = None


class ImageNotFound(EngineError):
    code = Code.IMAGE_NOT_FOUND


class PullFailed(EngineError):
    code = Code.IMAGE_PULL_FAILED


class BuildFailed(EngineError):
    code = Code.BUILD_FAILED
    exit_code = None


class CommandNotFound(EngineError):
    code = Code.COMMAND_NOT_FOUND
    exit_code = 127


class CommandNotRunnable(EngineError):
    code = Code.COMMAND_NOT_RUNNABLE
    exit_code = 126


class NotThere(EngineError):
    """There is no such container."""


class Unsupported(EngineError):
    """This engine can't do that at all."""

    code = Code.RUNTIME_NOT_SUPPORTED


class Image(Struct, frozen=True, kw_only=True):
    """An image that is here."""

    id: str
    """`sha256:…`, of its configuration."""
    digests: tuple[str, ...] = ()
    """`name@sha256:…`, by which registries know it; none for one that was imported."""
    tags: tuple[str, ...] = ()
    size: int = 0
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    """As `NAME=value`."""
    workdir: str = ""
    created: float = 0
    labels: Mapping[str, str] = {}


class Mount(Struct, frozen=True):
    """A folder that the worker made, as the container sees it."""

    source: Path
    target: str
    read_only: bool = True


class Plan(Struct, frozen=True, kw_only=True):
    """Everything about a container, decided. What is not here is locked down: no capabilities,
    no-new-privileges, seccomp, read-only root, private namespaces, no devices, no log driver,
    an init that passes signals on, core dumps off, at most 1024 open files."""

    name: str
    """`penstock-` and letters and digits: safe as a path and as a container's name."""
    image: str
    """Its id, as resolved."""
    cmd: tuple[str, ...] = ()
    """After the image's entrypoint; none means the image's own command."""
    env: Mapping[str, str] = {}
    user: tuple[int, int] = (65534, 65534)
    workdir: str = ""
    memory: int
    """Bytes, swap included."""
    cpus: float
    pids: int
    tmp: int
    """Bytes of /tmp: a tmpfs, nosuid, nodev, noexec, writable by `user`."""
    file_size: int = 0
    """Bytes that a single file may have (a resource limit); 0 means as many as there is room."""
    network: bool = False
    """False means none but loopback."""
    mounts: tuple[Mount, ...] = ()
    runtime: str = ""
    """Empty means the engine's default."""
    labels: Mapping[str, str] = {}


class BuildPlan(Struct, frozen=True, kw_only=True):
    """An image to be made: no network, nothing pulled."""

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


class Found(Struct, frozen=True):
    """A container of ours that the engine knows."""

    name: str
    state: ContainerState
    labels: Mapping[str, str]
    created: float = 0


class Exit(Struct, frozen=True):
    """How a container's main process ended."""

    code: int | None
    """None where the engine can't tell; 128 + n after signal n."""
    oom: bool = False
    """Whether the memory limit killed something in it (maybe not the main process)."""
    error: str = ""
    """What the engine says went wrong with it, if anything."""


class Chunk(Struct, frozen=True):
    stream: Stream
    data: bytes


class Attached(Protocol):
    """The three streams of a container."""

    def output(self) -> AsyncIterator[Chunk]:
        """What it writes, live; ends when it has closed both streams. Whoever asked for it
        must go on taking, or the container stands still; and then so may a kill."""

    async def send(self, data: bytes) -> None:
        """To its standard input; returns quietly if it does not read any more."""

    async def end_input(self) -> None:
        """No more will come: it sees the end of the file."""

    def close(self) -> None:
        """Let go at once, without waiting; output() then ends. May be called twice."""


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What an engine says of itself."""

    name: str
    version: str
    runtimes: tuple[str, ...] = ()
    """Those that a Plan may name."""
    root_dir: str = ""
    """Where it keeps images."""
    can_build: bool = False
    can_pull: bool = False
    where: str = ""
    """Its socket or its program."""
    security: tuple[str, ...] = ()
    """What fences its containers in, in its own words; `NO_INIT` if it has no init program."""

    @property
    def has_seccomp(self) -> bool:
        """Whether containers are held to a list of system calls."""
        return any("seccomp" in word and "unconfined" not in word for word in self.security)


class Engine(Protocol):
    """Safe for use by many jobs at once, in one event loop.

    Every method raises EngineUnavailable when nobody (or nobody sane) answers within a decent
    time. `remove`, `signal` and `kill` of what is not there do nothing.
    """

    name: str
    """`docker`, `podman`, `oci`."""
    keeps_output: bool
    """Whether it keeps what a container writes while nobody is attached to it."""

    async def facts(self) -> EngineFacts: ...

    async def image(self, reference: str) -> Image:
        """By name or id. Raises ImageNotFound."""

    async def pull(self, reference: str) -> Image:
        """Fetch it. Raises ImageNotFound if the registry has none, or PullFailed."""

    async def build(self, plan: BuildPlan, say: Callable[[bytes], None]) -> Image:
        """Make it; `say` hears the build's log. Raises BuildFailed, Unsupported. On cancellation
        nothing of the build goes on."""

    async def create(self, plan: Plan) -> None:
        """Make a container, not yet started. Raises ImageNotFound, CommandNotFound, EngineError;
        a name that is taken is an EngineError. On any error nothing is left behind."""

    async def attach(self, name: str, *, stdin: bool) -> Attached:
        """Before `start`, or to a container that is already running (then without stdin). Of one
        that has ended an engine may have the last output still; others raise EngineError."""

    async def start(self, name: str) -> None:
        """Raises CommandNotFound, CommandNotRunnable."""

    async def wait(self, name: str) -> Exit:
        """Until the main process has ended; at once if it has. Raises NotThere."""

    async def usage(self, name: str) -> Usage:
        """Peak memory and processor time. Some engines can tell of a running container only,
        some after its end; what can't be told is None. Never raises but EngineUnavailable."""

    async def signal(self, name: str, number: int) -> None: ...

    async def kill(self, name: str) -> None:
        """SIGKILL to everything in it."""

    async def remove(self, name: str) -> None:
        """The container, running or not, and everything that the engine keeps for it: when this
        returns no process, mount, cgroup or file of it is left."""

    async def find(self, labels: Mapping[str, str]) -> list[Found]:
        """Containers that have all of these labels; an empty value means any."""

    async def images(self, labels: Mapping[str, str]) -> list[Image]: ...

    async def remove_image(self, reference: str) -> None: ...

    async def close(self) -> None: ...
