"""When a container has started and when it is over, whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from penstock.workloads.container.engine import ContainerState, Exit
from penstock.workloads.container.engines.oci.cgroups import Cgroups
from penstock.workloads.container.engines.oci.folder import PID, STATUS, RunFolder
from penstock.workloads.container.engines.oci.watch import Watch, process_end

_PATIENCE = 5.0


class Life:
    """One container, followed through its folder and its launcher."""

    def __init__(self, folder: RunFolder, cgroups: Cgroups, watch: Watch) -> None:
        self.folder = folder
        self.begun = asyncio.Event()
        """It runs, or never will."""
        self.over = asyncio.Event()
        self._cgroups = cgroups
        self._watch = watch
        self._added = watch.add(folder.path, self._heard)
        self._loop = asyncio.get_running_loop()
        self._fds: set[int] = set()
        self._closed = False
        if folder.status is not None:
            self.end()
        elif folder.launcher is not None:
            self._adopt()

    def follow(self, spawned: asyncio.Future[int]) -> None:
        """A launcher that was just spawned, or could not be."""
        if spawned.exception() is not None:
            self.end()
        elif not self._closed:
            self._await(os.pidfd_open(spawned.result()))

    def end(self) -> None:
        self.begun.set()
        self.over.set()

    def close(self) -> None:
        self._closed = True
        self._watch.forget(self._added)
        for fd in self._fds:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    def _adopt(self) -> None:
        if self.folder.pid is not None:
            self.begun.set()
        fd = self.folder.launcher_fd()
        if fd is None:
            self._launcher_gone()
        else:
            self._await(fd)

    def _heard(self, name: str) -> None:
        if name == STATUS and self.folder.status is not None:
            self.end()
        elif name == PID:
            self.begun.set()

    def _await(self, fd: int) -> None:
        self._fds.add(fd)
        self._loop.add_reader(fd, self._process_gone, fd)

    def _process_gone(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._fds.discard(fd)
        os.close(fd)
        self._launcher_gone()

    def _launcher_gone(self) -> None:
        """Somebody ended it: the container may go on, but its exit code will not be known."""
        fd = first_process(self.folder, self._cgroups)
        if self.folder.status is None and fd is not None:
            self._await(fd)
            return
        if fd is not None:
            os.close(fd)
        self.end()


def state_of(folder: RunFolder, cgroups: Cgroups) -> ContainerState:
    if folder.launcher is None:
        return ContainerState.CREATED
    if folder.status is None:
        for fd in (folder.launcher_fd(), first_process(folder, cgroups)):
            if fd is not None:
                os.close(fd)
                return ContainerState.RUNNING
    return ContainerState.EXITED


def exit_of(folder: RunFolder, cgroups: Cgroups) -> Exit:
    """How it ended; call it when it has."""
    oom = cgroups.oom_kills(folder.name) > 0
    code = folder.status
    if code is None:
        return Exit(None, oom, "Nobody was there when it ended, so its exit code is not known.")
    if folder.pid is None:
        return Exit(None, oom, folder.complaint() or f"The runtime ended with {code}.")
    fd = first_process(folder, cgroups)
    if fd is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)
        if not oom:
            return Exit(None, oom, "Somebody ended the runtime while the container ran.")
    return Exit(code, oom)


def first_process(folder: RunFolder, cgroups: Cgroups) -> int | None:
    """A pidfd of the container's first process, if it lives."""
    pid = folder.pid
    if pid is None:
        return None
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if cgroups.is_in(folder.name, pid):
        return fd
    os.close(fd)
    return None


async def end_process(fd: int) -> None:
    """Kill it, and wait a while for its end."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    await process_end(fd, _PATIENCE)


async def end_group(leader: int) -> None:
    """Kill a process group, and wait a while for the end of its leader and what it started."""
    fds = []
    with contextlib.suppress(ProcessLookupError):
        # Nobody who has to stop can fork any more, so none is missed.
        os.killpg(leader, signal.SIGSTOP)
        for pid in (leader, *children_of(leader)):
            with contextlib.suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
        os.killpg(leader, signal.SIGKILL)
    try:
        for fd in fds:
            await process_end(fd, _PATIENCE)
    finally:
        for fd in fds:
            os.close(fd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(leader, os.WNOHANG)  # noqa: ASYNC222 - it does not wait


def children_of(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
