"""What the engine API answers: only the fields that are used, and never trusted to be there."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field

from penstock.workloads.container.engine import ContainerState, ContainerSummary, Image
from penstock.workloads.container.job import Usage


class Answer(Struct, frozen=True, rename="pascal"):
    """An object of the API; unknown keys are passed over."""


class Refusal(Struct, frozen=True):
    """The body of an error."""

    message: str


class Version(Answer, frozen=True):
    version: str
    api_version: str
    min_api_version: str = field(default="", name="MinAPIVersion")
    components: tuple[Mapping[str, Any], ...] | None = None

    @property
    def is_podman(self) -> bool:
        return any("podman" in str(part.get("Name")).lower() for part in self.components or ())


class Info(Answer, frozen=True):
    docker_root_dir: str
    init_commit: Mapping[str, Any] | None = None
    runtimes: Mapping[str, object] | None = None
    default_runtime: str = ""
    security_options: tuple[str, ...] | None = None

    @property
    def has_init(self) -> bool:
        """Docker runs its init program for the version; Podman says nothing."""
        return (self.init_commit or {}).get("ID") != "N/A"


class ImageConfig(Answer, frozen=True):
    entrypoint: tuple[str, ...] | str | None = None
    cmd: tuple[str, ...] | None = None
    env: tuple[str, ...] | None = None
    working_dir: str | None = None
    labels: Mapping[str, str] | None = None
    volumes: Mapping[str, object] | None = None


class ImageAnswer(Answer, frozen=True):
    """An image, by itself or in a list."""

    id: str
    repo_tags: tuple[str, ...] | None = None
    repo_digests: tuple[str, ...] | None = None
    size: int = 0
    created: str | float | None = None
    labels: Mapping[str, str] | None = None
    config: ImageConfig | None = None

    def value(self) -> Image:
        config = self.config or ImageConfig()
        entrypoint = config.entrypoint or ()
        return Image(
            id=self.id if ":" in self.id else f"sha256:{self.id}",
            digests=_named(self.repo_digests),
            tags=_named(self.repo_tags),
            size=self.size,
            entrypoint=(entrypoint,) if isinstance(entrypoint, str) else entrypoint,
            cmd=config.cmd or (),
            env=config.env or (),
            workdir=config.working_dir or "",
            created=_seconds(self.created),
            labels=self.labels or config.labels or {},
        )

    @property
    def volumes(self) -> tuple[str, ...]:
        """Folders that the image wants to be writable."""
        return tuple((self.config and self.config.volumes) or ())


class State(Answer, frozen=True):
    status: str = ""
    pid: int = 0
    oom_killed: bool = field(default=False, name="OOMKilled")


class ContainerAnswer(Answer, frozen=True):
    id: str
    state: State


class ListedContainer(Answer, frozen=True):
    names: tuple[str, ...] | None
    state: str
    labels: Mapping[str, str] | None = None
    created: float = 0

    def value(self) -> ContainerSummary:
        name = (self.names or ("",))[0].lstrip("/")
        return ContainerSummary(name, condition(self.state), self.labels or {}, self.created)


class Waited(Answer, frozen=True):
    status_code: int
    error: Mapping[str, Any] | None = None

    @property
    def failure(self) -> str:
        """Why the exit code is not known."""
        return str((self.error or {}).get("Message") or "")


class CpuUsage(Struct, frozen=True):
    total_usage: int = 0


class CpuStats(Struct, frozen=True):
    cpu_usage: CpuUsage = CpuUsage()


class MemoryStats(Struct, frozen=True):
    usage: int = 0
    max_usage: int = 0
    """Of cgroups of version 1."""


class Stats(Struct, frozen=True):
    """Of a running container; all zero once it has ended."""

    cpu_stats: CpuStats
    memory_stats: MemoryStats = MemoryStats()

    def value(self) -> Usage:
        memory = self.memory_stats.max_usage or self.memory_stats.usage
        return Usage(memory or None, self.cpu_stats.cpu_usage.total_usage / 1e9 or None)


class Progress(Struct, frozen=True, rename="camel"):
    """A line of the stream that a pull or a build answers."""

    stream: str = ""
    status: str = ""
    error: str = ""
    error_detail: Mapping[str, Any] | None = None

    @property
    def failure(self) -> str:
        return self.error or str((self.error_detail or {}).get("message") or "")


_NEVER_STARTED = frozenset(["created", "configured", "initialized", "initializing"])
_STARTED = frozenset(["running", "paused", "restarting", "stopping"])


def condition(status: str) -> ContainerState:
    """Docker's and Podman's words for how a container is."""
    if status in _NEVER_STARTED:
        return ContainerState.CREATED
    return ContainerState.RUNNING if status in _STARTED else ContainerState.EXITED


def _named(names: tuple[str, ...] | None) -> tuple[str, ...]:
    return tuple(name for name in names or () if "<none>" not in name)


def _seconds(time: str | float | None) -> float:
    if isinstance(time, float | int):
        return time
    try:
        parsed = datetime.fromisoformat(time or "")
    except ValueError:
        return 0
    return max(0.0, parsed.replace(tzinfo=parsed.tzinfo or UTC).timestamp())
