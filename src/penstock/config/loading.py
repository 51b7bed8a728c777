"""Reading Settings: file, then environment, then flags; what comes later wins.

Every wrong key, type or value is refused with the place it stands at, what is wrong with
it, and what is allowed there.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from msgspec import Struct

from penstock.config.rules import RULES, allowed, check_together
from penstock.config.settings import Pool, Settings
from penstock.core.errors import Misconfigured, did_you_mean

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
