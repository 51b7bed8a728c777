"""The folder of a job: what goes into its container, what comes out of it, what it wrote.

<root>/<sha256 of the job's id>/    for the worker alone
    input/       the job's files; the container sees them as /input and can't change them
    output/      empty at first; the container may write to it, as /output
    build/       a Dockerfile and its context
    artifacts/   what was collected from output/
    logs/        what it wrote to its two streams
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from penstock.ports.blobs import Blobs
from penstock.workloads.container.config import InputRules
from penstock.workloads.container.engine import Mount
from penstock.workloads.container.files.artifacts import collect, open_artifact
from penstock.workloads.container.files.clearing import remove_tree
from penstock.workloads.container.files.placing import BadInput as BadInput
from penstock.workloads.container.files.placing import Placing, PointerCheck, in_thread
from penstock.workloads.container.files.tree import Tree
from penstock.workloads.container.files.weighing import weight
from penstock.workloads.container.job import (
    INPUT_FOLDER,
    OUTPUT_FOLDER,
    ContainerJob,
    OutputFile,
)

_GONE = ".gone-"


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
        return self.folder / "logs"

    async def prepare(self, job: ContainerJob) -> tuple[Mount, ...]:
        """Make the folders that the container sees, and fill in its input. Raises BadInput, with
        nothing left of what this made."""
        mounts = []
        async with self._whole("input", "output", "artifacts"):
            if job.inputs:
                with Tree(self.folder / "input", self._rules) as tree:
                    await self._placing(tree).place("inputs", job.inputs)
                    await in_thread(tree.seal)
                mounts.append(Mount(self.folder / "input", INPUT_FOLDER))
            if job.outputs:
                await in_thread(self._make_output, job.user)
                mounts.append(Mount(self.folder / "output", OUTPUT_FOLDER, read_only=False))
        return tuple(mounts)

    async def build_context(self, job: ContainerJob) -> Path:
        """A folder with the Dockerfile and the files of its context. Raises BadInput, with
        nothing left of what this made."""
        assert job.build is not None
        async with self._whole("build"):
            with Tree(self.folder / "build", self._rules, read_only=False) as tree:
                placing = self._placing(tree)
                await placing.write("runtime.build.dockerfile", "Dockerfile", job.build.dockerfile)
                await placing.place("runtime.build.context", job.build.context)
                await in_thread(tree.seal)
        return self.folder / "build"

    def output_size(self) -> int:
        """Bytes that are in the output folder now. Raises Hidden. It blocks: meant for a
        thread."""
        return weight(self.folder / "output")

    async def collect(self, limit: int) -> tuple[tuple[OutputFile, ...], tuple[str, ...]]:
        """Take over what is in the output folder, up to so many bytes, and say what was not
        taken. The container has ended. Durable when this returns; may be asked again."""
        collected = await in_thread(
            collect, self.folder / "output", self.folder / "artifacts", limit
        )
        return tuple(collected.artifacts), collected.skipped

    def open(self, path: str) -> BinaryIO:
        """An artifact. Raises FileNotFoundError for everything else."""
        return open_artifact(self.folder / "artifacts", path)

    async def clear(self) -> None:
        """Remove all but the artifacts and what it wrote. Raises OSError if something stays."""
        await in_thread(self._clear, "input", "output", "build")

    async def delete(self) -> None:
        """Remove everything. Raises OSError if something stays."""
        await in_thread(remove_tree, self.folder)

    def _placing(self, tree: Tree) -> Placing:
        return Placing(tree, self._rules, self._blobs, self.folder, self._check)

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
        output = self.folder / "output"
        output.mkdir()
        if os.geteuid() == 0:
            os.chown(output, *user)
        else:
            with suppress(OSError):  # not every file system has such lists
                os.setxattr(output, "system.posix_acl_default", _access_for(os.geteuid()))
        # The container's user may be another one out here than in there.
        output.chmod(0o777)

    def _clear(self, *names: str) -> None:
        """Each is there as a whole or not at all, also when this is interrupted."""
        try:
            present = set(os.listdir(self.folder))
        except FileNotFoundError:
            return
        doomed = [name for name in present if name.startswith(_GONE)]
        for name in present.intersection(names):
            doomed.append(_GONE + secrets.token_hex(8))
            os.rename(self.folder / name, self.folder / doomed[-1])
        for name in doomed:
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
