"""A job's own files: `meta.json`, `type.txt`, `options.json`, `attempts.txt`; and how it ends.

`meta.json` is in the form that the original's tools read: they look for `"key": ` in the text, so
each key has a line of its own and one space after its colon; what they don't know follows what
they do.

Everything about an end is written where the job runs, and on the disk, before one rename makes it
DONE or FAILED. Who is killed before that leaves a job that runs and has no server, and the next
server starts it again.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Container, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field, structs

from penstock.core.errors import Conflict, InvalidRequest
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.process import failpoint
from penstock.workloads.spool.config import JobKind, SpoolOptions, Sync
from penstock.workloads.spool.disk.files import (
    TMP,
    NotAFolder,
    OpenFolder,
    Unfit,
    exists,
    fsync_dir,
    make_folder,
    make_usable,
    move,
    read_optional,
    remove_tree,
    replace_file,
    store_errors,
    write_files,
)
from penstock.workloads.spool.disk.workspace import JobId, Workspace

Folder = Path | str | OpenFolder
META, KIND, OPTIONS, ATTEMPTS = "meta.json", "type.txt", "options.json", "attempts.txt"
RESULT, EMBEDDING, ANSWER, AUDIO = "result.txt", "embedding.json", "answer.json", "audio.wav"
ERROR, PARTIAL, PROGRESS = "error.txt", "partial.txt", "progress.json"
_OF_AN_ATTEMPT = frozenset({PARTIAL, PROGRESS, ERROR, RESULT, EMBEDDING, ANSWER, AUDIO})
_MOST = 1 << 20
_MOST_OPTIONS = 64 << 20
_MOST_ERROR = 16_384
_DEEPEST = 64


class JobGone(Exception):
    """A folder that another process took away."""


# -- metadata -----------------------------------------------------------------------


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
_plain = msgspec.json.Decoder(Meta, strict=False).decode
"""For what our own tools wrote: no field that is unknown, and none that is null."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DECIMAL = ("duration_s", "tokens_per_second")
_ALWAYS = ("submitted_at", "mode")
_AT_THE_END = ("completed_at", "duration_s", "artifacts", "status")
_NOT_ENDED = {"completed_at": "", "duration_s": None, "artifacts": (), "status": "", "code": ""}
_NO_OPTIONS = SpoolOptions()
_text = json.encoder.encode_basestring
_json = json.JSONEncoder(ensure_ascii=False).encode


def stamp(now: float) -> str:
    """A time as it is written."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds")[:-6] + "Z"


def time_of(text: str) -> float | None:
    """What was written, in seconds since the epoch; None if it is no such time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def read_meta(folder: Folder) -> Meta:
    """Without the file, an empty one. Unfit if it is not JSON or a field is not what it is."""
    data = read_optional(folder, META, _MOST)
    if data is None:
        return Meta()
    with suppress(*_UNREADABLE):
        if not (meta := _plain(data)).other:
            return meta
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except _UNREADABLE as error:
        raise Unfit(META, f"is not a JSON object: {error}") from None
    known = {name: found.pop(name) for name in _FIELDS if name in found}
    if found and not _is_flat(found, _DEEPEST):
        raise Unfit(META, f"is nested deeper than {_DEEPEST}")
    given = {name: value for name, value in known.items() if value is not None}
    try:
        return msgspec.convert({**given, "other": found}, Meta, strict=False)
    except msgspec.ValidationError as error:
        raise Unfit(META, str(error)) from None


def _is_flat(value: Any, most: int) -> bool:
    """Whether it is nested no deeper: it has to be written again, whatever was called before."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return True
    return most > 0 and all(_is_flat(one, most - 1) for one in value)


def seen_meta(folder: Folder) -> Meta:
    """As much as can be told to somebody who only looks."""
    try:
        return read_meta(folder)
    except (FileNotFoundError, Unfit):
        return Meta()


def write_meta(folder: Path, meta: Meta, sync: Sync) -> None:
    replace_file(folder, META, encode_meta(meta), sync)


def encode_meta(meta: Meta) -> bytes:
    needed = _ALWAYS + _AT_THE_END if meta.status else _ALWAYS
    lines = [
        f'  "{name}": {_written(name, value)}'
        for name, value in zip(_FIELDS, structs.astuple(meta), strict=False)
        if name in needed or not (value is None or value == "" or value == ())
    ]
    lines += [f"  {_json(name)}: {_json(value)}" for name, value in meta.other.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode(errors="replace")


def _written(name: str, value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if name in _DECIMAL:
        return f"{value if value is not None and math.isfinite(value) else 0.0:.2f}"
    return _json(value)


# -- kind, options, attempts --------------------------------------------------------


def read_kind(folder: Folder) -> JobKind:
    data = read_optional(folder, KIND, _MOST) or b""
    word = data.partition(b"\n")[0].decode(errors="replace").strip()
    try:
        return JobKind(word) if word else JobKind.TEXT
    except ValueError:
        kinds = ", ".join(JobKind)
        raise Unfit(KIND, f"{word[:40]!a} is not a kind of job; there are {kinds}") from None


def read_options(folder: Folder) -> SpoolOptions:
    data = read_optional(folder, OPTIONS, _MOST_OPTIONS)
    if data is None:
        return _NO_OPTIONS
    try:
        return checked(msgspec.json.decode(data, type=SpoolOptions))
    except (*_UNREADABLE, InvalidRequest) as error:
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


class Loss(StrEnum):
    """Why an attempt came to nothing: a line of `attempts.txt`."""

    CRASHED = "crashed the engine"
    LOST = "lost its server"


class Attempts(Struct, frozen=True):
    """What was tried before."""

    crashed: int = 0
    lost: int = 0

    @property
    def count(self) -> int:
        return self.crashed + self.lost

    @property
    def is_suspect(self) -> bool:
        """Whether it is to run alone, so that what it may break is nobody else's."""
        return self.crashed > 0 or self.lost > 1

    @property
    def reason(self) -> str:
        """Why it is not tried again, as a sentence's end."""
        losses = ((Loss.CRASHED, self.crashed), (Loss.LOST, self.lost))
        times = {1: "once", 2: "twice"}
        return " and ".join(
            f"{loss} {times.get(count, f'{count} times')}" for loss, count in losses if count
        )


NO_ATTEMPTS = Attempts()


def read_attempts(folder: Folder) -> Attempts:
    """What its file tells; one that can't be read is no file."""
    try:
        data = read_optional(folder, ATTEMPTS, _MOST)
    except Unfit:
        data = None
    if data is None:
        return NO_ATTEMPTS
    lines = data.decode(errors="replace").splitlines()
    crashed = sum(line == Loss.CRASHED for line in lines)
    return Attempts(crashed, len(lines) - crashed)


# -- the ways out of `processing` ---------------------------------------------------


def finish(workspace: Workspace, job_id: JobId, meta: Meta, artifacts: Mapping[str, bytes]) -> None:
    """RUNNING becomes DONE, with these files as its results.

    Conflict if somebody moved or deleted it meanwhile, or put another under its id in its way;
    then it is not DONE. StoreFull or StoreFailed if the disk refuses.
    """
    end = structs.replace(meta, status="done", artifacts=tuple(artifacts))
    _end(workspace, job_id, SpoolEvent.FINISH, end, artifacts)


def fail(workspace: Workspace, job_id: JobId, meta: Meta, error: str) -> None:
    """RUNNING becomes FAILED, with one line that says why; raises as `finish` does."""
    end = structs.replace(meta, status="failed", artifacts=(ERROR,))
    line = " ".join(error.split()) or "unknown error"
    said = {ERROR: line.encode(errors="backslashreplace")[:_MOST_ERROR]}
    _end(workspace, job_id, SpoolEvent.FAIL, end, said)


def fail_impostor(workspace: Workspace, job_id: JobId, meta: Meta, error: str) -> None:
    """What lies in the queue under a job's id, and is no folder, is put into one that has failed.
    Fine if another server was quicker."""
    draft = workspace.folder(Status.STAGING) / f"{job_id}.{secrets.token_hex(8)}{TMP}"
    make_folder(draft)
    try:
        os.rename(workspace.of(Status.QUEUED, job_id), draft / "not-a-folder")
    except FileNotFoundError:
        draft.rmdir()
        return
    end = structs.replace(meta, status="failed", artifacts=(ERROR,))
    write_files(draft, {ERROR: error.encode(), META: encode_meta(end)}, workspace.sync)
    fsync_dir(draft, workspace.sync)
    move(draft, workspace.of(Status.FAILED, job_id), sync=workspace.sync)


def count_attempt(workspace: Workspace, job_id: JobId, loss: Loss) -> Attempts:
    """One more that came to nothing, durably; returns all so far. JobGone if the job is."""
    folder = workspace.of(Status.RUNNING, job_id)
    try:
        with OpenFolder(folder) as opened:
            before = read_attempts(opened)
        crashed, lost = before.crashed, before.lost
        after = Attempts(crashed + (loss is Loss.CRASHED), lost + (loss is Loss.LOST))
        lines = [Loss.CRASHED] * after.crashed + [Loss.LOST] * after.lost
        replace_file(folder, ATTEMPTS, ("\n".join(lines) + "\n").encode(), workspace.sync)
    except (FileNotFoundError, NotAFolder):
        raise JobGone(job_id) from None
    return after


def requeue(workspace: Workspace, job_id: JobId) -> None:
    """RUNNING becomes QUEUED again, with nothing of an attempt left. JobGone if the job is."""
    folder = workspace.of(Status.RUNNING, job_id)
    target = workspace.of(SPOOL.after(Status.RUNNING, SpoolEvent.RECOVER), job_id)
    try:
        if not make_usable(str(folder)):
            raise JobGone(job_id)
        remove_attempt(folder)
        if (meta := seen_meta(folder)).status:
            write_meta(folder, structs.replace(meta, **_NOT_ENDED), workspace.sync)
        failpoint("spool-returning")
        move(folder, target, sync=workspace.sync)
    except FileNotFoundError:
        raise JobGone(job_id) from None


def give_up(workspace: Workspace, job_id: JobId, attempts: Attempts, code: str, now: float) -> None:
    """RUNNING becomes FAILED: it was tried often enough."""
    meta = seen_meta(workspace.of(Status.RUNNING, job_id))
    end = structs.replace(meta, code=code, completed_at=stamp(now), attempts=attempts.count)
    fail(workspace, job_id, end, f"{code}: the job {attempts.reason}")


def remove_attempt(folder: Path | str, keep: Container[str] = ()) -> None:
    """Remove what a job has only while it runs, and what an earlier attempt left."""
    with store_errors("clear", folder):
        for name in os.listdir(folder):
            if name not in keep and (name in _OF_AN_ATTEMPT or name.endswith(TMP)):
                remove_tree(f"{folder}/{name}")


def _end(
    workspace: Workspace, job_id: JobId, event: SpoolEvent, meta: Meta, files: Mapping[str, bytes]
) -> None:
    folder = workspace.name(Status.RUNNING, job_id)
    target = workspace.name(SPOOL.after(Status.RUNNING, event), job_id)
    try:
        if not make_usable(folder):
            raise FileNotFoundError(folder)
        replace_file(folder, META, encode_meta(meta), workspace.sync, beside=files)
        remove_attempt(folder, files)  # afterwards, so that who reads along always finds the text
        fsync_dir(folder, workspace.sync)
        failpoint("spool-ended")
        move(folder, target, sync=workspace.sync)
    except FileNotFoundError:
        raise Conflict(
            f"job {job_id} is not in {workspace.folder(Status.RUNNING)} any more",
            hint="it was moved or deleted while it ran",
        ) from None
    except FileExistsError:
        raise Conflict(
            f"job {job_id} is in {os.path.dirname(target)} already", hint="two folders have one id"
        ) from None
    if exists(note := f"{workspace.private}/cancel/{job_id}"):
        with suppress(OSError):
            os.unlink(note)
