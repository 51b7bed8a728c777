"""What a setting may be, where its type does not say it all.

Each rule takes a value and raises ValueError with what is wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

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
from penstock.core.errors import InvalidRequest
from penstock.core.pointer import Source, parse_source
from penstock.workloads.pipes.ranges import parse_layers

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


def _check_pipe_listen(text: str) -> None:
    parse_host_port(text)


def _check_pipe_join(addresses: tuple[str, ...]) -> None:
    for address in addresses:
        _, port = parse_host_port(address)
        if port == 0:
            raise ValueError(f"{address!r} names no port to connect to")


def _check_pipe_advertise(text: str) -> None:
    if text:
        _check_pipe_join((text,))


def _check_pipe_layers(text: str) -> None:
    parse_layers(text)


RULES: Mapping[str, Callable[[Any], None]] = {
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
    "pipe_layers": _check_pipe_layers,
    "pipe_listen": _check_pipe_listen,
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
    if settings.pipe_model and not settings.pipe_end_model and not _has_layers(settings):
        return "pipe_layers", "a node without layers and without pipe_end_model is of no use"
    if settings.pipe_memory and settings.pipe_cache > settings.pipe_memory:
        return "pipe_cache", f"is more than pipe_memory ({settings.pipe_memory})"
    if settings.pipe_silence <= settings.pipe_ping:
        return "pipe_silence", f"is not more than pipe_ping ({settings.pipe_ping:g})"
    return None


def _has_layers(settings: Settings) -> bool:
    return parse_layers(settings.pipe_layers) != ()


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
