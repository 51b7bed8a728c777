"""Files that come with a job (`inputs`) or with its Dockerfile (`runtime.build.context`).

What stands in the job itself is measured here; what a pointer leads to and what is in an archive
is measured when it is read.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Collection, Mapping
from typing import Any

from penstock.core.check import MAX_POINTER
from penstock.core.errors import PenstockError
from penstock.core.pointer import decode_data, scheme_of
from penstock.workloads.container.config import InputRules
from penstock.workloads.container.job import InputFile
from penstock.workloads.container.protocol.fields import (
    checked,
    flag_of,
    forbid,
    list_of,
    object_of,
    refuse,
    shown,
    text_of,
)
from penstock.workloads.container.protocol.paths import checked_folder, checked_path

ARCHIVES = ("tar", "zip")
_SOURCES = ("text", "base64", "pointer")


def read_files(
    field: str, value: Any, rules: InputRules, *, taken: Collection[str] = ()
) -> tuple[InputFile, ...]:
    """The files, with normal paths of which none is in the way of another or of `taken`."""
    entries = list_of(field, value)
    if len(entries) > rules.max_files:
        forbid(field, f"has {len(entries)} files; this worker allows at most {rules.max_files}")
    files, total = [], 0
    paths: dict[str, bool] = dict.fromkeys(taken, False)
    for index, entry in enumerate(entries):
        where = f"{field}[{index}]"
        file, size = _read(where, object_of(where, entry), rules)
        total += size
        if total > rules.max_bytes:
            forbid(field, f"is more than {rules.max_bytes} bytes, which this worker allows")
        _place(where, file, paths)
        files.append(file)
    return tuple(files)


def _read(field: str, entry: Mapping[str, Any], rules: InputRules) -> tuple[InputFile, int]:
    archive = "" if entry.get("archive") is None else entry["archive"]
    if archive not in ("", *ARCHIVES):
        refuse(f"{field}.archive", "must be 'tar' (compressed or not) or 'zip'")
    path = checked(
        f"{field}.path",
        text_of(f"{field}.path", entry.get("path")),
        checked_folder if archive else checked_path,
    )
    source, content = _source(field, entry)
    size = _measure(f"{field}.{source}", source, content)
    if size > rules.max_file_bytes:
        most = rules.max_file_bytes
        forbid(f"{field}.{source}", f"is {size} bytes; this worker allows at most {most}")
    executable = flag_of(f"{field}.executable", entry.get("executable"))
    made = InputFile(path=path, archive=archive, executable=executable, **{source: content})
    return made, size


def _source(field: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    given = [name for name in _SOURCES if entry.get(name) is not None]
    if len(given) != 1:
        refuse(field, "must have exactly one of text, base64 and pointer")
    (source,) = given
    return source, text_of(f"{field}.{source}", entry[source], nul=source == "text")


def _measure(field: str, source: str, content: str) -> int:
    """Bytes of what stands in the job; 0 for what a pointer leads to."""
    if source == "text":
        return len(content.encode())
    if source == "base64":
        try:
            return len(a2b_base64(content, strict_mode=True))
        except ValueError as error:
            refuse(field, f"is not valid base64: {error}")
    if len(content) > MAX_POINTER:
        refuse(field, f"is longer than {MAX_POINTER} characters")
    try:
        return len(decode_data(content)) if scheme_of(content) == "data" else 0
    except PenstockError as error:
        refuse(field, f"can't be read: {error}")


def _place(field: str, file: InputFile, paths: dict[str, bool]) -> None:
    """Note a path. `paths` says of each whether it is a folder; many may be put in one."""
    folders = [file.path[:end] for end, char in enumerate(file.path) if char == "/"]
    if file.archive:
        folders.append(file.path)
    elif file.path in paths:
        refuse(f"{field}.path", f"({shown(file.path)}) is there already")
    else:
        paths[file.path] = False
    for folder in folders:
        if not paths.setdefault(folder, True):
            refuse(f"{field}.path", f"({shown(folder)}) is a file and can't be a folder as well")
