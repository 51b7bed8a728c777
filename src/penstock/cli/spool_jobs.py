"""Which workspace a command is about, and which of its jobs."""

from __future__ import annotations

import stat
import sys
from collections.abc import Callable, Sequence
from os import fstat
from pathlib import Path
from typing import Any, TypeVar

import click

from penstock.core.errors import InvalidRequest, NotFound
from penstock.lifecycles.spool import Status
from penstock.workloads.spool.ids import check_job_id
from penstock.workloads.spool.workspace import Workspace

F = TypeVar("F", bound=Callable[..., Any])

placed = click.argument("workspace", type=click.Path(path_type=Path))
"""A spool has no engine to be found: its folder is always the first argument."""
STATUS = click.Choice(
    [one.value for one in (Status.QUEUED, Status.RUNNING, Status.DONE, Status.FAILED)],
    case_sensitive=False,
)


def check_folder(path: Path) -> None:
    """Nothing but a folder may lie where a workspace is to be."""
    if path.exists() and not path.is_dir():
        raise InvalidRequest("workspace", f"{path} is a file, not a folder")


def workspace_at(path: Path) -> Workspace:
    """One that exists. Raises NotFound."""
    check_folder(path)
    workspace = Workspace(path)
    if not workspace.folder(Status.QUEUED).is_dir():
        what = f"{path} is no workspace" if path.exists() else f"there is no workspace {path}"
        raise NotFound(what, hint=f"'penstock spool submit {path} \"…\"' makes one")
    return workspace


def ids_given(given: Sequence[str]) -> list[str]:
    """The ids on the command line; without any, or for `-`, those on standard input."""
    words: list[str] = []
    for text in given or ("-",):
        words += piped().decode("utf-8", "replace").split() if text == "-" else [text]
    return [check_job_id(word) for word in words]


def piped() -> bytes:
    """What comes on standard input; nothing if that is a terminal."""
    return b"" if sys.stdin.isatty() else sys.stdin.buffer.read()


def is_piped() -> bool:
    """Whether something may come: a terminal would have to be typed at, a device is no prompt."""
    try:
        mode = fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return not stat.S_ISCHR(mode)
