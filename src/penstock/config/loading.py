"""Reading Settings: file, then environment, then flags; what comes later wins.

Every wrong key, type or value is refused with the place it stands at, what is wrong with
it, and what is allowed there. `RULES` has what a setting may be where its type does not say it
all: each rule takes a value and raises ValueError with what is wrong.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.inspect import (
    BoolType,
    DictType,
    EnumType,
    FloatType,
    IntType,
    StrType,
    UnionType,
    VarTupleType,
    type_info,
)

from penstock.config.settings import MAX_SOCKET_PATH, Pool, Settings, fits_socket
from penstock.core.check import check_name, check_pairs
from penstock.core.errors import InvalidRequest, Misconfigured, did_you_mean
from penstock.core.pointer import Source, parse_source
from penstock.workloads.pipes.ranges import parse_layers

FILE = "penstock.toml"
PREFIX = "PENSTOCK_"
NOT_SETTINGS = frozenset(
    {
        "PENSTOCK_CONFIG",
        "PENSTOCK_CONNECT",
        "PENSTOCK_FAILPOINT",
        "PENSTOCK_TOKEN",
    }
)
"""Variables that other parts of Penstock read."""
RESERVED = "PENSTOCK_X_"
"""Variables that plug-ins and tests may use as they like."""

_KUBERNETES = re.compile(
    r"(\w+_)?SERVICE_(HOST|PORT(_\w+)?)=.*"
    r"|(\w+_)?PORT(_\d+_\w+)?=(tcp|udp|sctp)://.*"
    r"|(\w+_)?PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*",
    re.S,
)
"""NAME=VALUE, without our prefix: what Kubernetes tells every container of a namespace about a
Service whose name begins with `penstock`."""

TYPES = get_type_hints(Settings, include_extras=True)
_PATHS = {name for name, kind in TYPES.items() if kind in (Path, Path | None)}


class Layer(Struct, frozen=True):
    """One place that settings come from."""

    values: Mapping[str, Any]
    place: Callable[[Sequence[str]], str]
    """Where a key stands, as an error says it."""
    folder: Path
    """What relative paths are relative to."""
    text: bool = False
    """Whether values are written as text, as in the environment."""


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from a file, the environment and flags (those that aren't None).

    Without `file` it is the one that PENSTOCK_CONFIG names, or penstock.toml in the
    current folder if there is one.
    """
    environ = os.environ if environ is None else environ
    layers = [_from_environ(environ), _from_flags(flags or {})]
    if (path := _find_file(file, environ)) is not None:
        layers.insert(0, _from_file(path))
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for layer in layers:
        for key, value in layer.values.items():
            values[key] = _convert(layer, key, value)
            places[key] = layer.place([key])
    settings = Settings(**values)
    if found := check_together(settings):
        key, problem = found
        raise Misconfigured(f"{places.get(key, 'the defaults')}: {key}: {problem}")
    return settings


def _find_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if named := environ.get("PENSTOCK_CONFIG"):
        return Path(named)
    return here if (here := Path(FILE)).exists() else None


def _from_file(path: Path) -> Layer:
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise Misconfigured(
            f"{path}: can't be read: {error.strerror}",
            hint="name another file with --config or PENSTOCK_CONFIG, or leave it out",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{path}: is not valid TOML: {error}") from None

    def place(key: Sequence[str]) -> str:
        line = _line_of(text, key)
        return f"{path}, line {line}" if line else str(path)

    return Layer(values, place, path.resolve().parent)


def _from_environ(environ: Mapping[str, str]) -> Layer:
    values = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX)
        and name not in NOT_SETTINGS
        and not name.startswith(RESERVED)
        and not _KUBERNETES.fullmatch(f"{name.removeprefix(PREFIX)}={value}")
    }
    return Layer(values, lambda key: PREFIX + key[0].upper(), Path.cwd(), text=True)


def _from_flags(flags: Mapping[str, Any]) -> Layer:
    values = {key: value for key, value in flags.items() if value is not None}
    return Layer(values, lambda key: f"option {key[0]}", Path.cwd(), text=True)


def _convert(layer: Layer, key: str, value: Any) -> Any:
    if key not in TYPES:
        raise Misconfigured(
            f"{layer.place([key])}: there is no setting {key!r}", hint=did_you_mean(key, TYPES)
        )
    try:
        return _checked(layer, key, value)
    except _Wrong as error:
        inner, problem, hint = error.inner, error.problem, error.hint
    except ValueError as error:
        inner, problem, hint = [], str(error), ""
    raise Misconfigured(
        f"{layer.place([key, *inner])}: {'.'.join([key, *inner])}: {problem}", hint=hint
    )


def _checked(layer: Layer, key: str, value: Any) -> Any:
    kind = TYPES[key]
    if layer.text and isinstance(value, str):
        value = _from_text(kind, value)
    if key in _PATHS:
        value = _path(layer.folder, value)
    elif key == "pools" and isinstance(value, dict):
        # One by one, so that an error can say which.
        value = {name: _typed(pool, Pool, layer, [name]) for name, pool in value.items()}
    value = _typed(value, kind, layer, [])
    if key in RULES:
        RULES[key](value)
    return value


class _Wrong(Exception):
    """A value, or one inside it, that has not the right type."""

    def __init__(self, inner: list[str], problem: str, hint: str) -> None:
        self.inner, self.problem, self.hint = inner, problem, hint


def _typed(value: Any, kind: Any, layer: Layer, inner: list[str]) -> Any:
    try:
        return msgspec.convert(value, kind, strict=not layer.text)
    except msgspec.ValidationError as error:
        message, _, where = str(error).replace("`", "").partition(" - at $")
    inner = [*inner, *(part for part in re.split(r"[.\[\]]+", where) if part)]
    if unknown := re.fullmatch(r"Object contains unknown field (.*)", message):
        inner = [*inner, unknown[1]]
        raise _Wrong(inner, "unknown key", did_you_mean(unknown[1], Pool.__struct_fields__))
    problem = message[0].lower() + message[1:]
    raise _Wrong(inner, problem, "" if inner or kind is Pool else allowed(kind))


def _from_text(kind: Any, text: str) -> Any:
    """Lists as JSON or with commas between, tables as JSON; all else is read as it stands."""
    origin = getattr(kind, "__origin__", None)
    if origin is dict or (origin is tuple and text.lstrip().startswith("[")):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"is not valid JSON: {error}") from None
    if origin is tuple:
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _path(folder: Path, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{value!r} is not a path")
    text = os.fsdecode(value)
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not a path")
    return Path(os.path.realpath(folder / os.path.expanduser(text)))


def _line_of(text: str, key: Sequence[str]) -> int | None:
    """The line at which a key, or else the nearest table above it, is written."""
    table: list[str] = []
    best: tuple[int, int] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = full = _parts(header[1])
        elif pair := re.match(r"\s*([\w.\"'-]+)\s*=", line):
            full = table + _parts(pair[1])
        else:
            continue
        if list(key[: len(full)]) == full and (best is None or len(full) > best[0]):
            best = (len(full), number)
        elif best is None and full[0] == key[0]:
            best = (0, number)
    return best[1] if best else None


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


# -- rules ------------------------------------------------------------------------

_GLOB = re.compile(r"[A-Za-z0-9_.*?\[\]!-]{1,200}", re.ASCII)


def _check_data_dir(path: Path) -> None:
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is not a folder")


def _check_file(path: Path | None) -> None:
    if path is not None and not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")


def _check_containers(engine: str) -> None:
    if engine and engine not in _ENGINES and not engine.startswith("unix:///"):
        raise ValueError(f"{engine!r} is not {', '.join(_ENGINES)} or unix:///path")


_ENGINES = ("auto", "docker", "podman", "oci")


def _check_listen(addresses: tuple[str, ...]) -> None:
    if not addresses:
        raise ValueError("names no address: leave it out for the socket in data_dir")
    for address in addresses:
        if address.startswith("unix:"):
            _check_unix(address.removeprefix("unix:"))
        elif address.startswith("tcp://"):
            _check_tcp(address)
        else:
            raise ValueError(f"{address!r} is not unix:, unix:/path or tcp://127.0.0.1:PORT")


def _check_unix(path: str) -> None:
    if path and not path.startswith("/"):
        raise ValueError(f"{path!r} is not an absolute path")
    if not fits_socket(Path(path)):
        raise ValueError(f"{path!r} is longer than the {MAX_SOCKET_PATH} bytes a socket may have")


def _check_tcp(address: str) -> None:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if port is None or parts.path or parts.query or parts.username:
        raise ValueError(f"{address!r} is not tcp://127.0.0.1:PORT, with a port of 0 to 65535")
    if host != "localhost" and not _is_loopback(host):
        raise ValueError(
            f"{address!r} is not on this machine's loopback; to reach the engine from "
            "elsewhere, tunnel to it (as with ssh -L)"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _check_pools(pools: dict[str, Pool]) -> None:
    for name, pool in pools.items():
        try:
            check_name(f"pool {name!r}", name)
            check_pairs(f"{name}.labels", pool.labels)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        for topic in pool.topics:
            if not _GLOB.fullmatch(topic):
                raise ValueError(f"{name}.topics: {topic!r} is no topic or glob, as job.text.*")


def _check_sources(sources: tuple[str, ...]) -> None:
    for source in sources:
        parse_source(source)


def _check_http(text: str) -> None:
    if text:
        parse_host_port(text)


def parse_host_port(text: str) -> tuple[str, int]:
    """`127.0.0.1:7470`, `[::1]:7470` or `localhost:0`. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{text!r} is not HOST:PORT, as 127.0.0.1:7470")
    if ":" in host and not bracketed:
        raise ValueError(f"{text!r}: write the address in brackets, as [::1]:7470")
    return host.strip("[]"), int(port)


def _check_pipe_join(addresses: tuple[str, ...]) -> None:
    for address in addresses:
        _, port = parse_host_port(address)
        if port == 0:
            raise ValueError(f"{address!r} names no port to connect to")


def _check_pipe_advertise(text: str) -> None:
    if text:
        _check_pipe_join((text,))


RULES: Mapping[str, Callable[[Any], object]] = {
    "container_config": _check_file,
    "containers": _check_containers,
    "data_dir": _check_data_dir,
    "rules": _check_file,
    "http": _check_http,
    "http_certificate": _check_file,
    "http_private_key": _check_file,
    "listen": _check_listen,
    "pipe_advertise": _check_pipe_advertise,
    "pipe_join": _check_pipe_join,
    "pipe_layers": parse_layers,
    "pipe_listen": parse_host_port,
    "pools": _check_pools,
    "sources": _check_sources,
}


def check_together(settings: Settings) -> tuple[str, str] | None:
    """The first setting that does not go with another, and why."""
    if settings.lost_grace > settings.lease:
        return "lost_grace", f"is longer than the lease ({settings.lease:g})"
    for limit in ("max_input", "max_result"):
        if settings.inline_limit > getattr(settings, limit):
            return limit, f"is less than inline_limit ({settings.inline_limit})"
    if (settings.http_certificate is None) != (settings.http_private_key is None):
        return "http_certificate", "goes with http_private_key: set both, or none"
    if (found := _check_pipe(settings)) is not None:
        return found
    for source in settings.sources:
        if _holds(parse_source(source), settings.data_dir):
            return "sources", f"{source!r} would let jobs read the engine's token and database"
    return None


def _check_pipe(settings: Settings) -> tuple[str, str] | None:
    if settings.pipe_source is not None and not settings.pipe_model:
        return "pipe_source", "needs pipe_model, the name of the model"
    if settings.pipe_end_model and not settings.pipe_model:
        return "pipe_end_model", "needs pipe_model, the model whose text is handled here"
    has_layers = parse_layers(settings.pipe_layers) != ()
    if settings.pipe_model and not settings.pipe_end_model and not has_layers:
        return "pipe_layers", "a node without layers and without pipe_end_model is of no use"
    if settings.pipe_memory and settings.pipe_cache > settings.pipe_memory:
        return "pipe_cache", f"is more than pipe_memory ({settings.pipe_memory})"
    if settings.pipe_silence <= settings.pipe_ping:
        return "pipe_silence", f"is not more than pipe_ping ({settings.pipe_ping:g})"
    return None


def _holds(source: Source, data_dir: Path) -> bool:
    return source.scheme == "file" and data_dir.is_relative_to(os.path.realpath(source.path))


def allowed(kind: Any) -> str:
    """What a value of this type may be, in a few words."""
    match type_info(kind):
        case IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case FloatType(ge=low, le=high):
            return f"a number from {low:g} to {high:.10g}"
        case EnumType(cls=cls):
            return "one of " + ", ".join(f'"{member.value}"' for member in cls)
        case BoolType():
            return "true or false"
        case StrType():
            return "a string"
        case VarTupleType():
            return "a list of strings"
        case DictType(value_type=StrType()):
            return "a table of strings"
        case DictType():
            return "a table of pools"
        case UnionType():
            return allowed(next(t for t in get_args(kind) if t is not type(None)))
        case _:
            return "a path"
