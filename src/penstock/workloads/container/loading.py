"""Reading a WorkerConfig: a YAML file, then the environment, then flags; what comes later wins.

The environment's names are the protocol's. Every wrong key or value is refused with the place
it stands at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from penstock.core.errors import Misconfigured, did_you_mean
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.protocol.policy import check_pattern

if TYPE_CHECKING:
    from penstock.config import Settings

VARIABLES = {
    "WORKER_ID": "worker_id",
    "WORKER_PORT": "port",
    "WORKER_TOKEN": "token",
    "WORKER_TOKEN_FILE": "token_file",
    "MAX_CONCURRENT_JOBS": "max_concurrent_jobs",
    "WORKER_JOBS_DIR": "jobs_dir",
    "DOCKER_ROOT_DIR": "docker_root_dir",
}
_CAMEL = {"workerId": "worker_id", "maxConcurrentJobs": "max_concurrent_jobs"}
"""Spellings that the protocol's own worker takes as well."""
_LIMITS = ("defaults", "most")
_LOOPBACK = ("127.", "::1", "localhost")


def executor_config(settings: Settings) -> WorkerConfig | None:
    """What container jobs may do under an engine; None if it runs none."""
    if not settings.containers:
        return None
    flags = {"engine": settings.containers}
    return placed(load_config(settings.container_config, {}, flags), settings)


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
        config = msgspec.structs.replace(config, **other)
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
    values = {_CAMEL.get(str(key), str(key)): value for key, value in values.items()}
    for name in ("jobs_dir", "token_file"):
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
    return msgspec.structs.replace(config, **{field: getattr(converted, field)})


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
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
    return msgspec.structs.replace(config, token=token)


def _variable(field: str) -> str:
    return next(name for name, meant in VARIABLES.items() if meant == field)


def _check_together(config: WorkerConfig) -> None:
    images = config.images
    for name in ("allowed", "network", "root", "sandboxed"):
        _check_patterns(f"images.{name}", getattr(images, name))
    _check_patterns("build.bases", config.build.bases)
    if not config.host.startswith(_LOOPBACK) and not config.token:
        raise Misconfigured(
            f"host: {config.host} can be reached from elsewhere, and there is no token",
            hint="set a token (token: …), or listen on 127.0.0.1",
        )
    for field in config.defaults.__struct_fields__:
        wanted, most = getattr(config.defaults, field), getattr(config.most, field)
        if not 0 < wanted <= most:
            raise Misconfigured(
                f"defaults.{field}: {wanted:g} is not above 0 and at most most.{field} ({most:g})"
            )


def _check_patterns(place: str, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        try:
            check_pattern(pattern)
        except ValueError as error:
            raise Misconfigured(f"{place}: {error}") from None
