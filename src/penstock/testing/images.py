"""The one image that container engines under test have: made of the machine's static busybox."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

IMAGE = "alpine:latest"
"""The image that every one of them has; its command is a shell."""
NOT_EXECUTABLE = "/etc/notes"
"""A file in it that can't be run."""


class EngineMissing(Exception):
    """This machine can't run that engine; the text says why and what to do."""


def busybox_tree(folder: Path) -> Path:
    """The root file system of IMAGE."""
    program = needed("busybox")
    (folder / "bin").mkdir(parents=True)
    shutil.copy(program, folder / "bin" / "busybox")
    names = subprocess.run([program, "--list"], check=True, capture_output=True, text=True)
    for name in set(names.stdout.split()) - {"busybox"}:
        (folder / "bin" / name).symlink_to("busybox")
    for name in ("etc", "tmp", "work"):
        (folder / name).mkdir()
    (folder / "tmp").chmod(0o1777)
    (folder / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    notes = folder / NOT_EXECUTABLE.lstrip("/")
    notes.write_text("these are notes, not a program\n")
    notes.chmod(0o644)
    return folder


def needed(program: str) -> str:
    """The path of a program that a private engine or its image needs."""
    if os.geteuid() != 0:
        raise EngineMissing("a private engine needs root")
    found = {name: shutil.which(name) for name in (program, "unshare", "setpriv")}
    if missing := [name for name, path in found.items() if path is None]:
        raise EngineMissing(f"not installed: {', '.join(missing)}")
    return found[program] or program
