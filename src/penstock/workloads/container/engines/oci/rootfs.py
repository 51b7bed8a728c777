"""Root file systems seen from outside: where a path leads, and whether a command can be executed.

With an init in front of it, no runtime tells a missing command from one that ended with exit code
127. The root file system of an image never changes, so it can be found out beforehand.
"""

from __future__ import annotations

import errno
import os
import platform
import stat
import struct
from pathlib import Path

from penstock.workloads.container.engine import CommandNotFound, CommandNotRunnable, ContainerSpec
from penstock.workloads.container.engines.oci.bundle import Process

_MOST_LINKS = 40


class OutOfReach(OSError):
    """A loop of links."""


def resolve(root: Path, path: str, *, last: bool = True) -> Path:
    """Where `path` really is below `root`, links followed as in a chroot; `last` says whether
    also the last part is followed. Parts that don't exist are taken as they are."""
    todo = _parts(path)
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            del done[-1:]
            continue
        here = os.path.join(root, *done, part)
        if (last or todo) and os.path.islink(here):
            links += 1
            if links > _MOST_LINKS:
                raise OutOfReach(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            if target.startswith("/"):
                done.clear()
            todo[:0] = _parts(target)
        else:
            done.append(part)
    return root.joinpath(*done)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


_MACHINES = {"x86_64": (62,), "aarch64": (183,)}
"""e_machine of programs that this processor runs and seccomp lets through."""
_UNKNOWN = ("/proc/", "/dev/", "/sys/", "/tmp/")
"""What is there is known only when the container runs."""
_MOST_SCRIPTS = 4
_PT_INTERP = 3


class MissingInterpreter(CommandNotFound):
    """The command is there; what it needs to run is not."""


def check_command(root: Path, spec: ContainerSpec, process: Process) -> None:
    """Raises CommandNotFound or CommandNotRunnable; says nothing where it can't be known."""
    if not process.args or not process.args[0]:
        raise CommandNotFound("The image has no command of its own, and the job names none.")
    name = process.args[0]
    if "/" in name:
        return _check(root, spec, _absolute(process, name), name)
    refused: CommandNotRunnable | None = None
    for folder in process.env.get("PATH", "").split(":"):
        try:
            return _check(root, spec, _absolute(process, f"{folder or '.'}/{name}"), name)
        except MissingInterpreter:
            raise
        except CommandNotFound:
            continue
        except CommandNotRunnable as error:
            refused = refused or error
    raise refused or CommandNotFound(f"There is no command {name!r} in the image's PATH.")


def needs_loader(path: Path) -> bool:
    """Whether a program is dynamically linked, so that it runs only where its libraries are."""
    with path.open("rb") as file:
        return _loader(file.read(4096)) is not None


def _check(root: Path, spec: ContainerSpec, path: str, name: str) -> None:
    needed: str | None = path
    for step in range(_MOST_SCRIPTS + 1):
        if needed is None or needed.startswith(_UNKNOWN):
            return
        place = _place(root, spec, needed)
        if place is None:
            return
        if not place.exists():
            raise _missing(name, needed if step else "")
        needed = _next(place, spec, needed)


def _missing(name: str, needed: str) -> CommandNotFound:
    if needed:
        return MissingInterpreter(f"{name!r} needs {needed}, which is not in the image.")
    return CommandNotFound(f"There is no command {name!r} in the image.")


def _next(place: Path, spec: ContainerSpec, path: str) -> str | None:
    found = place.stat()
    if not stat.S_ISREG(found.st_mode) or not _may_execute(found, spec.user):
        raise CommandNotRunnable(f"{path} can't be executed by user {spec.user[0]}.")
    with place.open("rb") as file:
        return _interpreter(file.read(4096), path)


def _interpreter(head: bytes, path: str) -> str | None:
    """What must be there too: of a script its interpreter, of a program its loader."""
    if head.startswith(b"#!"):
        words = head[2:].split(b"\n", 1)[0].split(None, 1)
        return os.fsdecode(words[0]) if words else None
    if not head.startswith(b"\x7fELF"):
        return None
    machine = struct.unpack_from("<H", head, 18)[0] if len(head) >= 20 else 0
    if machine not in _MACHINES.get(platform.machine(), (machine,)):
        raise CommandNotRunnable(f"{path} is a program for another kind of processor.")
    return _loader(head)


def _loader(head: bytes) -> str | None:
    """PT_INTERP of a 64-bit program; None if it is statically linked, or nothing that is known."""
    if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] != 2 or head[5] != 1:
        return None
    offset, size, count = *struct.unpack_from("<Q", head, 32), *struct.unpack_from("<HH", head, 54)
    for at in range(offset, offset + size * count, size or 1):
        if at + 40 > len(head):
            break
        kind, _, where, _, _, length = struct.unpack_from("<IIQQQQ", head, at)
        if kind == _PT_INTERP:
            return os.fsdecode(head[where : where + length].rstrip(b"\0"))
    return None


def _absolute(process: Process, path: str) -> str:
    return path if path.startswith("/") else f"{process.cwd}/{path}"


def _place(root: Path, spec: ContainerSpec, path: str) -> Path | None:
    """On this machine, mounts looked through; None where only the running container knows."""
    try:
        place = resolve(root, path)
    except OutOfReach:
        raise CommandNotFound(f"{path} is a loop of links.") from None
    inside = f"/{place.relative_to(root)}"
    for mount in spec.mounts:
        if inside.startswith(f"{mount.target}/"):
            return mount.source / inside[len(mount.target) + 1 :]
    return None if inside.startswith(_UNKNOWN) else place


def _may_execute(found: os.stat_result, user: tuple[int, int]) -> bool:
    if user[0] == found.st_uid:
        return bool(found.st_mode & stat.S_IXUSR)
    if user[1] == found.st_gid:
        return bool(found.st_mode & stat.S_IXGRP)
    return bool(found.st_mode & stat.S_IXOTH)
