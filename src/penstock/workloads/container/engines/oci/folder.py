"""What is on disk of one container, and what can be told from it after any crash."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.workloads.container.files.tree import remove_tree

PLAN, CONFIG, LOG = "plan.json", "config.json", "log"
PID, LAUNCHER, STATUS = "pid", "launcher", "status"
STREAMS = ("stdout", "stderr")
ROOTFS = "rootfs"
LAYER = ("upper", "work")


class ContainerManifest(Struct, frozen=True, kw_only=True):
    """`plan.json`: what is needed to know of a container later."""

    image: str
    runtime: str
    groups: tuple[str, ...] = ()
    """Cgroups that the launcher steps into."""
    lower: str = ""
    """The image's root file system, relative to the folder, if the container has a layer above."""
    labels: Mapping[str, str] = {}
    created: float = 0


_NOTE = msgspec.json.Decoder(ContainerManifest)
_ENOUGH = 1 << 20


class _LogLine(Struct):
    msg: str = ""
    level: str = ""


class RunFolder:
    """`run/<name>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._prefix = f"{path}/"

    def make(self) -> None:
        """Raises FileExistsError if the name is taken."""
        self.path.mkdir(mode=0o700)

    def add_layer(self) -> None:
        """A writable layer above an image; `launch` mounts both at `ROOTFS`."""
        for name in (ROOTFS, *LAYER):
            (self.path / name).mkdir(mode=0o755)

    def fill(self, user: tuple[int, int], manifest: ContainerManifest, config: bytes) -> None:
        """The manifest comes last: a folder without a whole one is no container."""
        for stream in STREAMS:
            # A program may open /dev/stdout again, so the FIFO must be its own.
            os.mkfifo(self._prefix + stream, 0o600)
            os.chown(self._prefix + stream, *user)
        (self.path / CONFIG).write_bytes(config)
        (self.path / PLAN).write_bytes(msgspec.json.encode(manifest))

    def age(self) -> float:
        """Seconds since something was last made in it."""
        try:
            return time.time() - self.path.stat().st_mtime
        except OSError:
            return 0

    def manifest(self) -> ContainerManifest | None:
        try:
            return _NOTE.decode(self._read(PLAN))
        except (OSError, msgspec.DecodeError):
            return None

    def open_stream(self, stream: str, flags: int) -> int:
        return os.open(self._prefix + stream, flags | os.O_NOFOLLOW | os.O_CLOEXEC)

    @property
    def pid(self) -> int | None:
        """The container's first process; None as long as the runtime has not started it."""
        return self._number(PID)

    @property
    def status(self) -> int | None:
        """The runtime's exit code, which is the container's if it was started."""
        return self._number(STATUS)

    @property
    def launcher(self) -> int | None:
        """Its PID, if it was started: whether or not it is still there."""
        return self._number(LAUNCHER)

    def launcher_fd(self) -> int | None:
        """A pidfd of the launcher, if it lives. A PID that was given anew is told by its
        command line, which names this folder."""
        pid = self.launcher
        if pid is None:
            return None
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if os.fsencode(self.path) in words:
                    return fd
            os.close(fd)
        return None

    def complaint(self) -> str:
        """The last thing that the runtime said."""
        with contextlib.suppress(OSError):
            for line in reversed((self.path / LOG).read_bytes().splitlines()):
                with contextlib.suppress(msgspec.DecodeError):
                    said = msgspec.json.decode(line, type=_LogLine)
                    if said.msg:
                        return said.msg
        return ""

    def _number(self, name: str) -> int | None:
        try:
            return int(self._read(name))
        except (OSError, ValueError):
            return None

    def _read(self, name: str) -> bytes:
        fd = os.open(self._prefix + name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _ENOUGH)
        finally:
            os.close(fd)


class Gone:
    """`gone/`. One rename takes a folder out of `run/`: a container is there with its manifest, or
    not at all, at whatever moment a worker dies. What is in here is nobody's."""

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True, exist_ok=True, mode=0o700)

    def discard(self, folder: Path) -> None:
        """Raises OSError; once it is out of its place, `clear` does the rest."""
        # The same name may be made and removed again before the first is deleted.
        there = self._place / f"{folder.name}.{secrets.token_hex(4)}"
        try:
            os.rename(folder, there)
        except FileNotFoundError:
            return
        remove_tree(there)

    def clear(self) -> None:
        """Delete what others did not. Raises OSError, after what can be deleted was."""
        failed: list[OSError] = []
        for path in sorted(self._place.iterdir()):
            try:
                remove_tree(path)
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]
