"""The folders of jobs on one machine: what goes into a container, what comes out of it, what it
wrote. Each is held by one process.

<root>/<sha256 of the owner and the job's id>/    for the worker alone
    input/       the job's files; the container sees them as /input and can't change them
    output/      empty at first; the container may write to it, as /output
    build/       a Dockerfile and its context
    build.log    the end of what the build said
    stdout.<offset>, stderr.<offset>, missed    what it wrote (`Output`)
    lock         the job's id; the process that has its lock holds the folder

A process holds the lock from before it makes the container until the job's end is recorded and
nothing is left. A folder that no process holds was left by one that died, or that stopped and let
its containers run.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path

from penstock.ports.blobs import Blobs
from penstock.workloads.container.config import InputRules
from penstock.workloads.container.engine import Mount
from penstock.workloads.container.files.inputs import BadInput as BadInput
from penstock.workloads.container.files.inputs import InputWriter, PointerCheck
from penstock.workloads.container.files.tree import Tree, remove_tree, weight
from penstock.workloads.container.job import INPUT_FOLDER, OUTPUT_FOLDER, ContainerJob
from penstock.workloads.container.timeouts import in_thread

_LOCK = "lock"
_OWNER = re.compile(r"worker-[0-9a-f]{32}")
_LONGEST_ID = 4096


class Sandbox:
    """Whatever takes long happens in a thread; a cancel waits for it, so that nothing goes on
    behind the back of whoever cancelled."""

    def __init__(
        self,
        folder: Path,
        rules: InputRules,
        blobs: Blobs | None,
        check: PointerCheck | None = None,
    ) -> None:
        self.folder = folder
        self._rules = rules
        self._blobs = blobs
        self._check = check

    @property
    def logs(self) -> Path:
        """For `Output`."""
        return self.folder

    @property
    def output(self) -> Path:
        """What the container sees as /output."""
        return self.folder / "output"

    @property
    def build_log(self) -> Path:
        return self.folder / "build.log"

    async def prepare(self, job: ContainerJob) -> tuple[Mount, ...]:
        """Make the folders that the container sees, and fill in its input. Raises BadInput, with
        nothing left of what this made."""
        if not (job.inputs or job.outputs or self.output.exists()):
            return ()
        mounts = []
        async with self._whole("input", "output"):
            if job.inputs:
                tree = Tree(self.folder / "input", self._rules)
                await self._writer(tree).place("inputs", job.inputs)
                await in_thread(tree.seal)
                mounts.append(Mount(self.folder / "input", INPUT_FOLDER))
            if job.outputs:
                await in_thread(self._make_output, job.user)
                mounts.append(Mount(self.output, OUTPUT_FOLDER, read_only=False))
        return tuple(mounts)

    async def build_context(self, job: ContainerJob) -> Path:
        """A folder with the Dockerfile and the files of its context. Raises BadInput, with
        nothing left of what this made."""
        assert job.build is not None
        async with self._whole("build"):
            tree = Tree(self.folder / "build", self._rules, read_only=False)
            writer = self._writer(tree)
            await writer.write("runtime.build.dockerfile", "Dockerfile", job.build.dockerfile)
            await writer.place("runtime.build.context", job.build.context)
            await in_thread(tree.seal)
        return self.folder / "build"

    def output_size(self) -> int:
        """Bytes that are in the output folder now. Raises Hidden. It blocks: meant for a
        thread."""
        return weight(self.output)

    def keep_build_log(self, data: bytes) -> None:
        if data:
            with suppress(OSError):  # a full disk costs the log, not the job
                self.build_log.write_bytes(data)

    async def delete(self) -> None:
        """Remove everything. Raises OSError if something stays."""
        await in_thread(remove_tree, self.folder)

    def _writer(self, tree: Tree) -> InputWriter:
        return InputWriter(tree, self._rules, self._blobs, self.folder, self._check)

    @asynccontextmanager
    async def _whole(self, *names: str) -> AsyncIterator[None]:
        """Begin without these, and end without them if it fails."""
        was_there = self.folder.exists()
        try:
            await in_thread(self._clear, *names)
            await in_thread(self._make_folder)
            yield
        except BaseException:
            await in_thread(self._clear, *names)
            if not was_there:
                with suppress(OSError):
                    self.folder.rmdir()
            raise

    def _make_folder(self) -> None:
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        # Somebody may have made it otherwise; what is inside is open to the container's user.
        self.folder.chmod(0o700)

    def _make_output(self, user: tuple[int, int]) -> None:
        self._make_folder()
        output = self.output
        output.mkdir()
        if os.geteuid() == 0:
            os.chown(output, *user)
        else:
            with suppress(OSError):  # not every file system has such lists
                os.setxattr(output, "system.posix_acl_default", _access_for(os.geteuid()))
        # The container's user may be another one out here than in there.
        output.chmod(0o777)

    def _clear(self, *names: str) -> None:
        for name in names:
            remove_tree(self.folder / name)


def _access_for(user: int) -> bytes:
    """A default access control list (acl(5)): a user may do what the owner may with whatever is
    made in a folder; everybody else may read."""
    nobody = 0xFFFFFFFF
    own, named, group, mask, others = 0x01, 0x02, 0x04, 0x10, 0x20
    entries = ((own, 7, nobody), (named, 7, user), (group, 5, nobody), (mask, 7, nobody))
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", *entry) for entry in (*entries, (others, 5, nobody))
    )


class JobFolders:
    """Those of one owner; others' may be in the same place."""

    def __init__(
        self, root: Path, rules: InputRules, blobs: Blobs | None = None, owner: str = ""
    ) -> None:
        self._root, self._rules, self._blobs, self._owner = root, rules, blobs, owner
        self._held: dict[str, int] = {}
        """Open lock files, by job id."""

    def sandbox(self, job_id: str, check: PointerCheck | None = None) -> Sandbox:
        """A job's folder, whether or not it is there. `check` is asked before a pointer is
        followed."""
        return Sandbox(self._root / self._name(job_id), self._rules, self._blobs, check)

    def hold(self, job_id: str) -> bool:
        """Hold a job's folder, which is made if need be; False if another process holds it."""
        if job_id in self._held:
            return True
        folder = self._root / self._name(job_id)
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
        mine = {self._name(job_id): job_id for job_id in self._held}
        found = []
        try:
            names = sorted(os.listdir(self._root))
        except FileNotFoundError:
            return []
        for name in names:
            # To open and close a file that we hold would give up its lock.
            job_id = mine.get(name) or self._read(name)
            if job_id and self._name(job_id) == name:
                found.append(job_id)
        return found

    def close(self) -> None:
        for job_id in list(self._held):
            self.release(job_id)

    def _read(self, name: str) -> str:
        try:
            with open(self._root / name / _LOCK, "rb") as file:
                return file.read(_LONGEST_ID).decode()
        except (OSError, UnicodeDecodeError):
            return ""

    def _name(self, job_id: str) -> str:
        """Nothing of a job's id is ever in a path."""
        known = f"{self._owner}/{job_id}"
        return sha256(known.encode(errors="surrogatepass")).hexdigest()


def owner_of(folder: Path) -> str:
    """An id of this folder on this machine, made once."""
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
