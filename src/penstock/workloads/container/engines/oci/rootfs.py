"""Root file systems of images, seen from outside: where a path leads, and what every container
needs in one."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.workloads.container.engines.oci.bundle import MOUNT_POINTS

_MOST_LINKS = 40
_ENTRY = 512
"""Bytes that a file counts beside its content: it takes room, too."""


def resolve(root: Path, path: str) -> Path:
    """Where `path` really is below `root`, links followed as in a chroot. Parts that don't exist
    are taken as they are. Raises OSError for a loop of links."""
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
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            if target.startswith("/"):
                done.clear()
            todo[:0] = _parts(target)
        else:
            done.append(part)
    return root.joinpath(*done)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


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
