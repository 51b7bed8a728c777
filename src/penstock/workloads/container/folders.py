"""The folders of jobs on one machine, each held by one process.

A process holds the lock of a folder from before it makes the container until the job's end is
recorded and nothing is left. A folder that no process holds was left by one that died, or that
stopped and let its containers run.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from hashlib import sha256
from pathlib import Path

from penstock.ports.blobs import Blobs
from penstock.workloads.container.config import InputRules
from penstock.workloads.container.files.placing import PointerCheck
from penstock.workloads.container.files.sandbox import Sandbox

_LOCK = "lock"
"""A file with the job's id; whoever has its lock holds the folder."""
_OWNER = re.compile(r"worker-[0-9a-f]{32}")
_LONGEST = 4096


class JobFolders:
    def __init__(self, root: Path, rules: InputRules, blobs: Blobs | None = None) -> None:
        self._root, self._rules, self._blobs = root, rules, blobs
        self._held: dict[str, int] = {}
        """Open lock files, by job id."""

    def sandbox(self, job_id: str, check: PointerCheck | None = None) -> Sandbox:
        """A job's folder, whether or not it is there. `check` is asked before a pointer is
        followed."""
        return Sandbox(self._root / _name(job_id), self._rules, self._blobs, check)

    def hold(self, job_id: str) -> bool:
        """Hold a job's folder, which is made if need be; False if another process holds it."""
        if job_id in self._held:
            return True
        folder = self._root / _name(job_id)
        while True:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # removed just now
            try:
                # A lock of this kind is not passed on to forked children, which may outlive us.
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                return False
            if os.fstat(handle).st_nlink:
                break
            os.close(handle)
        if not os.fstat(handle).st_size:
            os.pwrite(handle, job_id.encode(), 0)
        self._held[job_id] = handle
        return True

    def holds(self, job_id: str) -> bool:
        return job_id in self._held

    def release(self, job_id: str) -> None:
        """Let another process have it; nothing is removed."""
        if (handle := self._held.pop(job_id, None)) is not None:
            os.close(handle)

    def job_ids(self) -> list[str]:
        """The jobs whose folders are there and not held by another process of which this one
        knows; some may be held by others."""
        mine = {_name(job_id): job_id for job_id in self._held}
        found = []
        try:
            names = sorted(os.listdir(self._root))
        except FileNotFoundError:
            return []
        for name in names:
            # To open and close a file that we hold would give up its lock.
            job_id = mine.get(name) or self._read(name)
            if job_id and _name(job_id) == name:
                found.append(job_id)
        return found

    def close(self) -> None:
        for job_id in list(self._held):
            self.release(job_id)

    def _read(self, name: str) -> str:
        try:
            with open(self._root / name / _LOCK, "rb") as file:
                return file.read(_LONGEST).decode()
        except (OSError, UnicodeDecodeError):
            return ""


def _name(job_id: str) -> str:
    """Nothing of a job's id is ever in a path."""
    return sha256(job_id.encode(errors="surrogatepass")).hexdigest()


def owner_of(folder: Path) -> str:
    """The id by which the containers of all processes on this folder are known; made once."""
    path = folder / "owner"
    while True:
        try:
            known = path.read_text().strip()
            if _OWNER.fullmatch(known):
                return known
        except FileNotFoundError:
            pass
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f".owner-{secrets.token_hex(8)}"
        with open(new, "w") as file:
            file.write(f"worker-{secrets.token_hex(16)}")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(new, path)  # another process may be first
        except FileExistsError:
            if not _OWNER.fullmatch(path.read_text().strip()):
                os.replace(new, path)
                continue
        new.unlink(missing_ok=True)
