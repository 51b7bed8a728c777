"""Checks a submission in the protocol's order, and makes a complete job of it.

The order: body, protocol_version, job_id, runtime, mode known, mode supported, image; then the
grammar of the image's name; then the shape of everything else (`schema`) and what the worker's
configuration grants; and last the list of allowed images. The first error found is answered.
Whether the id is taken is for whoever stores the job.
"""

from __future__ import annotations

import math
import os
import posixpath
import re
from binascii import a2b_base64
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from penstock.core.check import MAX_POINTER
from penstock.core.errors import PenstockError, did_you_mean
from penstock.core.pointer import decode_data, scheme_of
from penstock.workloads.container.config import InputRules, WorkerConfig
from penstock.workloads.container.engine import BRIDGE, NO_NETWORK, EngineFacts, Gpus
from penstock.workloads.container.job import (
    INPUT_FOLDER,
    OUTPUT_FOLDER,
    PROTOCOL_VERSION,
    BuildSpec,
    ContainerJob,
    ErrorCode,
    InputFile,
    Limits,
    Mode,
    Mount,
    Priority,
    Rejected,
    StdinMode,
)
from penstock.workloads.container.protocol.body import (
    Unreadable,
    check_depth,
    compact,
    encode,
    read_body,
)
from penstock.workloads.container.protocol.dockerfile import bases_of
from penstock.workloads.container.protocol.image_rules import (
    SANDBOX,
    could_match,
    granted,
    is_weaker,
    must_be_sandboxed,
    names_of,
    parse_reference,
)
from penstock.workloads.container.protocol.paths import checked_folder, checked_path
from penstock.workloads.container.protocol.schema import (
    MAX_ID,
    BuildBody,
    JobBody,
    LimitsBody,
    MountBody,
    RuntimeBody,
    StdinBody,
    Word,
)

MAX_JOB_ID = 200
DOCKERFILE = "Dockerfile"
ARCHIVES = ("tar", "zip")
MAX_CMD_BYTES = 128 << 10
MAX_ENV_BYTES = 32_000
"""Of all names and values together."""
PREFIX = "PENSTOCK_"
"""Of the variables that the worker itself sets."""

_JOB_ID = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_JOB_ID}}}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_USER = re.compile(r"([0-9]{1,10})(?::([0-9]{1,10}))?", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}", re.ASCII)
_OWN_LABELS = ("penstock.", "container.")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_DENIED = frozenset({"PATH", "BASH_ENV", "ENV", "IFS", "NODE_OPTIONS", "PYTHONSTARTUP"})
_DENIED_STARTS = ("LD_", "DYLD_", "DOCKER_", "CONTAINER", PREFIX)
_DENIED_END = "_PROXY"
_RESERVED = ("/", "/proc", "/sys", "/dev", "/tmp", INPUT_FOLDER, OUTPUT_FOLDER)
"""Where nothing can be mounted."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")


class Accepted(Struct, frozen=True):
    """A submission that passed."""

    job: ContainerJob
    body: bytes
    """The whole job as compact JSON: what is stored, and what `stdin: job` reads."""


class _RawTask(Struct):
    payload: msgspec.Raw


class _RawJob(Struct):
    """For the payload as it was written."""

    task: _RawTask


def _refuse(field: str, problem: str) -> NoReturn:
    """The value is invalid."""
    raise Rejected(ErrorCode.INVALID_FIELD, f"{field}: {problem}", field=field)


def _forbid(field: str, problem: str) -> NoReturn:
    """The value is valid, but this worker does not grant it."""
    raise Rejected(ErrorCode.NOT_ALLOWED, f"{field}: {problem}", field=field)


def body_limit(config: WorkerConfig) -> int:
    """Bytes that a submission can have at most, whatever is in it."""
    return max(config.max_body_bytes, config.inputs.max_bytes)


def read_job(body: bytes, config: WorkerConfig, facts: EngineFacts | None = None) -> Accepted:
    """Check a submission as it came. Raises Rejected, and nothing else, for any bytes. What the
    engine lacks is refused where its `facts` are known."""
    if len(body) > body_limit(config):
        raise _too_large(len(body), body_limit(config))
    try:
        value = read_body(body)
    except Unreadable as error:
        raise Rejected(ErrorCode.INVALID_BODY, str(error)) from None
    if len(body) > config.max_body_bytes and not _brings_files(value):
        raise _too_large(len(body), config.max_body_bytes)
    return check_job(value, config, facts, body=compact(body))


def check_job(
    value: Any, config: WorkerConfig, facts: EngineFacts | None = None, *, body: bytes | None = None
) -> Accepted:
    """The same for a value that was decoded elsewhere."""
    try:
        return _Check(config, facts).job(value, body)
    except Rejected as refused:
        if refused.error.code != ErrorCode.INVALID_BODY:
            refused.job_id = _echo(value)
        raise


class _Check:
    """One submission on its way through the checks."""

    def __init__(self, config: WorkerConfig, facts: EngineFacts | None) -> None:
        self._config, self._facts = config, facts
        self._runtimes = facts.runtimes if facts is not None else ()

    def job(self, value: Any, body: bytes | None) -> Accepted:
        job, body = _check_body(value, body)
        _check_version(job.get("protocol_version"))
        job_id = self._id(job.get("job_id"))
        runtime = _check_runtime(job.get("runtime"))
        mode = self._mode(runtime.get("mode"))
        image = _check_image(runtime.get("image")) if mode is Mode.IMAGE else ""
        given = _shaped(job, runtime)
        asked = given.runtime
        stdin, stdin_bytes = _read_stdin(asked.stdin, job, body)
        build = self._build(asked.build) if mode is Mode.BUILD else None
        made = ContainerJob(
            job_id=job_id,
            mode=mode,
            image=image,
            cmd=_read_words("runtime.cmd", asked.cmd or ()),
            entrypoint=_read_entrypoint(asked),
            env=_read_env(asked.env or {}, self._config.images.env),
            limits=self._limits(asked.limits),
            stdin=stdin,
            stdin_bytes=stdin_bytes,
            inputs=_read_files("inputs", given.inputs or (), self._config.inputs),
            outputs=bool(given.outputs),
            attach=bool(given.attach),
            network=self._network(asked.network, image),
            user=self._user(asked.user, image),
            workdir=_read_workdir(asked.workdir),
            runtime=self._runtime(asked.runtime),
            gpus=self._gpus(asked.gpus),
            mounts=self._mounts(asked.mounts or ()),
            read_only=self._read_only(asked.read_only, image),
            priority=given.priority or Priority.NORMAL,
            labels=_read_labels(given.labels or {}),
            build=build,
        )
        self._check_sandbox(made)
        self._check_allowed(made)
        return Accepted(made, body)

    def _id(self, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise Rejected(ErrorCode.MISSING_JOB_ID, "job_id: must be a non-empty string")
        if not _JOB_ID.fullmatch(value):
            rule = f"1 to {MAX_JOB_ID} characters, no control characters"
            message = f"job_id: invalid value {_shown(value)} ({rule})"
            raise Rejected(ErrorCode.INVALID_JOB_ID, message, field="job_id")
        return value

    def _mode(self, value: Any) -> Mode:
        if not isinstance(value, str) or value not in tuple(Mode):
            raise Rejected(ErrorCode.BAD_RUNTIME_MODE, "runtime.mode: must be 'image' or 'build'")
        mode = Mode(value)
        can_build = self._config.build.enabled and (self._facts is None or self._facts.can_build)
        if mode is Mode.BUILD and not can_build:
            message = "runtime.mode=build not supported on this worker"
            raise Rejected(ErrorCode.RUNTIME_NOT_SUPPORTED, message)
        return mode

    def _limits(self, given: LimitsBody | None) -> Limits:
        config = self._config
        asked = {} if given is None else msgspec.structs.asdict(given)
        asked = {name: value for name, value in asked.items() if value is not None}
        for name, value in asked.items():
            _check_finite(f"runtime.limits.{name}", value)
            if value > (most := getattr(config.max_limits, name)):
                _forbid(f"runtime.limits.{name}", f"{value:g} is above the maximum of {most:g}")
        limits = msgspec.structs.replace(config.defaults, **asked)
        for name, total in (("memory_mb", config.memory_mb), ("cpus", config.cpus)):
            if total and getattr(limits, name) > total:
                problem = f"{getattr(limits, name):g} is above the {total:g} for all jobs together"
                _forbid(f"runtime.limits.{name}", problem)
        return limits

    def _network(self, value: bool | str | None, image: str) -> str:
        field, config = "runtime.network", self._config
        if value is None:
            return config.sandbox.network
        name = (BRIDGE if value else NO_NETWORK) if isinstance(value, bool) else value
        if name in (NO_NETWORK, config.sandbox.network):
            return name
        if not granted(config.images.network, image):
            _forbid(field, "jobs of this image get no network on this worker (images.network)")
        if self._facts is not None and not self._facts.networks:
            _forbid(field, f"the engine {self._facts.name} gives containers no network")
        if name not in config.networks:
            offered = ", ".join(config.networks) or "none"
            _forbid(
                field, f"there is no network {_shown(name)} for jobs; this worker has {offered}"
            )
        return name

    def _user(self, value: int | str | None, image: str) -> tuple[int, int]:
        """A number alone is the user's and the group's."""
        field, own = "runtime.user", _ids(self._config.sandbox.user)
        if value is None:
            return own
        ids = _ids(str(value))
        if max(ids) > MAX_ID:
            _refuse(field, f"invalid value {_shown(str(value))} (a number, or 'uid:gid')")
        if 0 in ids and ids != own and not granted(self._config.images.root, image):
            _forbid(field, "jobs of this image can't be root on this worker (images.root)")
        return ids

    def _read_only(self, value: bool | None, image: str) -> bool:
        if value is None or value is self._config.sandbox.read_only or value:
            return self._config.sandbox.read_only if value is None else value
        if not granted(self._config.images.writable, image):
            problem = "jobs of this image get no writable root file system (images.writable)"
            _forbid("runtime.read_only", problem)
        return False

    def _mounts(self, given: Collection[MountBody]) -> tuple[Mount, ...]:
        """Of folders that the worker's configuration lists, by what their path really means."""
        mounts: list[Mount] = []
        for index, one in enumerate(given):
            field = f"runtime.mounts[{index}]"
            target = posixpath.normpath("/" + one.target.lstrip("/"))
            if target in _RESERVED or any(mount.target == target for mount in mounts):
                _refuse(f"{field}.target", f"{_shown(target)} is taken")
            if _CONTROL.search(one.target) or ":" in one.target:
                _refuse(f"{field}.target", "has a control character or a colon")
            _text(f"{field}.source", one.source)
            source = os.path.realpath(one.source)
            allowed = [os.path.realpath(path) for path in self._config.mounts]
            if not any(os.path.commonpath((source, path)) == path for path in allowed):
                _forbid(f"{field}.source", f"{_shown(one.source)} is not in this worker's mounts")
            mounts.append(Mount(Path(source), target))
        return tuple(mounts)

    def _gpus(self, value: int | str | None) -> str:
        text = "" if value is None else str(value)
        try:
            asked = Gpus.parse(text)
        except ValueError as error:
            _refuse("runtime.gpus", str(error))
        if asked and self._facts is not None and self._facts.no_gpus:
            _forbid("runtime.gpus", self._facts.no_gpus)
        return text if asked else ""

    def _runtime(self, value: str | None) -> str:
        field, own = "runtime.runtime", self._config.runtime
        if value is None:
            return ""
        if value != own and value not in self._runtimes:
            offered = ", ".join(sorted(self._runtimes)) or "none but its own"
            _forbid(field, f"{value!r} is not available; this worker offers {offered}")
        if is_weaker(value, own):
            _forbid(field, f"{value!r} isolates less than this worker's {own}")
        return value

    def _check_sandbox(self, job: ContainerJob) -> None:
        """Some images must run under gVisor."""
        field = "runtime.runtime"
        if not must_be_sandboxed(self._config.images, names_of(job)):
            return
        if job.runtime and is_weaker(job.runtime, SANDBOX):
            _forbid(field, f"jobs of this image run under {SANDBOX} on this worker")
        if self._runtimes and SANDBOX not in self._runtimes:
            _forbid(field, f"this image must run under {SANDBOX}, and this worker has none")

    def _build(self, given: BuildBody | None) -> BuildSpec:
        field = "runtime.build"
        if given is None:
            _refuse(field, "is required for mode 'build'")
        dockerfile = _text(f"{field}.dockerfile", given.dockerfile)
        try:
            bases = bases_of(dockerfile)
        except ValueError as error:
            _refuse(f"{field}.dockerfile", str(error))
        files = given.context or ()
        rules = self._config.inputs
        context = _read_files(f"{field}.context", files, rules, taken=(DOCKERFILE,))
        return BuildSpec(dockerfile=dockerfile, context=context, bases=bases)

    def _check_allowed(self, job: ContainerJob) -> None:
        """By name; what the name means is looked at when the job starts. A builder asks for its
        bases itself, so of these a digest must stand in the Dockerfile."""
        config = self._config
        if job.build is None:
            if not any(could_match(pattern, job.image) for pattern in config.images.allowed):
                message = f"image {_shown(job.image)} is not allowed on this worker"
                raise Rejected(ErrorCode.IMAGE_NOT_ALLOWED, message, field="runtime.image")
            return
        for base in job.build.bases:
            if not granted(config.build.bases, base):
                message = f"base image {_shown(base)} is not allowed on this worker"
                raise Rejected(
                    ErrorCode.IMAGE_NOT_ALLOWED, message, field="runtime.build.dockerfile"
                )


# -- the body, and what every worker checks alike -----------------------------------------------


def _check_body(value: Any, body: bytes | None) -> tuple[Mapping[str, Any], bytes]:
    """An array is an object to the protocol's own worker: one without a protocol_version."""
    if not isinstance(value, dict | list):
        raise Rejected(ErrorCode.INVALID_BODY, "the body must be a JSON object")
    try:
        check_depth(value)
        body = encode(value) if body is None else body
    except (TypeError, ValueError) as error:
        raise Rejected(ErrorCode.INVALID_BODY, str(error)) from None
    return (value if isinstance(value, dict) else {}), body


def _check_version(value: Any) -> None:
    if isinstance(value, bool) or value != PROTOCOL_VERSION:
        message = f"protocol_version: must be the number {PROTOCOL_VERSION}"
        raise Rejected(ErrorCode.UNSUPPORTED_PROTOCOL_VERSION, message)


def _check_runtime(value: Any) -> Mapping[str, Any]:
    """An array gets past this check, and fails for its lack of a mode, as in JavaScript."""
    if not isinstance(value, dict | list):
        raise Rejected(ErrorCode.MISSING_RUNTIME, "runtime: must be an object")
    return value if isinstance(value, dict) else {}


def _check_image(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Rejected(ErrorCode.MISSING_IMAGE, "runtime.image: must be a non-empty string")
    try:
        parse_reference(value)
    except ValueError as error:
        message = f"runtime.image: {_shown(value)} {error}"
        raise Rejected(ErrorCode.INVALID_IMAGE, message, field="runtime.image") from None
    return value


def _shaped(job: Mapping[str, Any], runtime: Mapping[str, Any]) -> JobBody:
    """Every field has the type that it must have. An image of mode `build` is not looked at."""
    value = {name: one for name, one in job.items() if name in JobBody.__struct_fields__}
    value["runtime"] = {**runtime, "image": None} if runtime["mode"] == Mode.BUILD else runtime
    value["protocol_version"] = PROTOCOL_VERSION
    if isinstance(limits := runtime.get("limits"), dict):
        value["runtime"] = {**value["runtime"], "limits": _whole(limits)}
    try:
        return msgspec.convert(value, JobBody)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
    field = where.rstrip("`").lstrip(".").removesuffix("[...]")
    if unknown := _UNKNOWN.fullmatch(message):
        known = (LimitsBody if field == "runtime.limits" else RuntimeBody).__struct_fields__
        hint = did_you_mean(unknown[1], known)
        if field == "runtime.limits" and unknown[1] in RuntimeBody.__struct_fields__:
            hint = f"did you mean runtime.{unknown[1]}?"
        _refuse(f"{field}.{unknown[1]}", f"unknown field{f' ({hint})' if hint else ''}")
    if missing := _MISSING.fullmatch(message):
        _refuse(f"{field}.{missing[1]}".lstrip("."), "is required")
    message = message.replace("`", "")
    if field in ("runtime.env", "labels"):
        field += _wrong_name(job["labels"] if field == "labels" else runtime["env"])
    _refuse(field or "body", message[0].lower() + message[1:])


def _wrong_name(values: Any) -> str:
    """Which entry of a map is no text (or number); empty if it is the map itself."""
    entries = values.items() if isinstance(values, dict) else ()
    kinds = (str, int, float, bool, type(None))
    wrong = (name for name, one in entries if not isinstance(one, kinds))
    return next((f".{name}" for name in wrong if _VARIABLE.fullmatch(name)), "")


def _whole(limits: dict[str, Any]) -> dict[str, Any]:
    """JSON has one kind of numbers: 16.0 is a whole one, too."""
    return {
        name: int(one) if isinstance(one, float) and one.is_integer() else one
        for name, one in limits.items()
    }


def _text(field: str, value: str, *, nul: bool = False) -> str:
    """Text that can be handed to a program: whole characters, and no NUL unless it may."""
    if _SURROGATE.search(value):
        _refuse(field, "has half of a character (a lone surrogate)")
    if "\0" in value and not nul:
        _refuse(field, "has a NUL character")
    return value


def _check_finite(field: str, value: float) -> None:
    try:
        if math.isfinite(value):
            return
    except OverflowError:
        pass
    _refuse(field, "is not a finite number")


def _word(field: str, value: Word) -> str:
    if isinstance(value, str):
        return _text(field, value)
    if isinstance(value, bool):
        return "true" if value else "false"
    _check_finite(field, value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    return repr(value)


def _read_words(field: str, parts: Collection[Word]) -> tuple[str, ...]:
    words = tuple(_word(f"{field}[{index}]", part) for index, part in enumerate(parts))
    if sum(len(word.encode()) + 1 for word in words) > MAX_CMD_BYTES:
        _refuse(field, f"is larger than {MAX_CMD_BYTES} bytes")
    return words


def _read_entrypoint(asked: RuntimeBody) -> tuple[str, ...] | None:
    field = "runtime.entrypoint"
    if asked.entrypoint is None:
        return None
    words = _read_words(field, asked.entrypoint)
    if words[:1] == ("",):
        _refuse(f"{field}[0]", "is empty; write an empty list for no entrypoint")
    if not words and not asked.cmd:
        _refuse(field, "is empty, and there is no runtime.cmd")
    return words


def _read_env(given: Mapping[str, Word | None], allowed: Collection[str]) -> dict[str, str]:
    """The variables; some names change what a program is or does before its first line runs, or
    are the worker's own, and are refused unless the configuration lists them (`images.env`)."""
    field, size = "runtime.env", 0
    env: dict[str, str] = {}
    for name, value in given.items():
        if value is None:
            continue
        where = f"{field}.{name}" if _VARIABLE.fullmatch(name) else f"{field}[{_shown(name)}]"
        if not _VARIABLE.fullmatch(name):
            _refuse(where, "invalid name (letters, digits and _, not a digit first)")
        if is_denied(name) and name not in allowed:
            _forbid(where, "may not be set by a job on this worker (images.env)")
        env[name] = _word(where, value)
        size += len(name) + len(env[name].encode()) + 2
        if size > MAX_ENV_BYTES:
            _refuse(field, f"is larger than {MAX_ENV_BYTES} bytes")
    return env


def is_denied(name: str) -> bool:
    """Programs look for proxies in small letters too."""
    return name in _DENIED or name.startswith(_DENIED_STARTS) or name.upper().endswith(_DENIED_END)


def _read_stdin(
    value: str | StdinBody | None, job: Mapping[str, Any], body: bytes
) -> tuple[StdinMode, bytes]:
    """What the container reads, and which kind of thing that is."""
    field = "runtime.stdin"
    if value is None or value == StdinMode.JOB:
        return StdinMode.JOB, body
    if value == StdinMode.NONE:
        return StdinMode.NONE, b""
    if isinstance(value, str):
        task = job.get("task")
        if not isinstance(task, dict) or "payload" not in task:
            _refuse(field, "is 'payload', but the job has no task.payload")
        payload = task["payload"]
        if isinstance(payload, str):
            return StdinMode.PAYLOAD, _text("task.payload", payload, nul=True).encode()
        return StdinMode.PAYLOAD, bytes(msgspec.json.decode(body, type=_RawJob).task.payload)
    if (value.text is None) == (value.base64 is None):
        _refuse(field, "must have exactly one of text and base64")
    if value.base64 is not None:
        return StdinMode.BYTES, _decoded(f"{field}.base64", value.base64)
    return StdinMode.TEXT, _text(f"{field}.text", value.text or "", nul=True).encode()


def _decoded(field: str, text: str) -> bytes:
    try:
        return a2b_base64(_text(field, text).encode(), strict_mode=True)
    except ValueError as error:
        _refuse(field, f"is not valid base64: {error}")


def _ids(text: str) -> tuple[int, int]:
    found = _USER.fullmatch(text)
    if found is None:
        return MAX_ID + 1, 0
    return int(found[1]), int(found[2] or found[1])


def _read_workdir(value: str | None) -> str:
    field = "runtime.workdir"
    if value is None:
        return ""
    if _CONTROL.search(_text(field, value)):
        _refuse(field, "has a control character")
    if ".." in value.split("/"):
        _refuse(field, "has a part '..'")
    return posixpath.normpath("/" + value.lstrip("/"))


def _read_labels(labels: Mapping[str, str]) -> dict[str, str]:
    for name, text in labels.items():
        where = f"labels.{name}" if _LABEL.fullmatch(name) else f"labels[{_shown(name)}]"
        if not _LABEL.fullmatch(name):
            _refuse(where, "invalid name (1 to 63 of A-Z a-z 0-9 . _ / -)")
        if name.startswith(_OWN_LABELS):
            _forbid(where, "is a name of the worker's own")
        if _CONTROL.search(_text(where, text)):
            _refuse(where, "has a control character")
    return dict(labels)


# -- files --------------------------------------------------------------------------------------


def _read_files(
    field: str, entries: Collection[InputFile], rules: InputRules, *, taken: Collection[str] = ()
) -> tuple[InputFile, ...]:
    """The files, with normal paths of which none is in the way of another or of `taken`. What
    stands in the job itself is measured here; what a pointer leads to and what is in an archive is
    measured when it is read."""
    if len(entries) > rules.max_files:
        _forbid(field, f"{len(entries)} files are above the maximum of {rules.max_files}")
    files, total = [], 0
    paths: dict[str, bool] = dict.fromkeys(taken, False)
    for index, entry in enumerate(entries):
        where = f"{field}[{index}]"
        file, size = _read_file(where, entry, rules)
        total += size
        if total > rules.max_bytes:
            _forbid(field, f"is larger than {rules.max_bytes} bytes in all")
        _place(where, file, paths)
        files.append(file)
    return tuple(files)


def _read_file(field: str, entry: InputFile, rules: InputRules) -> tuple[InputFile, int]:
    if entry.archive not in ("", None, *ARCHIVES):
        _refuse(f"{field}.archive", "must be 'tar' (compressed or not) or 'zip'")
    given = {"text": entry.text, "base64": entry.base64, "pointer": entry.pointer}
    sources = [name for name, content in given.items() if content is not None]
    if len(sources) != 1:
        _refuse(field, "must have exactly one of text, base64 and pointer")
    source = sources[0]
    content = _text(f"{field}.{source}", given[source] or "", nul=source == "text")
    check = checked_folder if entry.archive else checked_path
    try:
        path = check(_text(f"{field}.path", entry.path))
    except ValueError as error:
        _refuse(f"{field}.path", f"({_shown(entry.path)}) {error}")
    size = _measure(f"{field}.{source}", source, content)
    if size > rules.max_file_bytes:
        problem = f"{size} bytes are above the maximum of {rules.max_file_bytes}"
        _forbid(f"{field}.{source}", problem)
    return msgspec.structs.replace(entry, path=path), size


def _measure(field: str, source: str, content: str) -> int:
    """Bytes of what stands in the job; 0 for what a pointer leads to."""
    if source == "text":
        return len(content.encode())
    if source == "base64":
        return len(_decoded(field, content))
    if len(content) > MAX_POINTER:
        _refuse(field, f"is longer than {MAX_POINTER} characters")
    try:
        return len(decode_data(content)) if scheme_of(content) == "data" else 0
    except PenstockError as error:
        _refuse(field, f"can't be read: {error}")


def _place(field: str, file: InputFile, paths: dict[str, bool]) -> None:
    """Note a path. `paths` says of each whether it is a folder; many may be put in one."""
    folders = [file.path[:end] for end, char in enumerate(file.path) if char == "/"]
    if file.archive:
        folders.append(file.path)
    elif file.path in paths:
        _refuse(f"{field}.path", f"({_shown(file.path)}) is there already")
    else:
        paths[file.path] = False
    for folder in folders:
        if not paths.setdefault(folder, True):
            _refuse(f"{field}.path", f"({_shown(folder)}) is a file and can't be a folder as well")


def _brings_files(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    runtime = value.get("runtime")
    build = runtime.get("build") if isinstance(runtime, dict) else None
    return bool(value.get("inputs") or (isinstance(build, dict) and build.get("context")))


def _too_large(size: int, limit: int) -> Rejected:
    message = f"the body is {size} bytes long; at most {limit} are allowed"
    return Rejected(ErrorCode.INVALID_BODY, message, status=413)


def _shown(value: str) -> str:
    return repr(value if len(value) <= 60 else value[:57] + "...")


def _echo(value: Any) -> Any:
    """The id as it was given, in a form that every writer of JSON can write."""
    return _writable(value.get("job_id") if isinstance(value, dict) else None)


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_writable(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return str(value)
    return value
