"""The configuration of a container worker, and how it is read: a YAML file, then the environment,
then flags; the later ones win.

The sentence below each field is its documentation. The names worker_id, port, max_concurrent_jobs
and labels, and those of the environment, are the protocol's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.core.errors import Misconfigured, did_you_mean
from penstock.workloads.container.job import Limits
from penstock.workloads.container.protocol.image_rules import check_pattern

if TYPE_CHECKING:
    from penstock.config import Settings

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


class ImageRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What jobs may run."""

    allowed: tuple[str, ...] = ("*",)
    """Images that jobs may name: `name:tag`, `name:*`, `name@sha256:…` or `sha256:…` (an image's
    id); `*` alone is any. A digest is compared with what the name means when the job starts."""
    pull: Pull = Pull.MISSING
    """Whether an image that is not here is fetched: `missing` or `never`."""
    registry_auth_file: Path | None = None
    """A file with logins for registries, written as Docker's `config.json`; without one, Docker's
    own is read (`~/.docker/config.json`) with its credential helpers."""
    max_bytes: Size = 16 << 30
    """Bytes that an image may have, unpacked, where the engine is `oci`."""
    network: tuple[str, ...] = ()
    """Images, written as in `allowed`, whose jobs may ask for one of `networks`."""
    writable: tuple[str, ...] = ()
    """Images, written as in `allowed`, whose jobs may ask for a root file system that they can
    write to (`runtime.read_only: false`)."""
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
    """URI prefixes below which a pointer may lead, as `s3://bucket/in`, for a standalone
    worker; under an engine its `storage.sources` count."""


class SandboxDefaults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What jobs get that do not ask for it. What is set here needs no grant in `images`: set it for
    images that write outside of /tmp, need a network, or run as root."""

    user: Annotated[str, Meta(pattern=r"^[0-9]{1,10}(:[0-9]{1,10})?$")] = "65534:65534"
    """The user of containers, as `uid` or `uid:gid`."""
    network: str = "none"
    """`none`, `bridge`, or the name of a network of the engine."""
    read_only: bool = True
    """Whether the root file system is read-only."""


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a container worker."""

    worker_id: str = "worker-unnamed"
    """How it calls itself."""
    host: str = "127.0.0.1"
    """Where it listens; anything but loopback needs a token."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 9000
    """0 takes a free one."""
    socket: Path | None = None
    """A Unix socket to listen on, in place of `host` and `port`; only its owner can connect."""
    tls_certificate: Path | None = None
    """A PEM file with a certificate: HTTPS in place of HTTP."""
    tls_key: Path | None = None
    """A PEM file with its key, if that is not in the same file."""
    hosts: tuple[str, ...] = ()
    """Names by which callers may call it, besides its own; a request to any other name is
    answered 421 on loopback."""
    token: str = ""
    """What callers must send as `Authorization: Bearer …`; empty means nothing, on loopback."""
    token_file: Path | None = None
    """A file with the token, in place of `token`."""
    public_info: bool = False
    """Whether `GET /info` is answered without the token, as `GET /health` always is: for pages that
    only look at workers."""
    cors: tuple[str, ...] = ()
    """Origins of web pages that may read from it, as `http://localhost:10000`; `*` is any. No page
    may submit or cancel, unless it has the token."""
    labels: tuple[str, ...] = ()
    """Shown by /info, for callers that choose among workers."""
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
    sandbox: SandboxDefaults = SandboxDefaults()
    """What jobs get that do not ask for it."""
    networks: tuple[str, ...] = ("bridge",)
    """Networks that jobs may ask for, where `images.network` lists their image."""
    mounts: tuple[Path, ...] = ()
    """Folders of this machine that jobs may mount, read-only, and folders below them: models, data
    sets, caches."""
    user_namespaces: bool = False
    """Whether containers run in a user namespace; refused where the engine has none."""
    unconfined: bool = False
    """Whether a Docker or Podman that runs containers without a seccomp profile may be used."""
    runtime: str = ""
    """The runtime for containers: `runc`, `crun`, `runsc`; empty means the engine's own choice."""
    jobs_dir: Path = Path("containers")
    """Where the files of running jobs and the images of the `oci` engine are kept; else the folder
    `containers` in Penstock's data folder."""
    docker_root_dir: Path | None = None
    """The folder whose disk /health tells of; else the one that the engine names."""
    defaults: Limits = Limits()
    """The limits of a job that names none."""
    max_limits: Limits = Limits(
        memory_mb=4096,
        max_runtime_seconds=86_400,
        cpus=float(os.cpu_count() or 1),
        pids=4096,
        max_output_bytes=64 << 20,
        max_log_bytes=1 << 30,
        tmp_mb=1024,
        shm_mb=4096,
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
    """What becomes of running containers when a worker stops or is restarted: `adopt` lets them
    run and reattaches to them, `end` ends them."""
    reattach_seconds: Seconds = 600
    """Seconds that a job whose worker is gone waits for one on the same machine."""
    retention: Seconds = 7 * 86_400
    """Seconds for which records, output and artifacts of ended jobs are kept; 0 means for ever."""
    image_retention: Seconds = 0
    """Seconds after which an image that this worker pulled, and no job used since, is removed; 0
    means never."""
    disk_low_mb: Annotated[float, Meta(ge=0)] = 512
    """Free space below which no job is taken."""


# -- reading ----------------------------------------------------------------------------------

VARIABLES = {
    "WORKER_ID": "worker_id",
    "WORKER_PORT": "port",
    "WORKER_TOKEN": "token",
    "WORKER_TOKEN_FILE": "token_file",
    "MAX_CONCURRENT_JOBS": "max_concurrent_jobs",
    "WORKER_JOBS_DIR": "jobs_dir",
    "DOCKER_ROOT_DIR": "docker_root_dir",
}
_ALIASES = {"workerId": "worker_id", "maxConcurrentJobs": "max_concurrent_jobs"}
"""Spellings that the protocol's own worker takes as well."""
_PATHS = ("jobs_dir", "token_file", "socket", "tls_certificate", "tls_key")
_LIMITS = ("defaults", "max_limits")
_LOOPBACK = ("127.", "::1", "localhost")


def executor_config(settings: Settings) -> WorkerConfig | None:
    """What container jobs may do under an engine; None if it runs none."""
    if not settings.containers.engine:
        return None
    flags = {"engine": settings.containers.engine}
    return placed(load_config(settings.containers.config, {}, flags), settings)


def placed(config: WorkerConfig, settings: Settings) -> WorkerConfig:
    """With a folder, if none was named."""
    if config.jobs_dir != WorkerConfig().jobs_dir:
        return config
    return replace(config, jobs_dir=settings.containers_dir)


def load_config(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> WorkerConfig:
    """Raises Misconfigured. Flags that are None are not given."""
    environ = os.environ if environ is None else environ
    values = _from_file(file) if file is not None else {}
    config = _converted(values, str(file))
    said = {field: environ[name] for name, field in VARIABLES.items() if environ.get(name)}
    for field, value in said.items():
        config = _with(config, field, value, _variable(field))
    if ("token" in said) != ("token_file" in said):  # it wins over the file's other one, too
        other = {"token_file": None} if "token" in said else {"token": ""}
        config = replace(config, **other)
    for field, value in (flags or {}).items():
        if value is not None:
            config = _with(config, field, value, f"option {field}")
    config = _with_token(config)
    _check_together(config)
    return config


def _from_file(file: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise Misconfigured(f"{file}: can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{file}: is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise Misconfigured(f"{file}: is not a map of settings")
    values = {_ALIASES.get(str(key), str(key)): value for key, value in values.items()}
    for name in _PATHS:
        if isinstance(path := values.get(name), str):
            values[name] = str(file.resolve().parent / os.path.expanduser(path))
    return values


def _converted(values: dict[str, Any], place: str) -> WorkerConfig:
    values |= {name: _limits(name, values[name], place) for name in _LIMITS if name in values}
    try:
        return msgspec.convert(values, WorkerConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace("`", "").partition(" - at $")
    path = where.strip(".")
    if unknown := re.fullmatch(r"Object contains unknown field (.*)", message):
        known = WorkerConfig.__struct_fields__
        hint = did_you_mean(unknown[1], known)
        raise Misconfigured(
            f"{place}: {path + ': ' if path else ''}there is no setting {unknown[1]!r}", hint=hint
        )
    raise Misconfigured(f"{place}: {path}: {message[0].lower() + message[1:]}")


def _limits(name: str, given: Any, place: str) -> Any:
    """A file need not name all of them: the others stay as they are without it."""
    if not isinstance(given, dict):
        return given
    usual: dict[str, Any] = msgspec.to_builtins(getattr(WorkerConfig(), name))
    for key in given:
        if key not in usual:
            hint = did_you_mean(str(key), usual)
            raise Misconfigured(f"{place}: {name}: there is no limit {key!r}", hint=hint)
    return usual | given


def _with(config: WorkerConfig, field: str, value: Any, place: str) -> WorkerConfig:
    kind = WorkerConfig.__annotations__[field]
    try:
        converted = msgspec.convert({field: value}, WorkerConfig, strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        message = str(error).replace("`", "").partition(" - at $")[0]
        raise Misconfigured(
            f"{place}: {value!r}: {message[0].lower() + message[1:]}", hint=f"{field}: {kind}"
        ) from None
    return replace(config, **{field: getattr(converted, field)})


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise ValueError(f"expected {kind.__name__.lower()}, got {type(value).__name__}")


def _with_token(config: WorkerConfig) -> WorkerConfig:
    if config.token_file is None:
        return config
    if config.token:
        raise Misconfigured("token and token_file: set one of them")
    try:
        token = config.token_file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"token_file: {config.token_file} can't be read: {error}") from None
    if not token:
        raise Misconfigured(f"token_file: {config.token_file} is empty")
    return replace(config, token=token)


def _variable(field: str) -> str:
    return next(name for name, meant in VARIABLES.items() if meant == field)


def _check_together(config: WorkerConfig) -> None:
    images = config.images
    for name in ("allowed", "network", "writable", "root", "sandboxed"):
        _check_patterns(f"images.{name}", getattr(images, name))
    _check_patterns("build.bases", config.build.bases)
    check_reach(config)
    for field in config.defaults.__struct_fields__:
        wanted, most = getattr(config.defaults, field), getattr(config.max_limits, field)
        if not 0 < wanted <= most:
            raise Misconfigured(
                f"defaults.{field}: {wanted:g} must be above 0 and at most "
                f"max_limits.{field} ({most:g})"
            )


def check_reach(config: WorkerConfig) -> None:
    """Raise Misconfigured if other machines could submit jobs without a token."""
    reachable = config.socket is None and not config.host.startswith(_LOOPBACK)
    if reachable and not config.token:
        raise Misconfigured(
            f"host: {config.host} can be reached from other machines, and there is no token",
            hint="set token_file or the variable WORKER_TOKEN, or listen on 127.0.0.1",
        )


def _check_patterns(place: str, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise Misconfigured(f"{place}: {error}") from None
