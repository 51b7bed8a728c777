"""Containers by `runc`, `crun` or `runsc`, without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.workloads.container.engine import (
    NO_INIT,
    BuildPlan,
    EngineError,
    EngineFacts,
    Exit,
    Found,
    Image,
    ImageNotFound,
    Plan,
    Unsupported,
)
from penstock.workloads.container.engines.oci.bundle import Process, process_of
from penstock.workloads.container.engines.oci.containers import Containers, has_labels
from penstock.workloads.container.engines.oci.fetching import can_fetch, fetch
from penstock.workloads.container.engines.oci.images import LARGEST, ImageStore
from penstock.workloads.container.engines.oci.machine import Machine, version_of
from penstock.workloads.container.engines.oci.programs import check_command
from penstock.workloads.container.engines.oci.rooted import resolve
from penstock.workloads.container.engines.oci.streams import AttachedStreams
from penstock.workloads.container.engines.oci.trial import choose_runtime, sweep
from penstock.workloads.container.job import Usage


class OciEngine:
    """An `Engine` below a folder: images, containers and the runtimes' own state.

    `runtime` is the one for plans that name none; empty means the first of crun and runc that
    works here. Without a static init on the machine (tini, docker-init, catatonit) a container's
    own program is its first process: orphans are not reaped, and a signal that would end it,
    but that the kernel keeps from first processes, is made a SIGKILL.
    """

    name = "oci"
    keeps_output = True

    def __init__(self, root: Path, *, runtime: str = "", max_image: int = LARGEST) -> None:
        """`max_image`: bytes that an image may have, unpacked."""
        self.store = ImageStore(root.absolute() / "images", limit=max_image)
        self._root = root.absolute()
        self._wanted = runtime
        self._ready: tuple[Machine, Containers] | None = None
        self._finding = asyncio.Lock()

    async def facts(self) -> EngineFacts:
        machine, _ = await self._opened()
        return EngineFacts(
            name=self.name,
            version=await version_of(machine.runtime),
            runtimes=machine.runtimes(),
            root_dir=str(self._root),
            can_pull=can_fetch(),
            where=machine.runtime.path,
            security=("seccomp", "no-new-privileges", "init" if machine.init else NO_INIT),
        )

    async def close(self) -> None:
        """Let go of everything; containers go on."""
        if self._ready is not None:
            self._ready[1].close()
            self._ready = None

    async def _opened(self) -> tuple[Machine, Containers]:
        """When it is first asked for anything: nothing happens before that."""
        if self._ready is not None:
            return self._ready
        async with self._finding:
            if self._ready is None:
                machine = Machine(self._wanted)
                containers = Containers(self._root, machine)
                try:
                    await choose_runtime(containers, machine, self._root)
                    await sweep(containers)
                except BaseException:
                    containers.close()
                    raise
                self._ready = machine, containers
            return self._ready

    async def _containers(self) -> Containers:
        return (await self._opened())[1]

    # -- images -----------------------------------------------------------------

    async def image(self, reference: str) -> Image:
        return self.store.find(reference)

    async def images(self, labels: Mapping[str, str]) -> list[Image]:
        found = await asyncio.to_thread(self.store.list)
        return [image for image in found if has_labels(image.labels, labels)]

    async def pull(self, reference: str) -> Image:
        return await fetch(self.store, reference)

    async def build(self, plan: BuildPlan, say: Callable[[bytes], None]) -> Image:
        raise Unsupported("The oci engine can't build images; use Docker or Podman for that.")

    async def remove_image(self, reference: str) -> None:
        with contextlib.suppress(ImageNotFound):
            image = self.store.find(reference)
            for folder in (await self._containers()).folders():
                if (note := folder.note()) and note.image == image.id:
                    raise EngineError(f"The image {reference!r} is used by {folder.name}.")
            await asyncio.to_thread(self.store.remove, reference)

    # -- containers -------------------------------------------------------------

    async def create(self, plan: Plan) -> None:
        machine, containers = await self._opened()
        image = self.store.find(plan.image)
        rootfs = self.store.rootfs(image)
        process = process_of(plan, image)
        _check_folders(rootfs, plan, process)
        check_command(rootfs, plan, process)
        containers.make(machine.choose(plan.runtime), plan, process, rootfs)

    async def attach(self, name: str, *, stdin: bool) -> AttachedStreams:
        return (await self._containers()).attach(name, stdin=stdin)

    async def start(self, name: str) -> None:
        await (await self._containers()).start(name)

    async def wait(self, name: str) -> Exit:
        return await (await self._containers()).wait(name)

    async def usage(self, name: str) -> Usage:
        machine, _ = await self._opened()
        return machine.cgroups.usage(name)

    async def signal(self, name: str, number: int) -> None:
        await (await self._containers()).signal(name, number)

    async def kill(self, name: str) -> None:
        await (await self._containers()).kill(name)

    async def remove(self, name: str) -> None:
        await (await self._containers()).remove(name)

    async def find(self, labels: Mapping[str, str]) -> list[Found]:
        """What is no container, and can't become one any more, is cleared away first."""
        containers = await self._containers()
        await sweep(containers)
        return containers.find(labels)


def _check_folders(rootfs: Path, plan: Plan, process: Process) -> None:
    """The root file system is never written to, so places for mounts must be there."""
    for mount in plan.mounts:
        if not resolve(rootfs, mount.target).is_dir():
            raise EngineError(f"The image has no folder {mount.target} to mount on.")
    inside = any(f"{process.cwd}/".startswith(f"{mount.target}/") for mount in plan.mounts)
    if not inside and not resolve(rootfs, process.cwd).is_dir():
        raise EngineError(f"The image has no folder {process.cwd} to work in.")
