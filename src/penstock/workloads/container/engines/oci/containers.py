"""The containers below a folder: made, started, watched, ended and removed.

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
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.workloads.container.engine import (
    CommandNotFound,
    CommandNotRunnable,
    ContainerNotFound,
    ContainerSpec,
    ContainerState,
    ContainerSummary,
    EngineError,
    ExitStatus,
)
from penstock.workloads.container.engines.oci.bundle import Process, bundle
from penstock.workloads.container.engines.oci.client import ShimClient, ShimState
from penstock.workloads.container.engines.oci.folder import (
    ContainerManifest,
    RunFolder,
    live_folder,
)
from penstock.workloads.container.engines.oci.machine import SANDBOX, OciMachine, Runtime, output_of
from penstock.workloads.container.engines.oci.rootfs import resolve
from penstock.workloads.container.engines.oci.streams import AttachedStreams, ContainerPipes
from penstock.workloads.container.files.tree import remove_tree

_REMOVAL = 5.0
"""Seconds after which something that can't be removed is told."""
_LOST = "The shim was ended from outside while the container ran, so its exit code is unknown."

_LAYERED = """\
cd "$1" && shift && exec unshare --mount sh -c '
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay rootfs && exec "$@"' sh "$@"
"""
"""In the layer's folder, and in a mount namespace that ends with the container. Names without a
path: a colon or a comma would mean something in one."""

log = logging.getLogger(__name__)


class Container:
    """What this worker knows of a container."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.state: ShimState | None = None
        self.begun, self.over = asyncio.Event(), asyncio.Event()
        """It runs, or never will; it has ended, or was removed."""
        self.forgotten = asyncio.Event()
        """By the shim."""
        self.attached: list[AttachedStreams] = []
        self.pipes: ContainerPipes | None = None
        """Until it is started."""
        self.readers: list[int] = []
        """Reading ends of its output, from then on."""
        self.removal = asyncio.Lock()
        """Whoever comes second finds nothing to do."""

    def enter(self, state: ShimState | None, readers: Sequence[int] = ()) -> None:
        """As the shim says; None if it is lost."""
        self.state = state
        self.readers += readers
        if state is None or state.code is not None:
            self.end()
        elif state.pid is not None:
            self.begun.set()

    def end(self) -> None:
        self.begun.set()
        self.over.set()

    def open_pipes(self) -> ContainerPipes:
        if self.pipes is None:
            self.pipes = ContainerPipes()
        return self.pipes

    def attach(self, *, stdin: bool) -> AttachedStreams:
        writer, readers = None, self.readers
        if self.state is None and not self.over.is_set():
            pipes = self.open_pipes()
            writer, readers = pipes.take_stdin() if stdin else None, pipes.ends[3:]
        attached = AttachedStreams([os.dup(reader) for reader in readers], writer)
        self.attached.append(attached)
        return attached

    def close(self) -> None:
        """The container goes on."""
        for attached in self.attached:
            attached.close()
        self.attached.clear()
        while self.readers:
            os.close(self.readers.pop())
        if self.pipes is not None:
            self.pipes.close()
            self.pipes = None


class Containers:
    """Of one machine, below `root`."""

    def __init__(self, root: Path, machine: OciMachine) -> None:
        self._live = live_folder(root)
        self._run = self._live / "run"
        self._state = self._live / "state"
        self._layers = root / "layers"
        """On disk, unlike the rest: a container may write as much there as it likes."""
        self._machine = machine
        self._cgroups = machine.cgroups
        self._shim = ShimClient(self._changed, self._forgotten, self._lost)
        self._known: dict[str, Container] = {}
        for folder in (self._run, self._state, self._layers):
            folder.mkdir(exist_ok=True, mode=0o700)

    async def open(self) -> None:
        """Connect to the shim, which is started if there is none."""
        await self._shim.connect(self._live, self._machine.hidden)

    # -- beginning --------------------------------------------------------------

    def make(self, runtime: Runtime, spec: ContainerSpec, process: Process, rootfs: Path) -> None:
        """Raises EngineError, and then nothing is left."""
        spec = runtime.fit(spec)
        folder = RunFolder(self._run / spec.name)
        layer = self._layers / spec.name if needs_layer(spec, rootfs) else None
        place = layer / "rootfs" if layer else rootfs
        config = bundle(spec, process, place, self._machine.options(runtime))
        try:
            os.mkdir(folder.path, 0o700)
        except FileExistsError:
            raise EngineError(f"There is a container {spec.name!r} already.") from None
        try:
            if layer:
                _make_layer(layer, rootfs)
            manifest = ContainerManifest(
                layer=str(layer or ""),
                image=spec.image,
                runtime=runtime.name,
                labels=spec.labels,
                created=time.time(),
            )
            folder.fill(manifest, msgspec.json.encode(config))
            self._known[spec.name] = Container(folder)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the sweep tries again
                self._discard(folder)
            if isinstance(error, OSError):
                raise EngineError(f"The container can't be made: {error}.") from error
            raise

    def attach(self, name: str, *, stdin: bool) -> AttachedStreams:
        return self._there(name)[0].attach(stdin=stdin)

    async def start(self, name: str) -> None:
        """Until it runs. Raises CommandNotFound, CommandNotRunnable, EngineError."""
        one, manifest = self._there(name)
        if one.state is not None or one.over.is_set():
            raise EngineError(f"The container {name!r} was started before.")
        await self.open()
        runtime = self._machine.choose(manifest.runtime)
        command = runtime.run(f"{self._state}/{runtime.name}", one.folder.path, name)
        if manifest.layer:
            command = ["/bin/sh", "-c", _LAYERED, "sh", manifest.layer, *command]
        pipes, one.pipes = one.open_pipes(), None
        try:
            self._shim.start(name, command, pipes.ends)
            one.state = ShimState(name)
        finally:
            pipes.close()
        await one.begun.wait()
        _check_started(one)

    # -- watching ---------------------------------------------------------------

    async def wait(self, name: str) -> ExitStatus:
        one, _ = self._there(name)
        await one.over.wait()
        if self._known.get(name) is not one:
            raise ContainerNotFound(f"The container {name!r} was removed.")
        oom = self._cgroups.oom_kills(name) > 0
        if one.state is None:
            return ExitStatus(None, oom, _LOST)
        if one.state.pid is None:
            return ExitStatus(None, oom, _complaint(one))
        return ExitStatus(one.state.code, oom)

    def find(self, labels: Mapping[str, str]) -> list[ContainerSummary]:
        found = []
        for folder in self.folders():
            manifest = folder.manifest()
            if manifest is not None and has_labels(manifest.labels, labels):
                one = self._known_as(folder.name)
                state = ContainerState.CREATED
                if one.over.is_set():
                    state = ContainerState.EXITED
                elif one.state is not None:
                    state = ContainerState.RUNNING
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
        one = self._known_as(name)
        manifest = one.folder.manifest()
        if manifest is not None and manifest.runtime == SANDBOX and _runs(one):
            program, state = self._machine.choose(SANDBOX).path, f"{self._state}/{SANDBOX}"
            await output_of(program, "--root", state, "kill", name, str(number))
        elif one.state is not None:
            kept = self._machine.init is None and _is_kept_from(one.state.pid, number)
            self._send_signal(one, signal.SIGKILL if kept else number)

    async def kill(self, name: str) -> None:
        one = self._known_as(name)
        if one.state is not None:
            await one.begun.wait()
            # All others in its PID namespace die with the first process.
            self._send_signal(one, signal.SIGKILL)

    def _send_signal(self, one: Container, number: int) -> None:
        if one.state is None or one.state.pid is None or one.state.code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(one.state.pid)
            try:
                if self._cgroups.is_in(one.folder.name, one.state.pid):
                    signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)

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
            one.end()

    async def _remove(self, one: Container) -> None:
        one.close()
        if one.state is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REMOVAL):
                    await one.begun.wait()
            # One that is still being started is killed.
            self._shim.forget(one.folder.name)
            await one.forgotten.wait()
        await self._empty(one)
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

    async def _empty(self, one: Container) -> None:
        """Until nothing is in its cgroups, and they are gone."""
        name, until = one.folder.name, time.monotonic() + _REMOVAL
        self._send_signal(one, signal.SIGKILL)
        while not self._cgroups.remove(name):
            self._cgroups.kill(name)
            if time.monotonic() > until:
                raise EngineError(f"Something in {name} can't be ended.")
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """Let go of everything; containers go on."""
        for one in self._known.values():
            one.close()
        self._known.clear()
        self._shim.close()

    # -- the shim ---------------------------------------------------------------

    def _changed(self, state: ShimState, readers: list[int]) -> None:
        if state.name not in self._known:
            self._known[state.name] = Container(RunFolder(self._run / state.name))
        self._known[state.name].enter(state, readers)

    def _forgotten(self, name: str) -> None:
        if one := self._known.get(name):
            one.close()
            one.forgotten.set()
            if not one.removal.locked():  # another worker removes it
                del self._known[name]
                one.end()

    def _lost(self) -> None:
        """The shim has died. Nobody will know how its containers end, so they end now."""
        for one in self._known.values():
            one.forgotten.set()
            if not one.over.is_set() and (one.state is not None or one.folder.is_started):
                self._give_up(one)

    def _give_up(self, one: Container) -> None:
        self._cgroups.kill(one.folder.name)
        one.enter(None)

    # -- within -----------------------------------------------------------------

    def _known_as(self, name: str) -> Container:
        one = self._known.get(name) or Container(RunFolder(self._run / name))
        if one.folder.manifest() is not None:
            self._known[name] = one
        if one.state is None and not one.over.is_set() and one.folder.is_started:
            self._shim.receive()
            if one.state is None:
                self._give_up(one)
        return one

    def _there(self, name: str) -> tuple[Container, ContainerManifest]:
        one = self._known_as(name)
        manifest = one.folder.manifest()
        if manifest is None:
            raise ContainerNotFound(f"There is no container {name!r}.")
        return one, manifest


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


def has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(name in labels and value in ("", labels[name]) for name, value in wanted.items())


def _runs(one: Container) -> bool:
    return one.state is not None and one.state.pid is not None and one.state.code is None


def _complaint(one: Container) -> str:
    code = one.state.code if one.state else None
    return one.folder.complaint() or f"The runtime ended with {code}."


def _check_started(one: Container) -> None:
    if one.state is None or one.state.pid is not None:
        return
    said = _complaint(one)
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


def _delete_state(state: Path, name: str) -> None:
    """What a runtime wrote down; runsc has files beside a folder."""
    remove_tree(state / name)
    if state.name == SANDBOX:
        for file in state.glob(f"{name}*"):
            file.unlink(missing_ok=True)
