"""The containers below a folder: made, started, watched, ended and removed.

An object of this kind knows what it started and attached to; what the disk tells is enough for
everything else, so another worker's containers are as good as its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakValueDictionary

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
    Trash,
    children_of,
    end_group,
    end_process,
    exit_of,
    first_process,
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


class Containers:
    """Of one machine, below `root`."""

    def __init__(self, root: Path, machine: OciMachine) -> None:
        self._live = live_folder(root)
        self._layers = root / "layers"
        """On disk, unlike the rest: a container may write as much there as it likes."""
        self._machine = machine
        self._cgroups = machine.cgroups
        self._watch = FolderWatcher()
        self._watchers: dict[str, ContainerWatcher] = {}
        self._attached: dict[str, list[AttachedStreams]] = {}
        self._ends: dict[str, Streams] = {}
        self._spawned: dict[str, asyncio.Future[int]] = {}
        self._removals: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One at a time for each name: whoever comes second finds nothing to do."""
        self.trash = Trash(self._live / "gone")
        for folder in (self._live / "run", self._layers):
            folder.mkdir(exist_ok=True, mode=0o700)

    # -- beginning --------------------------------------------------------------

    def make(self, runtime: Runtime, spec: ContainerSpec, process: Process, rootfs: Path) -> None:
        """Raises EngineError, and then nothing is left."""
        spec = runtime.fit(spec)
        folder = self._folder(spec.name)
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
        except BaseException as error:
            self._cgroups.remove(spec.name)
            with contextlib.suppress(OSError):  # the sweep tries again
                self._discard(folder)
            if isinstance(error, OSError):
                raise EngineError(f"The container can't be made: {error}.") from error
            raise

    def attach(self, name: str, *, stdin: bool) -> AttachedStreams:
        folder, _ = self._there(name)
        fresh = folder.launcher is None and name not in self._ends and name not in self._spawned
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
        """Until it runs. Raises CommandNotFound, CommandNotRunnable, EngineError."""
        folder, manifest = self._there(name)
        if folder.launcher is not None or name in self._spawned:
            raise EngineError(f"The container {name!r} was started before.")
        watcher = self._watcher(folder)
        try:
            # Whoever cancels this does not cancel the spawn: its files are in use.
            await asyncio.shield(self._spawn(folder, manifest))
        except OSError as error:
            raise EngineError(f"The runtime can't be started: {error}.") from error
        await watcher.begun.wait()
        if folder.pid is None and folder.status is not None:
            raise _not_started(folder)

    def _spawn(self, folder: RunFolder, manifest: ContainerManifest) -> asyncio.Future[int]:
        if folder.name not in self._ends:
            self._open_ends(folder, stdin=False)
        runtime = self._machine.choose(manifest.runtime)
        state = self._state(runtime.name)
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        spawning = self._machine.launch(runtime).spawn(
            folder.path,
            manifest.groups,
            layered(manifest.layer, runtime.run(state, folder.path, folder.name)),
            self._ends[folder.name],
        )
        self._spawned[folder.name] = spawning
        spawning.add_done_callback(lambda _: self._close_ends(folder.name))
        spawning.add_done_callback(self._watcher(folder).follow)
        return spawning

    # -- watching ---------------------------------------------------------------

    async def wait(self, name: str) -> ExitStatus:
        folder, _ = self._there(name)
        await self._watcher(folder).over.wait()
        if not folder.path.exists():
            raise ContainerNotFound(f"The container {name!r} was removed.")
        return exit_of(folder, self._cgroups)

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
        return [RunFolder(path) for path in sorted((self._live / "run").iterdir())]

    def clear(self) -> None:
        """Delete what others did not, and layers of an earlier boot. Raises OSError."""
        self.trash.clear()
        for layer in self._layers.iterdir():
            if not self._folder(layer.name).path.exists():
                remove_tree(layer)

    # -- ending -----------------------------------------------------------------

    async def signal(self, name: str, number: int) -> None:
        folder = self._folder(name)
        manifest, fd = folder.manifest(), first_process(folder, self._cgroups)
        if fd is None:
            return
        try:
            if manifest is not None and manifest.runtime == SANDBOX:
                program, state = self._machine.choose(SANDBOX).path, str(self._state(SANDBOX))
                await output_of(program, "--root", state, "kill", name, str(number))
                return
            kept = self._machine.init is None and _is_kept_from(folder.pid, number)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL if kept else number)
        finally:
            os.close(fd)

    async def kill(self, name: str) -> None:
        folder = self._folder(name)
        started = name in self._spawned or folder.launcher is not None
        if not started or folder.status is not None:
            return
        watcher = self._watcher(folder)
        await watcher.begun.wait()
        fd = first_process(folder, self._cgroups)
        if fd is not None:
            # All others in its PID namespace die with the first process.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        try:
            async with asyncio.timeout(_STUCK):
                await watcher.over.wait()
        except TimeoutError:
            _end_runtime(folder)

    async def remove(self, name: str) -> None:
        """Whatever fails or dies in it, the next removal goes on where it was."""
        async with self._removals.setdefault(name, asyncio.Lock()):
            folder = self._folder(name)
            try:
                if folder.path.exists():
                    await self._remove(folder)
            except OSError as error:
                raise EngineError(f"The container {name!r} can't be removed: {error}.") from error

    async def _remove(self, folder: RunFolder) -> None:
        name = folder.name
        for attached in self._attached.pop(name, ()):
            attached.close()
        await self._end_launcher(folder)
        self._close_ends(name)
        await self._empty(folder)
        if (watcher := self._watchers.pop(name, None)) is not None:
            watcher.end()
            watcher.close()
        for state in (self._live / "state").glob("*"):
            _delete_state(state, name)
        self._discard(folder)

    def _discard(self, folder: RunFolder) -> None:
        remove_tree(self._layers / folder.name)
        self.trash.discard(folder.path)

    async def _end_launcher(self, folder: RunFolder) -> None:
        """With it the runtime, which is of its process group."""
        if (spawned := self._spawned.get(folder.name)) is not None:
            await asyncio.wait([spawned])
            if spawned.exception() is None:
                await end_group(spawned.result())
            # Not before: a removal that is given up here still knows it the next time.
            del self._spawned[folder.name]
        elif (fd := folder.launcher_fd()) is not None:
            try:
                await end_group(folder.launcher or 0)
            finally:
                os.close(fd)

    async def _empty(self, folder: RunFolder) -> None:
        """Until nothing is in its cgroups, and they are gone."""
        until = time.monotonic() + _REMOVAL
        fd = first_process(folder, self._cgroups)
        if fd is not None:
            try:
                await end_process(fd)
            finally:
                os.close(fd)
        while not self._cgroups.remove(folder.name):
            self._cgroups.kill(folder.name)
            if time.monotonic() > until:
                raise EngineError(f"Something in {folder.name} can't be ended.")
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """Let go of everything; containers go on."""
        for several in self._attached.values():
            for attached in several:
                attached.close()
        self._attached.clear()
        for name in list(self._ends):
            self._close_ends(name)
        for watcher in self._watchers.values():
            watcher.close()
        self._watchers.clear()
        self._watch.close()
        self._machine.close()

    # -- within -----------------------------------------------------------------

    def _folder(self, name: str) -> RunFolder:
        return RunFolder(self._live / "run" / name)

    def _state(self, runtime: str) -> Path:
        return self._live / "state" / runtime

    def _there(self, name: str) -> tuple[RunFolder, ContainerManifest]:
        folder = self._folder(name)
        manifest = folder.manifest()
        if manifest is None:
            raise ContainerNotFound(f"There is no container {name!r}.")
        return folder, manifest

    def _watcher(self, folder: RunFolder) -> ContainerWatcher:
        if folder.name not in self._watchers:
            self._watchers[folder.name] = ContainerWatcher(folder, self._cgroups, self._watch)
        return self._watchers[folder.name]

    def _close_ends(self, name: str) -> None:
        if (ends := self._ends.pop(name, None)) is not None:
            for fd in (ends.stdin, ends.stdout, ends.stderr):
                os.close(fd)


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
