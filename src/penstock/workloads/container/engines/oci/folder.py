"""Folders of an engine: `live`, for what ends with the machine, and in it one per container."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.workloads.container.engines.oci.shim import LOG, STARTED
from penstock.workloads.container.files.tree import remove_tree

_MEMORY = ("/run", "/dev/shm")
_PREFIX, _BACK = "penstock-oci-", "root"
_ABANDONED = 60.0
"""Seconds after which nobody can still be making a folder in memory."""


def live_folder(root: Path) -> Path:
    """`root/live`, for what ends when the machine does: a link to a folder in memory, where files
    are made in microseconds, or a folder on disk if the machine has no place for that."""
    live = root / "live"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / ".live.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_private(live):
            _make_live(live)
    return live


def _make_live(live: Path) -> None:
    live.unlink(missing_ok=True)  # of an earlier boot
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = {place for _, place, kind, *_ in mounts if kind == "tmpfs"}
    for place in (Path(one) for one in _MEMORY if one in places):
        with contextlib.suppress(OSError):
            _clear_memory(place)
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            (made / _BACK).symlink_to(live)
            live.symlink_to(made)
            return
    live.mkdir(mode=0o700)


def _clear_memory(place: Path) -> None:
    """Remove folders to which no link leads any more: those of a root that was deleted."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            linked = os.path.realpath(os.readlink(folder / _BACK)) == str(folder)
            if not linked and time.time() - folder.stat().st_mtime > _ABANDONED:
                remove_tree(folder)


def _is_private(folder: Path) -> bool:
    """Whether it is there, and nobody else can have put anything into it."""
    try:
        found = folder.stat()
    except OSError:
        return False
    private = stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()
    return stat.S_ISDIR(found.st_mode) and private


class ContainerManifest(Struct, frozen=True, kw_only=True):
    """`plan.json`: what is needed to know of a container later."""

    image: str
    runtime: str
    layer: str = ""
    """A folder with a writable layer above the image's root file system, if it has one."""
    labels: Mapping[str, str] = {}
    created: float = 0


class _LogLine(Struct):
    msg: str = ""


class RunFolder:
    """`live/run/<name>`: a bundle, and files by which the container is known after any crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._manifest: ContainerManifest | None = None

    def fill(self, manifest: ContainerManifest, config: bytes) -> None:
        """The manifest comes last: a folder without a whole one is no container."""
        for name, data in (("config.json", config), ("plan.json", msgspec.json.encode(manifest))):
            with open(self.path / name, "xb", buffering=0) as file:
                file.write(data)
        self._manifest = manifest

    def age(self) -> float:
        """Seconds since something was last made in it."""
        try:
            return time.time() - self.path.stat().st_mtime
        except OSError:
            return 0

    def manifest(self) -> ContainerManifest | None:
        """It never changes."""
        if self._manifest is None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                data = (self.path / "plan.json").read_bytes()
                self._manifest = msgspec.json.decode(data, type=ContainerManifest)
        return self._manifest

    @property
    def is_started(self) -> bool:
        """Whether a shim began to start it."""
        return os.path.exists(f"{self.path}/{STARTED}")

    def complaint(self) -> str:
        """The last thing that the runtime said."""
        with contextlib.suppress(OSError):
            for line in reversed((self.path / LOG).read_bytes().splitlines()):
                with contextlib.suppress(msgspec.DecodeError):
                    said = msgspec.json.decode(line, type=_LogLine)
                    if said.msg:
                        return said.msg
        return ""
