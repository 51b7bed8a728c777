"""The containers below a folder: made, started, watched, ended and removed.

An object of this kind knows what it started and attached to; what the disk tells is enough for
everything else, so another worker's containers are as good as its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.workloads.container.engine import (
    CommandNotFound,
    CommandNotRunnable,
    ContainerNotFound,
    ContainerSpec,
    ContainerSummary,
    EngineError,
    ExitStatus,
)
from penstock.workloads.container.engines.oci.bundle import Process, bundle
from penstock.workloads.container.engines.oci.folder import (
    LAYER,
    STREAMS,
    ContainerManifest,
    ContainerWatcher,
    FolderWatcher,
    RunFolder,
    children_of,
    end_group,
    exit_of,
    first_process,
    kill_first_process,
    live_folder,
    state_of,
)
from penstock.workloads.container.engines.oci.machine import SANDBOX, OciMachine, Runtime, output_of
from penstock.workloads.container.engines.oci.rootfs import resolve
from penstock.workloads.container.engines.oci.streams import AttachedStreams, Streams, layered
from penstock.workloads.container.files.tree import remove_tree

_STUCK = 1.0
"""Seconds after a kill within which a runtime should have ended by itself."""
_REMOVAL = 5.0
"""Seconds after which something that can't be removed is told."""


log = logging.getLogger(__name__)


class Container:
    """What this worker has open of a container."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.watcher: ContainerWatcher | None = None
        self.attached: list[AttachedStreams] = []
        self.ends: Streams | None = None
        """The container's ends of its streams, until the launcher has them: as long as somebody
        may write, a reader does not take silence for the end."""
        self.spawned: asyncio.Future[int] | None = None
        """The PID of its launcher, if this worker started it."""
        self.removal = asyncio.Lock()
        """Whoever comes second finds nothing to do."""

    def open_ends(self, *, stdin: bool) -> int | None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        writers = (self.folder.open_stream(stream, os.O_RDWR) for stream in STREAMS)
        self.ends = Streams(read, *writers)
        if stdin:
            return write
        os.close(write)
        return None

    def close_ends(self) -> None:
        ends, self.ends = self.ends, None
        if ends is not None:
            for fd in (ends.stdin, ends.stdout, ends.stderr):
                os.close(fd)

    def close_streams(self) -> None:
        for attached in self.attached:
            attached.close()
        self.attached.clear()

    def close(self) -> None:
        """The container goes on."""
        self.close_streams()
        self.close_ends()
        if self.watcher is not None:
            self.watcher.close()


class Containers:
    """Of one machine, below `root`."""

    def __init__(self, root: Path, machine: OciMachine) -> None:
        live = live_folder(root)
        self._run = live / "run"
        self._state = live / "state"
        self._layers = root / "layers"
        """On disk, unlike the rest: a container may write as much there as it likes."""
        self._machine = machine
        self._cgroups = machine.cgroups
        self._watch = FolderWatcher()
        self._known: dict[str, Container] = {}
        for folder in (self._run, self._state, self._layers):
            folder.mkdir(exist_ok=True, mode=0o700)

    # -- beginning --------------------------------------------------------------

    def make(self, runtime: Runtime, spec: ContainerSpec, process: Process, rootfs: Path) -> None:
        """Raises EngineError, and then nothing is left."""
        spec = runtime.fit(spec)
        folder = RunFolder(self._run / spec.name)
        layer = self._layers / spec.name if needs_layer(spec, rootfs) else None
        place = layer / "rootfs" if layer else rootfs
        config = bundle(spec, process, place, self._machine.options(runtime))
        try:
            folder.make()
        except FileExistsError:
            raise EngineError(f"There is a container {spec.name!r} already.") from None
        try:
            groups = () if runtime.keeps_cgroups else self._cgroups.make(spec)
            if layer:
                _make_layer(layer, rootfs)
            manifest = ContainerManifest(
                layer=str(layer or ""),
                image=spec.image,
                runtime=runtime.name,
                groups=tuple(groups),
                labels=spec.labels,
                created=time.time(),
            )
            folder.fill(spec.user, manifest, msgspec.json.encode(config))
            self._known[spec.name] = Container(folder)
        except BaseException as error:
            self._cgroups.remove(spec.name)
            with contextlib.suppress(OSError):  # the sweep tries again
                self._discard(folder)
            if isinstance(error, OSError):
                raise EngineError(f"The container can't be made: {error}.") from error
            raise

    def attach(self, name: str, *, stdin: bool) -> AttachedStreams:
        one, _ = self._there(name)
        fresh = one.folder.launcher is None and one.ends is None and one.spawned is None
        writer = one.open_ends(stdin=stdin) if fresh else None
        attached = AttachedStreams(one.folder, writer)
        one.attached.append(attached)
        return attached

    async def start(self, name: str) -> None:
        """Until it runs. Raises CommandNotFound, CommandNotRunnable, EngineError."""
        one, manifest = self._there(name)
        if one.folder.launcher is not None or one.spawned is not None:
            raise EngineError(f"The container {name!r} was started before.")
        watcher = self._watcher(one)
        try:
            # Whoever cancels this does not cancel the spawn: its files are in use.
            await asyncio.shield(self._spawn(one, watcher, manifest))
        except OSError as error:
            raise EngineError(f"The runtime can't be started: {error}.") from error
        await watcher.begun.wait()
        if one.folder.pid is None and one.folder.status is not None:
            raise _not_started(one.folder)

    def _spawn(
        self, one: Container, watcher: ContainerWatcher, manifest: ContainerManifest
    ) -> asyncio.Future[int]:
        if one.ends is None:
            one.open_ends(stdin=False)
        assert one.ends is not None
        runtime, path = self._machine.choose(manifest.runtime), one.folder.path
        state = f"{self._state}/{runtime.name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(state, 0o700)
        one.spawned = self._machine.launch(runtime).spawn(
            path,
            manifest.groups,
            layered(manifest.layer, runtime.run(state, path, path.name)),
            one.ends,
        )
        one.spawned.add_done_callback(lambda _: one.close_ends())
        one.spawned.add_done_callback(watcher.follow)
        return one.spawned

    # -- watching ---------------------------------------------------------------

    async def wait(self, name: str) -> ExitStatus:
        one, _ = self._there(name)
        await self._watcher(one).over.wait()
        if self._known.get(name) is not one:
            raise ContainerNotFound(f"The container {name!r} was removed.")
        return exit_of(one.folder, self._cgroups)

    def find(self, labels: Mapping[str, str]) -> list[ContainerSummary]:
        found = []
        for folder in self.folders():
            manifest = folder.manifest()
            if manifest is not None and has_labels(manifest.labels, labels):
                state = state_of(folder, self._cgroups)
                found.append(
                    ContainerSummary(folder.name, state, manifest.labels, manifest.created)
                )
        return found

    def folders(self) -> list[RunFolder]:
        names = sorted(name for name in os.listdir(self._run) if not name.startswith("."))
        return [RunFolder(self._run / name) for name in names]

    def clear(self) -> None:
        """Delete what others did not, and layers of an earlier boot."""
        layers = (one for one in self._layers.iterdir() if not (self._run / one.name).exists())
        for path in (*self._run.glob(".*"), *layers):
            try:
                remove_tree(path)
            except OSError as error:
                log.warning("files of a container that was removed are still there: %s", error)

    # -- ending -----------------------------------------------------------------

    async def signal(self, name: str, number: int) -> None:
        folder = self._known_as(name).folder
        manifest, fd = folder.manifest(), first_process(folder, self._cgroups)
        if fd is None:
            return
        try:
            if manifest is not None and manifest.runtime == SANDBOX:
                program, state = self._machine.choose(SANDBOX).path, f"{self._state}/{SANDBOX}"
                await output_of(program, "--root", state, "kill", name, str(number))
                return
            kept = self._machine.init is None and _is_kept_from(folder.pid, number)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL if kept else number)
        finally:
            os.close(fd)

    async def kill(self, name: str) -> None:
        one = self._known_as(name)
        folder = one.folder
        started = one.spawned is not None or folder.launcher is not None
        if not started or folder.status is not None:
            return
        watcher = self._watcher(one)
        await watcher.begun.wait()
        kill_first_process(folder, self._cgroups)
        try:
            async with asyncio.timeout(_STUCK):
                await watcher.over.wait()
        except TimeoutError:
            _end_runtime(folder)

    async def remove(self, name: str) -> None:
        """Whatever fails or dies in it, the next removal goes on where it was."""
        one = self._known_as(name)
        async with one.removal:
            try:
                if one.folder.path.exists():
                    await self._remove(one)
            except OSError as error:
                raise EngineError(f"The container {name!r} can't be removed: {error}.") from error
            if self._known.get(name) is one:
                del self._known[name]

    async def _remove(self, one: Container) -> None:
        one.close_streams()
        await self._end_launcher(one)
        one.close_ends()
        await self._empty(one.folder)
        if one.watcher is not None:
            one.watcher.end()
            one.watcher.close()
            one.watcher = None
        manifest = one.folder.manifest()
        for runtime in (manifest.runtime,) if manifest else os.listdir(self._state):
            _delete_state(self._state / runtime, one.folder.name)
        self._discard(one.folder)

    def _discard(self, folder: RunFolder) -> None:
        """One rename takes it out of `run/`: a container is there with its manifest, or not at
        all, at whatever moment a worker dies. Raises OSError; `clear` does the rest."""
        remove_tree(self._layers / folder.name)
        # The same name may be made and removed again before the first is deleted.
        away = self._run / f".{folder.name}.{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder.path, away)
            remove_tree(away)

    async def _end_launcher(self, one: Container) -> None:
        """With it the runtime, which is of its process group."""
        alone = one.folder.status is not None
        if one.spawned is not None:
            await asyncio.wait([one.spawned])
            if one.spawned.exception() is None:
                await end_group(one.spawned.result(), alone=alone)
            # Not before: a removal that is given up here still knows it the next time.
            one.spawned = None
        elif (fd := one.folder.launcher_fd()) is not None:
            try:
                await end_group(one.folder.launcher or 0, alone=alone)
            finally:
                os.close(fd)

    async def _empty(self, folder: RunFolder) -> None:
        """Until nothing is in its cgroups, and they are gone."""
        until = time.monotonic() + _REMOVAL
        kill_first_process(folder, self._cgroups)
        while not self._cgroups.remove(folder.name):
            self._cgroups.kill(folder.name)
            if time.monotonic() > until:
                raise EngineError(f"Something in {folder.name} can't be ended.")
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """Let go of everything; containers go on."""
        for one in self._known.values():
            one.close()
        self._known.clear()
        self._watch.close()
        self._machine.close()

    # -- within -----------------------------------------------------------------

    def _known_as(self, name: str) -> Container:
        one = self._known.get(name) or Container(RunFolder(self._run / name))
        if one.folder.manifest() is not None:
            self._known[name] = one
        return one

    def _there(self, name: str) -> tuple[Container, ContainerManifest]:
        one = self._known_as(name)
        manifest = one.folder.manifest()
        if manifest is None:
            raise ContainerNotFound(f"There is no container {name!r}.")
        return one, manifest

    def _watcher(self, one: Container) -> ContainerWatcher:
        if one.watcher is None:
            one.watcher = ContainerWatcher(one.folder, self._cgroups, self._watch)
        return one.watcher


def needs_layer(spec: ContainerSpec, rootfs: Path) -> bool:
    """An image's root file system is shared, and never written to."""
    targets = (mount.target for mount in spec.mounts)
    return not spec.read_only_root or not all(resolve(rootfs, one).is_dir() for one in targets)


def _make_layer(layer: Path, rootfs: Path) -> None:
    """Names without a path in them: in one, a colon or a comma would mean something to `mount`."""
    remove_tree(layer)
    layer.mkdir(mode=0o700)
    for name in LAYER:
        (layer / name).mkdir(mode=0o755)
    (layer / "lower").symlink_to(rootfs)


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(name in labels and value in ("", labels[name]) for name, value in wanted.items())


def _not_started(folder: RunFolder) -> EngineError:
    said = folder.complaint() or f"The runtime ended with {folder.status}."
    text = said.lower()
    if "executable file" in text and "not found" in text:
        return CommandNotFound(said)
    if "exec format error" in text or ("exec: " in text and "permission denied" in text):
        return CommandNotRunnable(said)
    return EngineError(said)


def _end_runtime(folder: RunFolder) -> None:
    """runc copies the output, and waits for a reader even when the container is dead."""
    fd = folder.launcher_fd()
    if fd is not None:
        for child in children_of(folder.launcher or 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.close(fd)


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


def _delete_state(state: Path, name: str) -> None:
    """What a runtime wrote down; runsc has files beside a folder."""
    remove_tree(state / name)
    if state.name == SANDBOX:
        for file in state.glob(f"{name}*"):
            file.unlink(missing_ok=True)
