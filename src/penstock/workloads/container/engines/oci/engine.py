"""Containers by `runc`, `crun` or `runsc`, without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import (
    NO_INIT,
    BuildRequest,
    CommandNotFound,
    ContainerSpec,
    ContainerSummary,
    EngineError,
    EngineFacts,
    EngineUnavailable,
    ExitStatus,
    Image,
    ImageNotFound,
    RegistryAuth,
    Unsupported,
)
from penstock.workloads.container.engines.oci.bundle import INIT, MOUNT_POINTS, Process, process_of
from penstock.workloads.container.engines.oci.containers import Containers, has_labels
from penstock.workloads.container.engines.oci.images import LARGEST, ImageStore, can_pull, pull
from penstock.workloads.container.engines.oci.machine import OciMachine, Runtime, version_of
from penstock.workloads.container.engines.oci.rootfs import resolve
from penstock.workloads.container.engines.oci.streams import AttachedStreams
from penstock.workloads.container.job import Stream, Usage


class OciEngine:
    """An `ContainerEngine` below a folder: images, containers and the runtimes' own state.

    `runtime` is the one for specs that name none; empty means the first of crun and runc that
    works here. Without a static init on the machine (tini, docker-init, catatonit) a container's
    own program is its first process: orphans are not reaped, and a signal that would end it,
    but that the kernel keeps from first processes, is made a SIGKILL.
    """

    name = "oci"

    def __init__(self, root: Path, *, runtime: str = "", max_image: int = LARGEST) -> None:
        """`max_image`: bytes that an image may have, unpacked."""
        self.store = ImageStore(root.absolute() / "images", limit=max_image)
        self._root = root.absolute()
        self._wanted = runtime
        self._ready: tuple[OciMachine, Containers] | None = None
        self._finding = asyncio.Lock()

    async def facts(self) -> EngineFacts:
        machine, _ = await self._opened()
        return EngineFacts(
            name=self.name,
            version=await version_of(machine.runtime),
            runtimes=machine.runtimes(),
            root_dir=str(self._root),
            can_pull=can_pull(),
            where=machine.runtime.path,
            security=("seccomp", "no-new-privileges", "init" if machine.init else NO_INIT),
        )

    async def close(self) -> None:
        """Let go of everything; containers go on."""
        if self._ready is not None:
            self._ready[1].close()
            self._ready = None

    async def _opened(self) -> tuple[OciMachine, Containers]:
        """When it is first asked for anything: nothing happens before that."""
        if self._ready is not None:
            return self._ready
        async with self._finding:
            if self._ready is None:
                machine = OciMachine(self._wanted)
                containers = Containers(self._root, machine)
                try:
                    await containers.open()
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

    async def pull(self, reference: str, auth: RegistryAuth | None = None) -> Image:
        return await pull(self.store, reference, auth)

    async def build(self, request: BuildRequest, on_log: Callable[[bytes], None]) -> Image:
        raise Unsupported("The oci engine can't build images; use Docker or Podman for that.")

    async def remove_image(self, reference: str) -> None:
        with contextlib.suppress(ImageNotFound):
            image = self.store.find(reference)
            for folder in (await self._containers()).folders():
                if (manifest := folder.manifest()) and manifest.image == image.id:
                    raise EngineError(f"The image {reference!r} is used by {folder.name}.")
            await asyncio.to_thread(self.store.remove, reference)

    # -- containers -------------------------------------------------------------

    async def create(self, spec: ContainerSpec) -> None:
        machine, containers = await self._opened()
        image = self.store.read(spec.image)
        rootfs, process = self.store.rootfs(image), process_of(spec, image)
        _check(rootfs, spec, process)
        containers.make(machine.choose(spec.runtime), spec, process, rootfs)

    async def attach(self, name: str, *, stdin: bool) -> AttachedStreams:
        return (await self._containers()).attach(name, stdin=stdin)

    async def reattach(self, name: str, received: Mapping[Stream, int]) -> AttachedStreams:
        """The pipes hold what nobody has read yet: nothing is missing."""
        return (await self._containers()).attach(name, stdin=False)

    async def start(self, name: str) -> None:
        await (await self._containers()).start(name)

    async def wait(self, name: str) -> ExitStatus:
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

    async def find(self, labels: Mapping[str, str]) -> list[ContainerSummary]:
        """What is no container, and can't become one any more, is cleared away first."""
        containers = await self._containers()
        await sweep(containers)
        return containers.find(labels)


def _check(rootfs: Path, spec: ContainerSpec, process: Process) -> None:
    """What the runtimes don't tell in plain words. A command that is missing is told by the init
    in the container."""
    if not process.args or not process.args[0]:
        raise CommandNotFound("The image has no command of its own, and the job names none.")
    if any(f"{process.cwd}/".startswith(f"{mount.target}/") for mount in spec.mounts):
        return
    with contextlib.suppress(OSError):
        if resolve(rootfs, process.cwd).is_dir():
            return
    raise EngineError(f"The image has no folder {process.cwd} to work in.")


_TRIAL = "penstock-trial-"
_LONGEST = 20.0
_ABANDONED = 60.0
"""Seconds after which nobody can still be making a container."""

log = logging.getLogger(__name__)


async def choose_runtime(containers: Containers, machine: OciMachine, root: Path) -> None:
    """Leaves the first that works in front. Raises EngineUnavailable."""
    if machine.init is None:
        return
    problems = []
    while machine.candidates:
        runtime = machine.runtime
        problem = await _try(containers, runtime, root / "trial")
        if not problem:
            return
        problems.append(f"{runtime.name}: {problem}")
        machine.candidates.remove(runtime)
    raise EngineUnavailable(f"No runtime works here. {'; '.join(problems)}")


async def sweep(containers: Containers) -> None:
    """What a worker left that died while it made or removed a container, or tried a runtime. What
    can't be removed now is there for the next sweep."""
    containers.clear()
    for folder in containers.folders():
        unfinished = folder.manifest() is None or folder.name.startswith(_TRIAL)
        if unfinished and folder.age() > _ABANDONED:
            try:
                await containers.remove(folder.name)
            except EngineError as error:
                log.warning("what is left of container %s is still there: %s", folder.name, error)


async def _try(containers: Containers, runtime: Runtime, rootfs: Path) -> str:
    """Run the init alone, in an empty root file system; says what went wrong."""
    for point in MOUNT_POINTS:
        (rootfs / point).mkdir(parents=True, exist_ok=True)
    name = f"{_TRIAL}{secrets.token_hex(8)}"
    spec = ContainerSpec(name=name, image="", memory=32 << 20, cpus=1, pids=64, tmp=1 << 20)
    try:
        async with asyncio.timeout(_LONGEST):
            containers.make(runtime, spec, Process((INIT, "--version"), {}, "/"), rootfs)
            await containers.start(name)
            ended = await containers.wait(name)
    except (EngineError, TimeoutError) as error:
        return str(error) or "it does not end."
    finally:
        await containers.remove(name)
    return "" if ended.code == 0 else ended.error or f"a trial ended with {ended.code}"


def make(config: WorkerConfig) -> OciEngine:
    """The engine of a worker (entry point `penstock.container_engines`)."""
    return OciEngine(
        config.jobs_dir / "oci", runtime=config.runtime, max_image=config.images.max_bytes
    )
