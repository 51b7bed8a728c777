"""Starting a container so that it outlives the worker.

The launcher is a shell, which every machine has and which is there in a millisecond. It runs
the runtime, writes down its exit code, and then stands still until the container is removed: it
holds the reading ends of the FIFOs, so that what was written last is not lost with the writers.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

_SCRIPT = """\
cd "$1" && echo $$ >launcher || exit 1
groups=$2
shift 2
(
    for group in $groups; do echo 0 >"$group/cgroup.procs" || exit 1; done
    exec "$@"
)
code=$?
exec 3<stdout 4<stderr 0<&- 1>&- 2>&-
echo $code >status
while :; do kill -STOP $$; done
"""
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_SIGNALS = [*(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})]
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_SLAVE = 0x4000, 1 << 19
_MNT_DETACH = 2


class Streams(Struct, frozen=True):
    """File descriptors for the container's standard streams."""

    stdin: int
    stdout: int
    stderr: int


class Launch:
    """Spawns launchers.

    crun refuses a machine that has cgroups of version 1 and 2 side by side. There `hidden` is
    the mount of version 2: one thread has a mount namespace of its own in which it is not
    mounted, and what is spawned from it inherits that. It costs nothing at each start.
    """

    def __init__(self, hidden: str = "") -> None:
        self._hidden = hidden
        self._thread = ThreadPoolExecutor(1, "penstock-launch", initializer=self._hide)

    def spawn(
        self, folder: Path, groups: Sequence[str], command: Sequence[str], streams: Streams
    ) -> asyncio.Future[int]:
        """The PID of a launcher that runs the command in these cgroups, or an OSError. The
        streams are used until it is known."""
        args = [_SCRIPT, "penstock-launcher", str(folder), " ".join(groups), *command]
        loop = asyncio.get_running_loop()
        if self._hidden:
            return loop.run_in_executor(self._thread, _spawn, args, streams)
        spawned: asyncio.Future[int] = loop.create_future()
        try:
            spawned.set_result(_spawn(args, streams))
        except OSError as error:
            spawned.set_exception(error)
        return spawned

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _hide(self) -> None:
        if not self._hidden:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        _done(libc.unshare(_CLONE_NEWNS), "unshare")
        _done(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")
        _done(libc.umount2(os.fsencode(self._hidden), _MNT_DETACH), "umount")


def _spawn(args: list[str], streams: Streams) -> int:
    return os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", *args],
        _ENV,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, streams.stdin, 0),
            (os.POSIX_SPAWN_DUP2, streams.stdout, 1),
            (os.POSIX_SPAWN_DUP2, streams.stderr, 2),
        ],
        # A Ctrl-C at the worker's terminal is not the container's.
        setsid=True,
        setsigmask=(),
        # Python ignores SIGPIPE, and a worker in the background perhaps others.
        setsigdef=_SIGNALS,
    )


def _done(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
