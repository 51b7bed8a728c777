"""What a job asks for beside its limits, its variables and its files."""

from __future__ import annotations

import posixpath
import re
from binascii import a2b_base64
from collections.abc import Collection, Mapping
from typing import Any

from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import Priority, StdinMode
from penstock.workloads.container.protocol.fields import (
    flag_of,
    forbid,
    kind_of,
    line_of,
    list_of,
    member,
    object_of,
    refuse,
    text_of,
    whole_of,
    word_of,
)
from penstock.workloads.container.protocol.javascript import stringify
from penstock.workloads.container.protocol.policy import (
    SANDBOX,
    granted,
    is_weaker,
    must_be_sandboxed,
)

MAX_CMD_PARTS = 1024
MAX_CMD_BYTES = 128 << 10
MAX_WORKDIR = 1024
MAX_ID = 2**31 - 1
"""Of a user or a group."""
NOBODY = (65534, 65534)
MAX_LABELS = 32
MAX_LABEL = 256

_USER = re.compile(r"([0-9]{1,10})(?::([0-9]{1,10}))?", re.ASCII)
_RUNTIME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}", re.ASCII)
_OWN_LABELS = "penstock."


def read_cmd(value: Any) -> tuple[str, ...]:
    field = "runtime.cmd"
    parts = list_of(field, value)
    if len(parts) > MAX_CMD_PARTS:
        refuse(field, f"has {len(parts)} parts; at most {MAX_CMD_PARTS} are allowed")
    cmd = tuple(word_of(f"{field}[{index}]", part) for index, part in enumerate(parts))
    if sum(len(part.encode()) + 1 for part in cmd) > MAX_CMD_BYTES:
        refuse(field, f"is larger than {MAX_CMD_BYTES} bytes")
    return cmd


def read_stdin(value: Any, job: Mapping[str, Any], body: bytes) -> tuple[StdinMode, bytes]:
    """What the container reads, and which kind of thing that is."""
    field = "runtime.stdin"
    if value is None or value == StdinMode.JOB:
        return StdinMode.JOB, body
    if value == StdinMode.NONE:
        return StdinMode.NONE, b""
    if value == StdinMode.PAYLOAD:
        return StdinMode.PAYLOAD, _payload(field, job)
    if not isinstance(value, dict) or ("text" in value) == ("base64" in value):
        refuse(field, "must be 'job', 'payload', 'none' or an object with a text or base64")
    if "base64" in value:
        return StdinMode.BYTES, _decoded(f"{field}.base64", value["base64"])
    return StdinMode.TEXT, text_of(f"{field}.text", value["text"], nul=True).encode()


def _decoded(field: str, value: Any) -> bytes:
    try:
        return a2b_base64(text_of(field, value), strict_mode=True)
    except ValueError as error:
        refuse(field, f"is not valid base64: {error}")


def _payload(field: str, job: Mapping[str, Any]) -> bytes:
    task = job.get("task")
    if not isinstance(task, dict) or "payload" not in task:
        refuse(field, "is 'payload', but the job has no task.payload")
    payload = task["payload"]
    if isinstance(payload, str):
        return text_of("task.payload", payload, nul=True).encode()
    return stringify(payload).encode()


def read_network(value: Any, image: str, config: WorkerConfig) -> bool:
    field = "runtime.network"
    wanted = flag_of(field, value)
    if wanted and not granted(config.images.network, image):
        forbid(field, "is true; jobs of this image get no network on this worker")
    return wanted


def read_user(value: Any, image: str, config: WorkerConfig) -> tuple[int, int]:
    """A number alone is the user's and the group's."""
    field = "runtime.user"
    if value is None:
        return NOBODY
    uid, gid = _ids(field, value)
    if 0 in (uid, gid) and not granted(config.images.root, image):
        forbid(field, f"is {uid}:{gid}; jobs of this image can't be root on this worker")
    return uid, gid


def _ids(field: str, value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        found = _USER.fullmatch(value)
        if found is None or int(found[1]) > MAX_ID or int(found[2] or 0) > MAX_ID:
            refuse(field, "must be a number, or two as 'uid:gid'")
        return int(found[1]), int(found[2] or found[1])
    if not isinstance(value, bool) and isinstance(value, int | float) and value > MAX_ID:
        refuse(field, f"must be at most {MAX_ID}")
    uid = whole_of(field, value, 0, MAX_ID)
    return uid, uid


def read_workdir(value: Any) -> str:
    field = "runtime.workdir"
    if value is None:
        return ""
    path = line_of(field, value, MAX_WORKDIR)
    if not path.startswith("/"):
        refuse(field, "must be an absolute path")
    if ".." in path.split("/"):
        refuse(field, "has a part '..'")
    return posixpath.normpath("/" + path.lstrip("/"))


def read_runtime(value: Any, config: WorkerConfig, runtimes: Collection[str]) -> str:
    field = "runtime.runtime"
    if value is None:
        return ""
    if not isinstance(value, str) or not _RUNTIME.fullmatch(value):
        refuse(field, f"is {kind_of(value)} that is no name of a runtime")
    if value != config.runtime and value not in runtimes:
        offered = ", ".join(sorted(runtimes)) or "none but its own"
        forbid(field, f"is {value!r}; this worker offers {offered}")
    if is_weaker(value, config.runtime):
        forbid(field, f"is {value!r}, which isolates less than this worker's {config.runtime}")
    return value


def check_sandbox(
    runtime: str, names: Collection[str], config: WorkerConfig, runtimes: Collection[str]
) -> None:
    """Raise if these images must run under gVisor and the job says otherwise, or it isn't here."""
    field = "runtime.runtime"
    if not must_be_sandboxed(config.images, names):
        return
    if runtime and is_weaker(runtime, SANDBOX):
        forbid(field, f"is {runtime!r}; jobs of this image run under {SANDBOX} on this worker")
    if runtimes and SANDBOX not in runtimes:
        forbid(field, f"must be {SANDBOX} for this image, and this worker has none")


def read_priority(value: Any) -> Priority:
    if value is None:
        return Priority.NORMAL
    if not isinstance(value, str) or value not in tuple(Priority):
        refuse("priority", "must be 'high', 'normal' or 'low'")
    return Priority(value)


def read_labels(value: Any) -> dict[str, str]:
    field = "labels"
    labels = object_of(field, value)
    if len(labels) > MAX_LABELS:
        refuse(field, f"has {len(labels)} entries; at most {MAX_LABELS} are allowed")
    for name, text in labels.items():
        where = member(field, name)
        if not _LABEL.fullmatch(name):
            refuse(where, "is no name of a label: 1 to 63 of A-Z a-z 0-9 . _ / -")
        if name.startswith(_OWN_LABELS):
            forbid(where, f"begins with {_OWN_LABELS}, which is the worker's own")
        line_of(where, text, MAX_LABEL)
    return dict(labels)
