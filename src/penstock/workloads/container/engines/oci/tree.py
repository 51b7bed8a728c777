"""Making a root file system of layers, each a tar archive, safely.

Nothing outside the folder is ever touched: names that are absolute or climb are refused, links
are kept as they are but followed only as they would be inside the container, devices and FIFOs
are left out, and so are the set-user-id bits, which no container could use.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, cast

from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.engines.oci.bundle import MOUNT_POINTS
from penstock.workloads.container.engines.oci.rootfs import OutOfReach, resolve
from penstock.workloads.container.files.archives import Forward, check_shared

_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_COPY = 1 << 20
_MODE = 0o1777
_HEADER = 64 << 10
_MOST_ENTRIES = 10_000_000
_ENTRY = 512
"""Bytes that an entry counts beside its content: it takes room, too."""


class BadImage(EngineError):
    """An archive that is no image, or none that can be unpacked safely."""


class Tree:
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
        stream = Forward(layer, self._look, most_extended=_MOST_ENTRIES, header=_HEADER)
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

    def _add(self, stream: Forward, member: tarfile.TarInfo, own: _Own) -> None:
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

    def _put(self, stream: Forward, member: tarfile.TarInfo, place: Path) -> bool:
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


def add_folder(tree: Tree, folder: Path) -> Iterable[bytes]:
    """Copy a folder into a tree; gives what it is made of, for a checksum."""
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted([*folders, *files]):
            source = Path(at, name)
            yield from _copy(tree, source, source.relative_to(folder))


def _copy(tree: Tree, source: Path, name: Path) -> Iterable[bytes]:
    found, target = source.lstat(), tree.root / name
    if stat.S_ISLNK(found.st_mode):
        os.symlink(os.readlink(source), target)
        yield os.fsencode(os.readlink(source))
    elif stat.S_ISDIR(found.st_mode):
        target.mkdir()
    elif stat.S_ISREG(found.st_mode):
        tree._grow(found.st_size)
        with source.open("rb") as read, target.open("xb") as write:
            while data := read.read(_COPY):
                write.write(data)
                yield data
    else:
        return
    mode = 0o777 if stat.S_ISLNK(found.st_mode) else found.st_mode & _MODE
    yield f"\0{name}\0{found.st_mode:o}\0{found.st_uid}\0{found.st_gid}\0".encode(
        errors="surrogateescape"
    )
    os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        target.chmod(mode)
        os.utime(target, (found.st_atime, found.st_mtime))


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
