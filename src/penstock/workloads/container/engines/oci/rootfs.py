"""Root file systems seen from outside: made of layers, each a tar archive; where a path leads, and
whether a command can be executed.

Nothing outside the folder is ever touched: names that are absolute or climb are refused, links
are kept as they are but followed only as they would be inside the container, devices and FIFOs
are left out, and so are the set-user-id bits, which no container could use.

With an init in front of it, no runtime tells a missing command from one that ended with exit code
127. The root file system of an image never changes, so it can be found out beforehand.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import stat
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from penstock.workloads.container.engine import (
    CommandNotFound,
    CommandNotRunnable,
    ContainerSpec,
    EngineError,
)
from penstock.workloads.container.engines.oci.bundle import MOUNT_POINTS, Process
from penstock.workloads.container.files.archives import ForwardReader, check_shared

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


# -- commands -----------------------------------------------------------------------------------

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


# -- making one ---------------------------------------------------------------------------------

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_COPY = 1 << 20
_MODE = 0o1777
_HEADER = 64 << 10
_MOST_ENTRIES = 10_000_000
_ENTRY = 512
"""Bytes that an entry counts beside its content: it takes room, too."""


class BadImage(EngineError):
    """An archive that is no image, or none that can be unpacked safely."""


class LayerTree:
    """A root file system that is being made in a folder that nobody else knows."""

    def __init__(
        self, root: Path, limit: int, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """`limit` is in bytes; once it is `stopped`, it is given up."""
        root.mkdir(parents=True)
        root.chmod(0o755)
        self.root = root
        self.size = 0
        self._limit = limit
        self._stopped = stopped

    def apply(self, layer: IO[bytes]) -> None:
        """A layer on top of what is there. `layer` is read to the end, whatever follows the
        archive's own end mark."""
        own = _Own()
        stream = ForwardReader(layer, self._look, most_extended=_MOST_ENTRIES, header=_HEADER)
        try:
            with tarfile.TarFile(fileobj=cast("IO[bytes]", stream)) as archive:
                while (member := archive.next()) is not None:
                    check_shared(archive)
                    self._add(stream, member, own)
            stream.check_end()
        except (tarfile.TarError, OutOfReach, ValueError) as error:
            raise BadImage(f"The archive can't be unpacked: {error}.") from error
        while data := layer.read(_COPY):
            self._look(len(data))

    def _look(self, size: int) -> None:
        if self._stopped():
            raise BadImage("It was given up while it was unpacked.")

    def finish(self) -> None:
        """What every container needs: places for its mounts, and a name for itself."""
        for name in MOUNT_POINTS:
            place = resolve(self.root, name)
            if not place.is_dir():
                place.unlink(missing_ok=True)
                place.mkdir(parents=True, mode=0o755)
        hosts = resolve(self.root, "etc/hosts")
        if not hosts.exists() or not hosts.stat().st_size:
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")

    def _add(self, stream: ForwardReader, member: tarfile.TarInfo, own: _Own) -> None:
        self._grow(_ENTRY)
        parts = _safe(member.name)
        if not parts:
            if member.isdir():
                self.root.chmod(member.mode & _MODE or 0o755)
            return
        parent = self._parent(parts)
        name = parts[-1]
        if name == _OPAQUE:
            self._empty(parent, own)
        elif name.startswith(_WHITEOUT):
            self._whiteout(parent, name, own)
        elif self._put(stream, member, parent / name):
            own.add(parent / name)

    def _put(self, stream: ForwardReader, member: tarfile.TarInfo, place: Path) -> bool:
        if member.isdir():
            if not place.is_dir() or place.is_symlink():
                _discard(place)
                place.mkdir()
        elif member.isreg():
            if member.issparse() or member.size < 0:
                raise BadImage(f"{member.name!r} is a sparse file; pack it without --sparse.")
            self._grow(member.size)
            _discard(place)
            with place.open("xb") as target:
                for piece in stream.pieces(member.size):
                    target.write(piece)
        elif member.issym():
            _discard(place)
            os.symlink(member.linkname, place)
        elif member.islnk():
            self._link(member, place)
            return True
        else:
            return False
        os.chown(place, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            place.chmod(member.mode & _MODE)
        os.utime(place, (member.mtime, member.mtime), follow_symlinks=False)
        return True

    def _link(self, member: tarfile.TarInfo, place: Path) -> None:
        parts = _safe(member.linkname)
        if not parts:
            raise BadImage(f"{member.name!r} is a link to nothing.")
        target = self._parent(parts, make=False) / parts[-1]
        if not _is_file_or_link(target):
            raise BadImage(f"{member.name!r} is a link to {member.linkname!r}, which is not there.")
        if target != place:
            _discard(place)
            os.link(target, place, follow_symlinks=False)

    def _parent(self, parts: list[str], *, make: bool = True) -> Path:
        parent = resolve(self.root, "/".join(parts[:-1]))
        if make and not parent.is_dir():
            try:
                parent.mkdir(parents=True, mode=0o755)
            except OSError as error:
                raise BadImage(f"{'/'.join(parts)!r} is below a file.") from error
        return parent

    def _whiteout(self, parent: Path, name: str, own: _Own) -> None:
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in ("", ".", "..") or hidden.startswith(_WHITEOUT):
            return
        if parent / hidden not in own.entries:
            _discard(parent / hidden)

    def _empty(self, folder: Path, own: _Own) -> None:
        """Remove what older layers left in it, and keep what this one brought."""
        for entry in list(folder.iterdir()):
            if entry in own.entries or entry in own.above:
                if entry.is_dir() and not entry.is_symlink():
                    self._empty(entry, own)
            else:
                _discard(entry)

    def _grow(self, size: int) -> None:
        self.size += size
        if self.size > self._limit:
            raise BadImage(f"The image is larger than {self._limit} bytes.")


class _Own:
    """What a layer has brought so far."""

    def __init__(self) -> None:
        self.entries: set[Path] = set()
        self.above: set[Path] = set()
        """The folders they are in."""

    def add(self, place: Path) -> None:
        self.entries.add(place)
        for folder in place.parents:
            if folder in self.above:
                return
            self.above.add(folder)


def _safe(name: str) -> list[str]:
    if name.startswith("/"):
        raise BadImage(f"{name!r} is an absolute name.")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise BadImage(f"{name!r} leads outside.")
    return parts


def _is_file_or_link(place: Path) -> bool:
    return place.is_symlink() or place.is_file()


def _discard(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
