"""Reading Settings: file, then environment, then flags; what comes later wins.

Every wrong key, type or value is refused with the place it stands at, what is wrong with
it, and what is allowed there. `RULES` has what a setting may be where its type does not say it
all: each rule takes a value and raises ValueError with what is wrong.
"""

from __future__ import annotations

import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct, structs
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

from penstock.config.settings import (
    MAX_SOCKET_PATH,
    NodeSettings,
    Pool,
    Section,
    Settings,
    fits_socket,
)
from penstock.core.check import check_name, check_pairs
from penstock.core.errors import InvalidRequest, Misconfigured, did_you_mean
from penstock.core.pointer import Source, parse_source
from penstock.ports.address import parse_address
from penstock.workloads.pipes.config import parse_layers

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

RENAMED = {
    "http": "http.listen",
    "http_hosts": "http.allowed_hosts",
    "http_rate": "http.rate_limit",
    "openai_strict": "openai.strict",
    "image_sources": "openai.image_sources",
    "max_file": "openai.max_file",
    "batch_jobs": "openai.max_batch_jobs",
    "models": "models.serve",
    "models_dir": "models.dir",
    "containers": "containers.engine",
    "container_config": "containers.config",
    "timeout": "timeouts.run",
    "dispatch_timeout": "timeouts.dispatch",
    "lease": "timeouts.lease",
    "lost_grace": "timeouts.lost_grace",
    "reconnect_timeout": "timeouts.reconnect",
    "kill_grace": "timeouts.kill_grace",
    "drain_timeout": "timeouts.drain",
    "max_steps": "limits.max_checkpoint_rows",
    "max_step_bytes": "limits.max_checkpoint_bytes",
    "inline_limit": "storage.inline_limit",
    "retention": "storage.retention",
    "sources": "storage.sources",
    "pipe_chunk": "node.prefill_chunk_size",
    "pipe_pass": "node.pass_tokens",
    "pipe_keep": "node.keep_cache",
    "pipe_ping": "node.heartbeat",
    "pipe_silence": "node.lease",
    "pipe_open_timeout": "node.wait_timeout",
    **{f"http_{name}": f"http.{name}" for name in (
        "certificate", "private_key", "insecure", "max_body", "max_connections", "max_streams"
    )},
    **{name: f"limits.{name}" for name in (
        "max_waiting", "max_attempts", "max_input", "max_result", "max_artifact", "max_log_lines"
    )},
    **{f"model_{name}": f"models.{name}" for name in (
        "slots", "context", "threads", "memory", "gpu_layers", "tensor_split", "projector_gpu"
    )},
    **{f"pipe_{name}": f"node.{name}" for name in (
        "model", "source", "layers", "end_model", "local_layers", "listen", "advertise", "join",
        "key", "node_id", "dtype", "threads", "memory", "cache", "context", "max_jobs",
        "max_waiting", "print_times", "step_timeout", "drain"
    )},
}  # fmt: skip
"""Names from before there were sections; accepted, with a note, until the version after 0.2."""


SECTIONS: dict[str, type[Section]] = {
    name: kind
    for name, kind in get_type_hints(Settings).items()
    if isinstance(kind, type) and issubclass(kind, Section)
}
"""The tables of the settings file, except `pools`."""
TYPES: dict[str, Any] = {
    name: kind
    for name, kind in get_type_hints(Settings, include_extras=True).items()
    if name not in SECTIONS
} | {
    f"{section}.{name}": kind
    for section, fields in SECTIONS.items()
    for name, kind in get_type_hints(fields, include_extras=True).items()
}
"""Every setting by its full name, as `http.listen`."""

SECRETS = frozenset({"node.key"})
"""Settings that are never shown."""
_WITH_PASSWORD = ("store", "bus.url", "cap.memory")
_PASSWORD = re.compile(r"(?<=://)([^/@:]*:)[^/]*(?=@)|([?&]password=)[^&]*", re.I)
_HIDDEN = "********"

log = logging.getLogger("penstock.config")


class Layer(Struct, frozen=True):
    """One place that settings come from."""

    source: str
    """What kind of place: `file`, `environment` or `option`."""
    values: Mapping[str, Any]
    """By full name, or by section and name."""
    place: Callable[[Sequence[str]], str]
    """Where a key stands, as an error says it."""
    folder: Path
    """What relative paths are relative to."""
    text: bool = False
    """Whether values are written as text, as in the environment."""
    spelled: Callable[[str], str] = str
    """How a setting's full name is written there."""


class Loaded(Struct, frozen=True):
    """Settings, and how they came about."""

    settings: Settings
    origins: dict[str, str]
    """Where each setting that is no default was set, by full name."""
    sources: dict[str, str]
    """What kind of place that is: `file`, `environment` or `option`."""
    renamed: tuple[str, ...]
    """A line for each setting that was given by an old name."""
    ignored: tuple[str, ...]
    """Variables that begin as ours do, and are none."""


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from a file, the environment and flags (those that aren't None).

    Without `file` it is the one that PENSTOCK_CONFIG names, or penstock.toml in the
    current folder if there is one. Flags are named `concurrency`, `http__listen` or
    `http.listen`. Raises Misconfigured.
    """
    loaded = load_all(file, environ, flags)
    for line in loaded.renamed:
        _warn_once(line)
    return loaded.settings


def log_ignored() -> None:
    """Name the variables that begin as ours do, and are not settings."""
    if ignored := _variables(os.environ)[1]:
        log.info("not settings, so ignored: %s", ", ".join(ignored))


@cache
def _warn_once(line: str) -> None:
    log.warning("%s", line)


def load_all(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """What `load` reads, with the origin of each setting; it reports nothing."""
    environ = os.environ if environ is None else environ
    variables, ignored = _variables(environ)
    layers = [_from_environ(variables), _from_flags(flags or {})]
    if (path := _find_file(file, environ)) is not None:
        layers.insert(0, _from_file(path))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources: dict[str, str] = {}
    renamed: list[str] = []
    for layer in layers:
        for key, path_in_layer, value in _flat(layer, renamed):
            values[key] = _convert(layer, key, path_in_layer, value)
            origins[key], sources[key] = layer.place(path_in_layer), layer.source
    settings = Settings().changed(**{key.replace(".", "__"): values[key] for key in values})
    if found := check_together(settings):
        key, problem = found
        raise Misconfigured(f"{origins.get(key, 'the defaults')}: {key}: {problem}")
    return Loaded(settings, origins, sources, tuple(renamed), ignored)


def shown(settings: Settings, name: str) -> Any:
    """The value of a setting, by its full name, as JSON has it; a secret is masked."""
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    if name in SECRETS and value and not value.startswith("@"):
        return _HIDDEN
    if name in _WITH_PASSWORD:
        return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}", value)
    return msgspec.to_builtins(value, enc_hook=str)


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

    return Layer("file", values, place, path.resolve().parent)


def variable(name: str) -> str:
    """The environment variable of a setting, by its full name."""
    return PREFIX + name.replace(".", "__").upper()


def _from_environ(variables: Mapping[str, str]) -> Layer:
    values = {name.removeprefix(PREFIX).lower(): value for name, value in variables.items()}
    return Layer(
        "environment", values, lambda key: variable("__".join(key)), Path.cwd(), True, variable
    )


def _variables(environ: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Our variables, and the names of those that are foreign."""
    ours: dict[str, str] = {}
    foreign: list[str] = []
    for name, value in environ.items():
        if name.startswith(PREFIX) and name not in NOT_SETTINGS and not name.startswith(RESERVED):
            if _is_foreign(name.removeprefix(PREFIX), value):
                foreign.append(name)
            else:
                ours[name] = value
    return ours, tuple(sorted(foreign))


def _is_foreign(name: str, value: str) -> bool:
    """Whether a variable is somebody else's: Kubernetes', or with a name that is like none of
    ours. One that could be a misspelt setting is not, so that it is refused."""
    key = name.lower()
    if key.replace("__", ".") in TYPES or key in RENAMED:
        return False
    if _KUBERNETES.fullmatch(f"{name}={value}"):
        return True
    if "__" in name or key.partition("_")[0] in SECTIONS:
        return False
    from difflib import get_close_matches  # rarely needed, and slow to import

    return not get_close_matches(key, TYPES, 1, 0.75)


def _from_flags(flags: Mapping[str, Any]) -> Layer:
    values = {key: value for key, value in flags.items() if value is not None}
    return Layer("option", values, lambda key: f"option {'.'.join(key)}", Path.cwd(), text=True)


def _flat(layer: Layer, renamed: list[str]) -> Iterator[tuple[str, list[str], Any]]:
    """Each value by its full name, with the keys under which it stands in the layer. Values under
    old names come first, so that a new name wins. Raises Misconfigured if there is no such name."""
    given: list[tuple[list[str], Any]] = []
    for key, value in layer.values.items():
        if key in SECTIONS and isinstance(value, Section):
            value = structs.asdict(value)
        if key in SECTIONS and isinstance(value, dict):
            given += [([key, name], inner) for name, inner in value.items() if inner is not None]
        else:
            given.append((re.split(r"__|\.", key) if layer.text else [key], value))
    given.sort(key=lambda one: ".".join(one[0]) not in RENAMED)
    for path, value in given:
        key = ".".join(path)
        if key in RENAMED:
            place, new = layer.place(path), RENAMED[key]
            renamed.append(f"{place}: {layer.spelled(key)} is now {layer.spelled(new)}")
            key = new
        if key in SECTIONS:
            raise Misconfigured(f"{layer.place(path)}: {key} is a section, not a setting")
        if key not in TYPES:
            raise Misconfigured(
                f"{layer.place(path)}: there is no setting {key!r}", hint=_nearest(key, layer)
            )
        yield key, path, value


def _nearest(key: str, layer: Layer) -> str:
    """A hint at the setting that was probably meant, in whatever section it is."""
    from difflib import get_close_matches

    section, _, last = key.rpartition(".")
    known = [name for name in TYPES if section not in SECTIONS or name.startswith(f"{section}.")]
    named = {name: [name] for name in (*known, *([] if section or layer.text else SECTIONS))}
    for name in TYPES:
        short = name.rpartition(".")[2]
        named[short] = sorted({*named.get(short, ()), name})
    if near := [last] if last in named else get_close_matches(key, named, 1):
        return f"did you mean {' or '.join(map(layer.spelled, named[near[0]]))}?"
    return f"known are {', '.join(map(layer.spelled, sorted(known)))}"


def _convert(layer: Layer, key: str, path: Sequence[str], value: Any) -> Any:
    try:
        return _checked(layer, key, value)
    except _Wrong as error:
        inner, problem, hint = error.inner, error.problem, error.hint
    except ValueError as error:
        inner, problem, hint = [], str(error), ""
    place = layer.place(path if layer.text else [*path, *inner])
    raise Misconfigured(f"{place}: {'.'.join([key, *inner])}: {problem}", hint=hint)


def _checked(layer: Layer, key: str, value: Any) -> Any:
    kind = TYPES[key]
    if layer.text and isinstance(value, str):
        value = _from_text(kind, value)
    if kind in (Path, Path | None):
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
            "elsewhere, set link.listen (penstock up --link HOST:PORT)"
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
                raise ValueError(f"{name}.topics: {topic!r} is not a topic or glob, as job.text.*")


def _check_sources(sources: tuple[str, ...]) -> None:
    for source in sources:
        parse_source(source)


def _check_http(text: str) -> None:
    if text:
        parse_address(text)


def _check_join(addresses: tuple[str, ...]) -> None:
    for address in addresses:
        _, port = parse_address(address)
        if port == 0:
            raise ValueError(f"{address!r} names no port to connect to")


def _check_advertise(text: str) -> None:
    if text:
        _check_join((text,))


def _check_fingerprint(text: str) -> None:
    if text and not re.fullmatch(r"sha256:([0-9A-Fa-f]{2}:?){32}", text):
        raise ValueError(f"{text!r} is not sha256: and 64 hexadecimal digits")


RULES: Mapping[str, Callable[[Any], object]] = {
    "data_dir": _check_data_dir,
    "listen": _check_listen,
    "rules": _check_file,
    "pools": _check_pools,
    "http.listen": _check_http,
    "link.listen": _check_http,
    "link.advertise": _check_advertise,
    "link.certificate": _check_file,
    "link.private_key": _check_file,
    "link.ca": _check_file,
    "link.fingerprint": _check_fingerprint,
    "http.certificate": _check_file,
    "http.private_key": _check_file,
    "containers.engine": _check_containers,
    "containers.config": _check_file,
    "node.layers": parse_layers,
    "node.listen": parse_address,
    "node.advertise": _check_advertise,
    "node.join": _check_join,
    "storage.sources": _check_sources,
}


def check_together(settings: Settings) -> tuple[str, str] | None:
    """The first setting that does not go with another, and why."""
    timeouts, http, inline_limit = settings.timeouts, settings.http, settings.storage.inline_limit
    if timeouts.lost_grace > timeouts.lease:
        return "timeouts.lost_grace", f"is longer than timeouts.lease ({timeouts.lease:g})"
    for limit in ("max_input", "max_result"):
        if inline_limit > getattr(settings.limits, limit):
            return f"limits.{limit}", f"is less than storage.inline_limit ({inline_limit})"
    if (http.certificate is None) != (http.private_key is None):
        return "http.certificate", "goes with http.private_key: set both, or none"
    if (settings.link.certificate is None) != (settings.link.private_key is None):
        return "link.certificate", "goes with link.private_key: set both, or none"
    if settings.link.certificate is not None and settings.link.ca is None:
        return "link.certificate", "needs link.ca, the authority of the other side's certificate"
    if (found := _check_node(settings.node)) is not None:
        return found
    for source in settings.storage.sources:
        if _holds(parse_source(source), settings.data_dir):
            problem = f"{source!r} would let jobs read the engine's token and database"
            return "storage.sources", problem
    return None


def _check_node(node: NodeSettings) -> tuple[str, str] | None:
    if node.source is not None and not node.model:
        return "node.source", "needs node.model, the name of the model"
    if node.end_model and not node.model:
        return "node.end_model", "needs node.model, the model whose text is handled here"
    if node.model and not node.end_model and parse_layers(node.layers) == ():
        return "node.layers", "a node without layers and without node.end_model is of no use"
    if node.memory and node.cache > node.memory:
        return "node.cache", f"is more than node.memory ({node.memory})"
    if node.lease <= node.heartbeat:
        return "node.lease", f"is not more than node.heartbeat ({node.heartbeat:g})"
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
