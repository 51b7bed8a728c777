"""Containers by `runc`, `crun` or `runsc`, without a daemon: made, started, watched and removed.

What the disk and the shim tell is enough for everything, so another worker's containers are as good
as its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import (
    NO_INIT,
    BuildRequest,
    CommandNotFound,
    CommandNotRunnable,
    ContainerNotFound,
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
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.oci.bundle import (
    INIT,
    MOUNT_POINTS,
    Process,
    bundle,
    process_of,
)
from penstock.workloads.container.engines.oci.client import ShimClient
from penstock.workloads.container.engines.oci.container import (
    AttachedStreams,
    Container,
    ContainerManifest,
)
from penstock.workloads.container.engines.oci.folder import live_folder
from penstock.workloads.container.engines.oci.images import LARGEST, ImageStore, can_pull, pull
from penstock.workloads.container.engines.oci.machine import (
    SANDBOX,
    OciMachine,
    Runtime,
    output_of,
    version_of,
)
from penstock.workloads.container.engines.oci.rootfs import resolve
from penstock.workloads.container.engines.oci.shim import kill_family
from penstock.workloads.container.files.tree import remove_tree
from penstock.workloads.container.job import Stream, Usage

_REMOVAL = 5.0
"""Seconds after which something that can't be removed is told."""
_LOST = "The shim was ended from outside while the container ran, so its exit code is unknown."
_TRIAL = "penstock-trial-"
_LONGEST = 20.0
"""Seconds for a trial."""
_ABANDONED = 60.0
"""Seconds after which nobody can still be making a container."""

_LAYERED = """\
cd "$1" && shift && exec unshare --mount sh -c '
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay rootfs && exec "$@"' sh "$@"
"""
"""In the layer's folder, and in a mount namespace that ends with the container. Names without a
path: a colon or a comma would mean something in one."""

log = logging.getLogger(__name__)


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
        self._root = root.absolute()
        self.store = ImageStore(self._root / "images", limit=max_image)
        self._live = self._root / "live"
        self._run, self._state = self._live / "run", self._live / "state"
        self._layers = self._root / "layers"
        """On disk, unlike the rest: a container may write as much there as it likes."""
        self._wanted = runtime
        self._machine: OciMachine | None = None
        """When it is first asked for anything: nothing happens before that."""
        self._shim: ShimClient
        self._cgroups: Cgroups
        self._known: dict[str, Container] = {}
        self._opening = asyncio.Lock()

    async def facts(self) -> EngineFacts:
        machine = await self._opened()
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
        if self._machine is not None:
            self._machine = None
            self._let_go()

    def _let_go(self) -> None:
        for one in self._known.values():
            one.close()
        self._known.clear()
        self._shim.close()

    async def _opened(self) -> OciMachine:
        if self._machine is not None:
            return self._machine
        async with self._opening:
            if self._machine is None:
                machine = OciMachine(self._wanted)
                live_folder(self._root)
                for folder in (self._run, self._state, self._layers):
                    folder.mkdir(exist_ok=True, mode=0o700)
                self._shim, self._cgroups = ShimClient(self._told, self._lost), machine.cgroups
                try:
                    await self._shim.connect(self._live, machine.hidden)
                    await self._choose_runtime(machine)
                    await self._sweep()
                except BaseException:
                    self._let_go()
                    raise
                self._machine = machine
            return self._machine

    # -- the runtime --------------------------------------------------------------

    async def _choose_runtime(self, machine: OciMachine) -> None:
        """Leaves the first that works in front. Raises EngineUnavailable."""
        problems = []
        while machine.candidates and machine.init is not None:
            runtime = machine.runtime
            problem = await self._try(machine, runtime)
            if not problem:
                return
            problems.append(f"{runtime.name}: {problem}")
            machine.candidates.remove(runtime)
        if problems:
            raise EngineUnavailable(f"No runtime works here. {'; '.join(problems)}")

    async def _try(self, machine: OciMachine, runtime: Runtime) -> str:
        """Run the init alone, in an empty root file system; says what went wrong."""
        rootfs = self._root / "trial"
        for point in MOUNT_POINTS:
            (rootfs / point).mkdir(parents=True, exist_ok=True)
        name = f"{_TRIAL}{secrets.token_hex(8)}"
        spec = ContainerSpec(name=name, image="", memory=32 << 20, cpus=1, pids=64, tmp=1 << 20)
        try:
            async with asyncio.timeout(_LONGEST):
                self._make(machine, runtime, spec, Process((INIT, "--version"), {}, "/"), rootfs)
                await self._start(self._there(name))
                ended = await self._wait(self._there(name))
        except (EngineError, TimeoutError) as error:
            return str(error) or "it does not end."
        finally:
            await self._remove(self._known_as(name))
        return "" if ended.code == 0 else ended.error or f"a trial ended with {ended.code}"

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
            await self._opened()
            for one in self._all():
                if one.manifest and one.manifest.image == image.id:
                    raise EngineError(f"The image {reference!r} is used by {one.name}.")
            await asyncio.to_thread(self.store.remove, reference)

    # -- beginning --------------------------------------------------------------

    async def create(self, spec: ContainerSpec) -> None:
        machine = await self._opened()
        image = self.store.read(spec.image)
        rootfs, process = self.store.rootfs(image), process_of(spec, image)
        _check(rootfs, spec, process)
        await self._shim.connect(self._live, machine.hidden)  # it may have died
        self._make(machine, machine.choose(spec.runtime), spec, process, rootfs)

    def _make(
        self,
        machine: OciMachine,
        runtime: Runtime,
        spec: ContainerSpec,
        process: Process,
        rootfs: Path,
    ) -> None:
        """The runtime makes it from now on, and then it waits for its start: that is at hand, and
        takes no time any more. Raises EngineError, and then nothing is left."""
        spec, name = runtime.fit(spec), spec.name
        one, state = Container(self._run / name), f"{self._state}/{runtime.name}"
        command = runtime.create(state, one.path, name)
        layer = self._layers / name if needs_layer(spec, rootfs) else None
        if layer:
            command = ["/bin/sh", "-c", _LAYERED, "sh", str(layer), *command]
        place = layer / "rootfs" if layer else rootfs
        config = bundle(spec, process, place, machine.options(runtime))
        manifest = ContainerManifest(
            image=spec.image, runtime=runtime.name, labels=spec.labels, created=time.time()
        )
        try:
            os.mkdir(one.path, 0o700)
        except FileExistsError:
            raise EngineError(f"There is a container {name!r} already.") from None
        try:
            if layer:
                _make_layer(layer, rootfs)
            one.write(manifest, msgspec.json.encode(config))
            fds = one.open_pipes()
            try:
                gate = runtime.gate(state, name)
                self._shim.send(fds, create=name, command=command, gate=gate)
            finally:
                for fd in fds[:3]:
                    os.close(fd)
            one.is_known = True
            self._known[name] = one
        except BaseException as error:
            one.close()
            with contextlib.suppress(OSError):  # the sweep tries again
                self._discard(one)
            if isinstance(error, OSError):
                raise EngineError(f"The container can't be made: {error}.") from error
            raise

    async def attach(self, name: str, *, stdin: bool) -> AttachedStreams:
        await self._opened()
        return self._there(name).attach(stdin=stdin)

    async def reattach(self, name: str, received: Mapping[Stream, int]) -> AttachedStreams:
        """The pipes hold what nobody has read yet: nothing is missing."""
        return await self.attach(name, stdin=False)

    async def start(self, name: str) -> None:
        await self._opened()
        await self._start(self._there(name))

    async def _start(self, one: Container) -> None:
        if one.is_started:
            raise EngineError(f"The container {one.name!r} was started before.")
        if not one.is_known:
            raise EngineError(f"The shim ended before it could start {one.name!r}.")
        self._shim.send(start=one.name)
        one.end_input()
        await one.until(lambda: one.is_over or one.is_started)
        _check_started(one)

    # -- watching ---------------------------------------------------------------

    async def wait(self, name: str) -> ExitStatus:
        await self._opened()
        return await self._wait(self._there(name))

    async def _wait(self, one: Container) -> ExitStatus:
        await one.until(lambda: one.is_over)
        if self._known.get(one.name) is not one:
            raise ContainerNotFound(f"The container {one.name!r} was removed.")
        oom = self._cgroups.oom_kills(one.name) > 0
        if one.code is None:
            return ExitStatus(None, oom, _LOST)
        if one.pid is None:
            return ExitStatus(None, oom, one.complaint())
        return ExitStatus(one.code, oom)

    async def usage(self, name: str) -> Usage:
        await self._opened()
        return self._cgroups.usage(name)

    async def find(self, labels: Mapping[str, str]) -> list[ContainerSummary]:
        """What is no container, and can't become one any more, is cleared away first."""
        await self._opened()
        await self._sweep()
        found = [(one, one.manifest) for one in self._all()]
        return [
            ContainerSummary(one.name, one.state, manifest.labels, manifest.created)
            for one, manifest in found
            if manifest is not None and has_labels(manifest.labels, labels)
        ]

    def _all(self) -> list[Container]:
        names = sorted(name for name in os.listdir(self._run) if not name.startswith("."))
        return [self._known_as(name) for name in names]

    async def _sweep(self) -> None:
        """What a worker left that died while it made or removed a container, or tried a runtime;
        and layers of an earlier boot. What can't be removed now is there for the next sweep."""
        layers = (one for one in self._layers.iterdir() if not (self._run / one.name).exists())
        for path in (*self._run.glob(".*"), *layers):
            try:
                remove_tree(path)
            except OSError as error:
                log.warning("files of a container that was removed are still there: %s", error)
        for one in self._all():
            if (one.manifest is None or one.name.startswith(_TRIAL)) and _age(one) > _ABANDONED:
                try:
                    await self._remove(one)
                except EngineError as error:
                    log.warning("what is left of container %s is still there: %s", one.name, error)

    # -- ending -----------------------------------------------------------------

    async def signal(self, name: str, number: int) -> None:
        machine, one = await self._opened(), self._known_as(name)
        manifest = one.manifest
        if not one.is_known or one.is_over or manifest is None:
            return
        if manifest.runtime == SANDBOX and number != signal.SIGKILL:
            program, state = machine.choose(SANDBOX).path, f"{self._state}/{SANDBOX}"
            await output_of(program, "--root", state, "kill", name, str(number))
            return
        kept = machine.init is None and _is_kept_from(one.pid, number)
        with contextlib.suppress(EngineUnavailable):  # then it is ended, too
            self._shim.send(signal=name, number=signal.SIGKILL if kept else number)

    async def kill(self, name: str) -> None:
        """All others in its PID namespace die with the first process."""
        await self.signal(name, signal.SIGKILL)

    async def remove(self, name: str) -> None:
        await self._opened()
        await self._remove(self._known_as(name))

    async def _remove(self, one: Container) -> None:
        """Whatever fails or dies in it, the next removal goes on where it was."""
        async with one.removal:
            try:
                if one.manifest is not None or one.path.exists():
                    await self._end(one)
                    self._delete_state(one)
                    self._discard(one)
            except OSError as error:
                raise EngineError(
                    f"The container {one.name!r} can't be removed: {error}."
                ) from error
            if self._known.get(one.name) is one:
                del self._known[one.name]
            one.end()

    async def _end(self, one: Container) -> None:
        """Until nothing is in its cgroups, and they are gone."""
        one.close()
        name, until, was_known = one.name, time.monotonic() + _REMOVAL, one.is_known
        if was_known:
            with contextlib.suppress(EngineUnavailable):  # the shim is lost, or will be in a moment
                self._shim.send(forget=name)
            try:
                async with asyncio.timeout(_REMOVAL):
                    await one.until(lambda: one.is_over or not one.is_known)
            except TimeoutError:
                raise EngineUnavailable("The shim of the containers does not answer.") from None
        while (not was_known and _end_makers(one.path)) or not self._cgroups.remove(name):
            self._cgroups.kill(name)
            if time.monotonic() > until:
                raise EngineError(f"Something in {name} can't be ended.")
            await asyncio.sleep(0.002)

    def _delete_state(self, one: Container) -> None:
        """What a runtime wrote down; runsc has files beside a folder."""
        for runtime in (one.manifest.runtime,) if one.manifest else os.listdir(self._state):
            remove_tree(self._state / runtime / one.name)
            if runtime == SANDBOX:
                for file in (self._state / runtime).glob(f"{one.name}*"):
                    file.unlink(missing_ok=True)

    def _discard(self, one: Container) -> None:
        """One rename takes it out of `run/`: a container is there with its manifest, or not at
        all, at whatever moment a worker dies. Raises OSError; the sweep does the rest."""
        remove_tree(self._layers / one.name)
        # The same name may be made and removed again before the first is deleted.
        away = self._run / f".{one.name}.{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(one.path, away)
            remove_tree(away)

    # -- the shim ---------------------------------------------------------------

    def _told(self, packet: dict[str, Any], readers: list[int]) -> None:
        if name := packet.pop("name", ""):
            if name not in self._known:
                self._known[name] = Container(self._run / name)
            self._known[name].enter(readers, **packet)
        elif one := self._known.get(packet["forgotten"]):
            one.forget()
            if not one.removal.locked():  # another worker removes it
                del self._known[one.name]
                one.end()

    def _lost(self) -> None:
        """The shim has died. Nobody will know how its containers end, so they end now."""
        for one in self._known.values():
            self._give_up(one)

    def _give_up(self, one: Container) -> None:
        one.is_known = False
        one.is_started = one.is_started or one.has_mark
        if not one.is_over:
            self._cgroups.kill(one.name)
            one.end()

    # -- within -----------------------------------------------------------------

    def _known_as(self, name: str) -> Container:
        one = self._known.get(name)
        if one is None:
            self._shim.receive()
            one = self._known.get(name) or Container(self._run / name)
            if one.manifest is not None:
                self._known[name] = one
        if not one.is_known and not one.is_over and one.has_mark:
            self._shim.receive()
            if not one.is_known:
                self._give_up(one)
        return one

    def _there(self, name: str) -> Container:
        one = self._known_as(name)
        if one.manifest is None:
            raise ContainerNotFound(f"There is no container {name!r}.")
        return one


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


def needs_layer(spec: ContainerSpec, rootfs: Path) -> bool:
    """An image's root file system is shared, and never written to."""
    targets = (mount.target for mount in spec.mounts)
    return not spec.read_only_root or not all(resolve(rootfs, one).is_dir() for one in targets)


def _make_layer(layer: Path, rootfs: Path) -> None:
    remove_tree(layer)
    layer.mkdir(mode=0o700)
    for name in ("rootfs", "upper", "work"):
        (layer / name).mkdir(mode=0o755)
    (layer / "lower").symlink_to(rootfs)


def _end_makers(folder: Path) -> bool:
    """Kill runtimes that were making a container when their shim was killed, and what they have
    started; False if there are none."""
    found = False
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                kill_family(int(pid))
                found = True
    return found


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(name in labels and value in ("", labels[name]) for name, value in wanted.items())


def _age(one: Container) -> float:
    """Seconds since something was last made in its folder."""
    try:
        return time.time() - one.path.stat().st_mtime
    except OSError:
        return 0


def _check_started(one: Container) -> None:
    if one.code is None or one.pid is not None:
        return
    said = one.complaint()
    text = said.lower()
    if "executable file" in text and "not found" in text:
        raise CommandNotFound(said)
    if "exec format error" in text or ("exec: " in text and "permission denied" in text):
        raise CommandNotRunnable(said)
    raise EngineError(said)


def _is_kept_from(pid: int | None, number: int) -> bool:
    """Whether a first process would be spared a signal that ends any other."""
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    if number not in ending:
        return False
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return not int(line.split()[1], 16) >> (number - 1) & 1
    return False


def make(config: WorkerConfig) -> OciEngine:
    """The engine of a worker (entry point `penstock.container_engines`)."""
    return OciEngine(
        config.jobs_dir / "oci", runtime=config.runtime, max_image=config.images.max_bytes
    )
