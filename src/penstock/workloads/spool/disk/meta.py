"""`meta.json`: what is known of a job, in the form that the original's tools read.

They look for `"key": ` in the text, so each key has a line of its own and one space after its
colon; what they don't know follows what they do. `type.txt` says the job's kind.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from penstock.core.errors import InvalidRequest
from penstock.workloads.spool.config import JobKind, SpoolOptions, Sync
from penstock.workloads.spool.disk.files import (
    OpenFolder,
    Unfit,
    read_file,
    read_optional,
    replace_file,
)

META, KIND, OPTIONS = "meta.json", "type.txt", "options.json"
_MOST = 1 << 20
_MOST_OPTIONS = 64 << 20
_DEEPEST = 64


class Meta(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field may be missing: its default stands for that, and is not written."""

    submitted_at: str = ""
    """UTC, with microseconds and a Z, as all times here."""
    mode: str = JobKind.TEXT
    parent: str = ""
    tags: tuple[str, ...] = ()
    completed_at: str = ""
    duration_s: float | None = None
    """Seconds from the claim to the end."""
    artifacts: tuple[str, ...] = ()
    """Names of files in the job's folder."""
    status: str = ""
    """`done` or `failed`."""
    # From here on the original knows nothing.
    retry_of: str = ""
    code: str = ""
    """Why it failed, for programs."""
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    tokens_per_second: float | None = None
    model: str = ""
    engine: str = ""
    seed: int | None = None
    attempts: int | None = None
    other: dict[str, Any] = field(default_factory=dict)
    """What another program wrote there; it is kept."""


_FIELDS = tuple(name for name in Meta.__struct_fields__ if name != "other")
_KNOWN = frozenset(_FIELDS)
_plain = msgspec.json.Decoder(Meta, strict=False).decode
"""For what our own tools wrote: no field that is unknown, and none that is null."""
_DECIMAL = ("duration_s", "tokens_per_second")
_ALWAYS = ("submitted_at", "mode")
_NO_OPTIONS = SpoolOptions()
_text = json.encoder.encode_basestring
_json = json.JSONEncoder(ensure_ascii=False).encode
_AT_THE_END = ("completed_at", "duration_s", "artifacts", "status")


def stamp(now: float) -> str:
    """A time as it is written."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def time_of(text: str) -> float | None:
    """What was written, in seconds since the epoch; None if it is no such time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def read_meta(folder: Path | str | OpenFolder) -> Meta:
    """Without the file, an empty one. Unfit if it is not JSON or a field is not what it is."""
    try:
        data = read_file(folder, META, _MOST)
    except FileNotFoundError:
        return Meta()
    try:
        meta = _plain(data)
        if not meta.other:
            return meta
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unfit(META, f"is not a JSON object: {error}") from None
    known: dict[str, Any] = {}
    for name in _KNOWN & found.keys():
        if (value := found.pop(name)) is not None:
            known[name] = value
    if found and not _is_flat(found, _DEEPEST):
        raise Unfit(META, f"is nested deeper than {_DEEPEST}")
    known["other"] = found
    try:
        return msgspec.convert(known, Meta, strict=False)
    except msgspec.ValidationError as error:
        raise Unfit(META, str(error)) from None


def _is_flat(value: Any, most: int) -> bool:
    """Whether it is nested no deeper: it has to be written again, whatever was called before."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return True
    return most > 0 and all(_is_flat(one, most - 1) for one in value)


def seen_meta(folder: Path | str | OpenFolder) -> Meta:
    """As much as can be told to somebody who only looks."""
    try:
        return read_meta(folder)
    except Unfit:
        return Meta()


def write_meta(folder: Path, meta: Meta, sync: Sync) -> None:
    replace_file(folder, META, encode_meta(meta), sync)


def encode_meta(meta: Meta) -> bytes:
    lines: list[str] = []
    needed = _ALWAYS + _AT_THE_END if meta.status else _ALWAYS
    for name, value in zip(_FIELDS, structs.astuple(meta), strict=False):
        if (value is None or value == "" or value == ()) and name not in needed:
            continue
        lines.append(f'  "{name}": {_decimal(value) if name in _DECIMAL else _value(value)}')
    lines += [f"  {_text(name)}: {_value(value)}" for name, value in meta.other.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode(errors="replace")


def read_kind(folder: Path | str | OpenFolder) -> JobKind:
    data = read_optional(folder, KIND, _MOST)
    if data is None:
        return JobKind.TEXT
    word = data.partition(b"\n")[0].decode(errors="replace").strip()
    try:
        return JobKind(word) if word else JobKind.TEXT
    except ValueError:
        kinds = ", ".join(JobKind)
        raise Unfit(KIND, f"{word[:40]!a} is not a kind of job; there are {kinds}") from None


def read_options(folder: Path | str | OpenFolder) -> SpoolOptions:
    data = read_optional(folder, OPTIONS, _MOST_OPTIONS)
    if data is None:
        return _NO_OPTIONS
    try:
        return checked(msgspec.json.decode(data, type=SpoolOptions))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidRequest) as error:
        raise Unfit(OPTIONS, str(error)) from None


def encode_options(options: SpoolOptions) -> bytes:
    return msgspec.json.format(msgspec.json.encode(options), indent=2) + b"\n"


def checked(options: SpoolOptions) -> SpoolOptions:
    """InvalidRequest if they contradict each other, or a value is out of its range."""
    try:
        options = msgspec.convert(msgspec.to_builtins(options), SpoolOptions)
        msgspec.json.encode(options)
    except (msgspec.ValidationError, TypeError, RecursionError, UnicodeError) as error:
        raise InvalidRequest("options", str(error)) from None
    if options.deadline is not None and not math.isfinite(options.deadline):
        raise InvalidRequest("options", "a deadline is a time in seconds since the epoch")
    if options.schema is not None and options.grammar is not None:
        raise InvalidRequest("options", "an answer follows a schema or a grammar, not both")
    if options.raw and (options.messages or options.system):
        raise InvalidRequest("options", "a raw prompt has no system prompt and no messages")
    return options


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if type(value) is int:
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _json(value)


def _decimal(value: float | None) -> str:
    return f"{value if value is not None and math.isfinite(value) else 0.0:.2f}"
