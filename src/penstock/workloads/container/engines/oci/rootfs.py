"""Root file systems of images, seen from outside: where a path leads, whether a command can be
executed, and what every container needs in one."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.workloads.container.engine import CommandNotFound, CommandNotRunnable, ContainerSpec
from penstock.workloads.container.engines.oci.bundle import MOUNT_POINTS, Process

_MOST_LINKS = 40
_ENTRY = 512
"""Bytes that a file counts beside its content: it takes room, too."""
_UNKNOWN = ("/proc/", "/dev/", "/sys/", "/tmp/")
"""What is there is known only when the container runs."""


class OutOfReach(OSError):
    """A loop of links."""


def resolve(root: Path, path: str) -> Path:
    """Where `path` really is below `root`, links followed as in a chroot. Parts that don't exist
    are taken as they are."""
    todo = _parts(path)
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            del done[-1:]
            continue
        here = os.path.join(root, *done, part)
        if os.path.islink(here):
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


# -- commands -----------------------------------------------------------------------------------


def check_command(root: Path, spec: ContainerSpec, process: Process) -> None:
    """Raises CommandNotFound or CommandNotRunnable; says nothing where it can't be known.

    With an init in front of it, no runtime tells a missing command from one that ended with exit
    code 127. The root file system of an image never changes, so it can be found out beforehand."""
    if not process.args or not process.args[0]:
        raise CommandNotFound("The image has no command of its own, and the job names none.")
    name = process.args[0]
    folders = process.env.get("PATH", "").split(":") if "/" not in name else ["."]
    is_there = False
    for folder in folders:
        path = os.path.join(process.cwd, folder or ".", name)
        place = None if path.startswith(_UNKNOWN) else _place(root, spec, path)
        if place is None or _may_execute(place, spec.user):
            return
        is_there = is_there or place.exists()
    if is_there:
        raise CommandNotRunnable(f"{name!r} can't be executed by user {spec.user[0]}.")
    raise CommandNotFound(f"There is no command {name!r} in the image or its PATH.")


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


def _may_execute(place: Path, user: tuple[int, int]) -> bool:
    try:
        found = place.stat()
    except OSError:
        return False
    if user[0] == found.st_uid:
        bit = stat.S_IXUSR
    else:
        bit = stat.S_IXGRP if user[1] == found.st_gid else stat.S_IXOTH
    return stat.S_ISREG(found.st_mode) and bool(found.st_mode & bit)


# -- whole trees --------------------------------------------------------------------------------


def finish(root: Path) -> int:
    """Make a new root file system ready for containers: with places for their mounts and a name for
    themselves, without devices, pipes and set-user-id bits. Returns its size."""
    for path, found in _entries(root):
        if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            if found.st_mode & (stat.S_ISUID | stat.S_ISGID):
                os.chmod(path, found.st_mode & 0o1777)
        elif not stat.S_ISLNK(found.st_mode):
            os.unlink(path)
    size = tree_size(root)
    for name in MOUNT_POINTS:
        place = resolve(root, name)
        if not place.is_dir():
            place.unlink(missing_ok=True)
            place.mkdir(parents=True, mode=0o755)
    hosts = resolve(root, "etc/hosts")
    if not hosts.exists() or not hosts.stat().st_size:
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    return size


def tree_size(root: Path) -> int:
    """Bytes of everything below a folder. Holes count: programs may fill them."""
    total = 0
    linked: set[tuple[int, int]] = set()
    for _, found in _entries(root):
        total += _ENTRY
        if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in linked:
            total += found.st_size
            if found.st_nlink > 1:
                linked.add((found.st_dev, found.st_ino))
    return total


def tree_digest(root: Path) -> str:
    """The same for trees with the same names, owners, modes and contents."""
    digest = hashlib.sha256()
    for path, found in sorted(_entries(root), key=lambda entry: entry[0]):
        about = (os.path.relpath(path, root), found.st_mode, found.st_uid, found.st_gid)
        content = ""
        if stat.S_ISLNK(found.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(found.st_mode):
            with open(path, "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(repr((about, content)).encode(errors="surrogateescape"))
    return digest.hexdigest()


def _entries(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, which somebody may be filling."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            try:
                yield path, os.lstat(path)
            except FileNotFoundError:
                continue
