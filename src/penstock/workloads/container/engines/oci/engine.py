"""Containers by `runc`, `crun` or `runsc`, without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from penstock.core.containers import Usage
from penstock.workloads.container.engine import (
    BuildPlan,
    CommandNotFound,
    CommandNotRunnable,
    EngineError,
    EngineFacts,
    EngineUnavailable,
    Exit,
    Found,
    Image,
    ImageNotFound,
    NotThere,
    Plan,
    Unsupported,
)
from penstock.workloads.container.engines.oci.bundle import (
    INIT,
    MOUNT_POINTS,
    Process,
    bundle,
    process_of,
)
from penstock.workloads.container.engines.oci.fetching import can_fetch, fetch
from penstock.workloads.container.engines.oci.folder import STREAMS, Note, RunFolder
from penstock.workloads.container.engines.oci.images import ImageStore
from penstock.workloads.container.engines.oci.launch import Streams
from penstock.workloads.container.engines.oci.life import (
    Life,
    children_of,
    end_group,
    end_process,
    exit_of,
    first_process,
    state_of,
)
from penstock.workloads.container.engines.oci.machine import Machine, output_of, version_of
from penstock.workloads.container.engines.oci.programs import check_command
from penstock.workloads.container.engines.oci.rooted import resolve
from penstock.workloads.container.engines.oci.runtimes import SANDBOX, Runtime
from penstock.workloads.container.engines.oci.streams import AttachedStreams
from penstock.workloads.container.engines.oci.watch import Watch

_STUCK = 1.0
"""Seconds after a kill within which a runtime should have ended by itself."""
_REMOVAL = 5.0
"""Seconds after which something that can't be removed is told."""
_PROBE = 20.0
_TRIAL = "penstock-trial-"
_ABANDONED = 60.0
"""Seconds after which nobody can still be making a container."""


class OciEngine:
    """An `Engine` below a folder: images, containers and the runtimes' own state.

    `runtime` is the one for plans that name none; empty means the first of crun and runc that
    works here. Without a static init on the machine (tini, docker-init, catatonit) a container's
    own program is its first process: orphans are not reaped, and a signal that would end it,
    but that the kernel keeps from first processes, is made a SIGKILL.
    """

    name = "oci"

    def __init__(self, root: Path, *, runtime: str = "") -> None:
        self._root = root.absolute()
        self.store = ImageStore(self._root / "images")
        self._wanted = runtime
        self._lives: dict[str, Life] = {}
        self._attached: dict[str, list[AttachedStreams]] = {}
        self._ends: dict[str, Streams] = {}
        self._children: dict[str, int] = {}
        self._watch: Watch | None = None
        self._machine: Machine | None = None
        self._finding = asyncio.Lock()

    # -- what it is -------------------------------------------------------------

    async def facts(self) -> EngineFacts:
        machine = await self._ready()
        return EngineFacts(
            name=self.name,
            version=await version_of(machine.runtime),
            runtimes=machine.runtimes(),
            root_dir=str(self._root),
            can_pull=can_fetch(),
            where=machine.runtime.path,
            security=("seccomp", "no-new-privileges", "init" if machine.init else "no init"),
        )

    async def _ready(self) -> Machine:
        """The machine, with a runtime in front that was seen to run a container."""
        if self._machine is not None:
            return self._machine
        async with self._finding:
            if self._machine is None:
                machine = Machine(self._wanted)
                (self._root / "run").mkdir(parents=True, exist_ok=True, mode=0o700)
                self._watch = self._watch or Watch()
                await self._choose_runtime(machine)
                await self._sweep(machine)
                self._machine = machine
            return self._machine

    async def _choose_runtime(self, machine: Machine) -> None:
        problems = []
        for runtime in list(machine.candidates):
            problem = await self._probe(machine, runtime) if machine.init else ""
            if not problem:
                return
            problems.append(f"{runtime.name}: {problem}")
            machine.candidates.remove(runtime)
        machine.close()
        raise EngineUnavailable(f"No runtime works here. {'; '.join(problems)}")

    async def _sweep(self, machine: Machine) -> None:
        """What a worker left that died while it made a container, or tried a runtime."""
        for folder in self._folders():
            unfinished = folder.note() is None or folder.name.startswith(_TRIAL)
            if unfinished and folder.age() > _ABANDONED:
                await self._remove(machine, folder.name)

    async def _probe(self, machine: Machine, runtime: Runtime) -> str:
        """Run the init alone, in an empty root file system; says what went wrong."""
        rootfs = self._root / "probe"
        for point in MOUNT_POINTS:
            (rootfs / point).mkdir(parents=True, exist_ok=True)
        name = f"{_TRIAL}{secrets.token_hex(8)}"
        plan = Plan(name=name, image="", memory=32 << 20, cpus=1, pids=64, tmp=1 << 20)
        process = Process((INIT, "--version"), {}, "/")
        try:
            async with asyncio.timeout(_PROBE):
                self._make(machine, runtime, plan, process, rootfs)
                await self._launch(machine, self._folder(name))
                await self._life(machine, self._folder(name)).over.wait()
                ended = exit_of(self._folder(name), machine.cgroups)
        except (EngineError, OSError, TimeoutError) as error:
            return str(error) or "it does not end."
        finally:
            await self._remove(machine, name)
        return "" if ended.code == 0 else ended.error or f"a trial ended with {ended.code}"

    # -- images -----------------------------------------------------------------

    async def image(self, reference: str) -> Image:
        return self.store.find(reference)

    async def images(self, labels: Mapping[str, str]) -> list[Image]:
        found = await asyncio.to_thread(self.store.list)
        return [image for image in found if _has(image.labels, labels)]

    async def pull(self, reference: str) -> Image:
        return await fetch(self.store, reference)

    async def build(self, plan: BuildPlan, say: Callable[[bytes], None]) -> Image:
        raise Unsupported("The oci engine can't build images; use Docker or Podman for that.")

    async def remove_image(self, reference: str) -> None:
        with contextlib.suppress(ImageNotFound):
            image = self.store.find(reference)
            for folder in self._folders():
                if (note := folder.note()) and note.image == image.id:
                    raise EngineError(f"The image {reference!r} is used by {folder.name}.")
            await asyncio.to_thread(self.store.remove, reference)

    # -- a container ------------------------------------------------------------

    async def create(self, plan: Plan) -> None:
        machine = await self._ready()
        image = self.store.find(plan.image)
        rootfs = self.store.rootfs(image)
        process = process_of(plan, image)
        _check_folders(rootfs, plan, process)
        check_command(rootfs, plan, process)
        self._make(machine, machine.choose(plan.runtime), plan, process, rootfs)

    def _make(
        self, machine: Machine, runtime: Runtime, plan: Plan, process: Process, rootfs: Path
    ) -> None:
        plan = runtime.fit(plan)
        config = bundle(plan, process, rootfs, machine.cage(runtime))
        folder = self._folder(plan.name)
        try:
            folder.make(plan.user)
        except FileExistsError:
            raise EngineError(f"There is a container {plan.name!r} already.") from None
        try:
            groups = [] if runtime.keeps_cgroups else machine.cgroups.make(plan)
            note = Note(
                image=plan.image,
                runtime=runtime.name,
                groups=tuple(str(group) for group in groups),
                labels=plan.labels,
                created=time.time(),
            )
            folder.fill(note, msgspec.json.encode(config))
        except BaseException as error:
            machine.cgroups.remove(plan.name)
            shutil.rmtree(folder.path)
            if isinstance(error, OSError):
                raise EngineError(f"The container can't be made: {error}.") from error
            raise

    async def attach(self, name: str, *, stdin: bool) -> AttachedStreams:
        await self._ready()
        folder = self._there(name)
        fresh = folder.launcher is None and name not in self._ends
        writer = self._open_ends(folder, stdin=stdin) if fresh else None
        attached = AttachedStreams(folder, writer)
        self._attached.setdefault(name, []).append(attached)
        return attached

    def _open_ends(self, folder: RunFolder, *, stdin: bool) -> int | None:
        """The container's ends of its streams, until the launcher has them: as long as somebody
        may write, a reader does not take silence for the end."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        writers = (folder.open_stream(stream, os.O_RDWR) for stream in STREAMS)
        self._ends[folder.name] = Streams(read, *writers)
        if stdin:
            return write
        os.close(write)
        return None

    async def start(self, name: str) -> None:
        machine = await self._ready()
        folder = self._there(name)
        if folder.launcher is not None:
            raise EngineError(f"The container {name!r} was started before.")
        try:
            await self._launch(machine, folder)
        except OSError as error:
            raise EngineError(f"The runtime can't be started: {error}.") from error
        if folder.pid is None and folder.status is not None:
            raise _not_started(folder)

    async def _launch(self, machine: Machine, folder: RunFolder) -> None:
        note = folder.note()
        assert note is not None
        if folder.name not in self._ends:
            self._open_ends(folder, stdin=False)
        life = self._life(machine, folder)
        runtime = machine.choose(note.runtime)
        state = self._root / "state" / runtime.name
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = runtime.run(state, folder.path, folder.name)
        spawning = asyncio.ensure_future(
            machine.launch(runtime).spawn(
                folder.path, note.groups, command, self._ends[folder.name]
            )
        )
        try:
            # Whoever cancels this must not take the files away from under the other thread.
            await asyncio.shield(spawning)
        finally:
            await asyncio.wait([spawning])
            self._close_ends(folder.name)
            if spawning.exception() is None:
                self._children[folder.name] = spawning.result()
                life.follow(spawning.result())
        await life.begun.wait()

    async def wait(self, name: str) -> Exit:
        machine = await self._ready()
        folder = self._there(name)
        await self._life(machine, folder).over.wait()
        if not folder.path.exists():
            raise NotThere(f"The container {name!r} was removed.")
        return exit_of(folder, machine.cgroups)

    async def usage(self, name: str) -> Usage:
        return (await self._ready()).cgroups.usage(name)

    # -- ending -----------------------------------------------------------------

    async def signal(self, name: str, number: int) -> None:
        machine = await self._ready()
        folder = self._folder(name)
        note, fd = folder.note(), first_process(folder, machine.cgroups)
        if note is None or fd is None:
            return
        try:
            runtime = machine.choose(note.runtime)
            if runtime.is_sandbox:
                state = self._root / "state" / runtime.name
                await output_of(runtime.path, "--root", str(state), "kill", name, str(number))
            else:
                kept = machine.init is None and _is_kept_from(folder.pid, number)
                signal.pidfd_send_signal(fd, signal.SIGKILL if kept else number)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)

    async def kill(self, name: str) -> None:
        machine = await self._ready()
        folder = self._folder(name)
        started = name in self._children or folder.launcher is not None
        if not started or folder.status is not None:
            return
        life = self._life(machine, folder)
        await life.begun.wait()
        fd = first_process(folder, machine.cgroups)
        if fd is not None:
            # All others in its PID namespace die with the first process.
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        try:
            async with asyncio.timeout(_STUCK):
                await life.over.wait()
        except TimeoutError:
            self._end_runtime(folder)

    def _end_runtime(self, folder: RunFolder) -> None:
        """runc copies the output, and waits for a reader even when the container is dead."""
        fd = folder.launcher_fd()
        if fd is not None:
            for child in children_of(folder.launcher or 0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os.close(fd)

    async def remove(self, name: str) -> None:
        await self._remove(await self._ready(), name)

    async def _remove(self, machine: Machine, name: str) -> None:
        folder = self._folder(name)
        if not folder.path.exists():
            return
        self._close_ends(name)
        for attached in self._attached.pop(name, ()):
            attached.close()
        await self._end_launcher(folder)
        await self._empty(machine, folder)
        if (life := self._lives.pop(name, None)) is not None:
            life.close()
            life.over.set()
            life.begun.set()
        self._delete_state(folder)
        shutil.rmtree(folder.path)

    async def _end_launcher(self, folder: RunFolder) -> None:
        """With it the runtime, which is of its process group."""
        child = self._children.pop(folder.name, None)
        if child is not None:
            await end_group(child)
            _reap(child)
        elif (fd := folder.launcher_fd()) is not None:
            await end_group(folder.launcher or 0)
            os.close(fd)

    def _delete_state(self, folder: RunFolder) -> None:
        """What the runtime wrote down; runsc has files beside a folder."""
        for state in (self._root / "state").iterdir():
            if (state / folder.name).is_dir():
                shutil.rmtree(state / folder.name)
            if state.name == SANDBOX:
                for file in state.glob(f"{folder.name}*"):
                    file.unlink(missing_ok=True)

    async def _empty(self, machine: Machine, folder: RunFolder) -> None:
        """Until nothing is in its cgroups, and they are gone."""
        until = time.monotonic() + _REMOVAL
        fd = first_process(folder, machine.cgroups)
        if fd is not None:
            await end_process(fd)
            os.close(fd)
        while not machine.cgroups.remove(folder.name):
            machine.cgroups.kill(folder.name)
            if time.monotonic() > until:
                raise EngineError(f"Something in {folder.name} can't be ended.")
            await asyncio.sleep(0.002)

    async def find(self, labels: Mapping[str, str]) -> list[Found]:
        machine = await self._ready()
        found = []
        for folder in self._folders():
            note = folder.note()
            if note is not None and _has(note.labels, labels):
                state = state_of(folder, machine.cgroups)
                found.append(Found(folder.name, state, note.labels, note.created))
        return found

    async def close(self) -> None:
        """Let go of everything; containers go on."""
        for name in list(self._attached):
            for attached in self._attached.pop(name):
                attached.close()
        for name in list(self._ends):
            self._close_ends(name)
        for life in self._lives.values():
            life.close()
        self._lives.clear()
        if self._machine is not None:
            self._machine.close()
        if self._watch is not None:
            self._watch.close()
        self._watch = self._machine = None

    # -- within -----------------------------------------------------------------

    def _folder(self, name: str) -> RunFolder:
        return RunFolder(self._root / "run" / name)

    def _folders(self) -> list[RunFolder]:
        try:
            return [RunFolder(path) for path in sorted((self._root / "run").iterdir())]
        except FileNotFoundError:
            return []

    def _there(self, name: str) -> RunFolder:
        folder = self._folder(name)
        if folder.note() is None:
            raise NotThere(f"There is no container {name!r}.")
        return folder

    def _life(self, machine: Machine, folder: RunFolder) -> Life:
        if folder.name not in self._lives:
            assert self._watch is not None
            self._lives[folder.name] = Life(folder, machine.cgroups, self._watch)
        return self._lives[folder.name]

    def _close_ends(self, name: str) -> None:
        if (ends := self._ends.pop(name, None)) is not None:
            for fd in (ends.stdin, ends.stdout, ends.stderr):
                os.close(fd)


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(name in labels and value in ("", labels[name]) for name, value in wanted.items())


def _check_folders(rootfs: Path, plan: Plan, process: Process) -> None:
    """The root file system is never written to, so places for mounts must be there."""
    for mount in plan.mounts:
        if not resolve(rootfs, mount.target).is_dir():
            raise EngineError(f"The image has no folder {mount.target} to mount on.")
    inside = any(f"{process.cwd}/".startswith(f"{mount.target}/") for mount in plan.mounts)
    if not inside and not resolve(rootfs, process.cwd).is_dir():
        raise EngineError(f"The image has no folder {process.cwd} to work in.")


def _not_started(folder: RunFolder) -> EngineError:
    said = folder.complaint() or f"The runtime ended with {folder.status}."
    text = said.lower()
    if "executable file" in text and "not found" in text:
        return CommandNotFound(said)
    if "exec format error" in text or ("exec: " in text and "permission denied" in text):
        return CommandNotRunnable(said)
    return EngineError(said)


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


def _reap(child: int) -> None:
    """It has ended; nobody else asks for its status."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, os.WNOHANG)
