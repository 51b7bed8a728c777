"""Where building with Podman is not building with Docker.

Its own request is used, because Docker's can't say that nothing may be fetched. Podman does not
end a build whose caller is gone: the build gets a cgroup by whose name its processes are found.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.workloads.container.engines.docker.meter import hierarchies

_NO_NETWORK = 1
_OWN_NETWORK = msgspec.json.encode([{"Name": "network", "Host": False, "Path": ""}]).decode()
_ULIMITS = msgspec.json.encode(["core=0:0", "nofile=1024:1024"]).decode()


class PodmanBuild:
    """One build."""

    PATH = "/libpod/build"

    def __init__(self, profile: str, *, rootless: bool) -> None:
        """`profile` is a file with seccomp rules. A rootless Podman can't choose cgroups."""
        self._profile = profile
        self._cgroup = "" if rootless else f"penstock-build-{secrets.token_hex(8)}"

    def query(self) -> dict[str, str | int]:
        more: dict[str, str | int] = {
            "pullpolicy": "never",
            "layers": 0,
            "networkmode": _NO_NETWORK,
            "nsoptions": _OWN_NETWORK,
            "seccomp": self._profile,
            "ulimits": _ULIMITS,
        }
        return more | {"cgroupparent": f"/{self._cgroup}"} if self._cgroup else more

    def kill(self) -> None:
        """Everything that runs in it now, on this machine."""
        for pid in set(self._processes()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> Iterator[int]:
        for folder in {Path(where, self._cgroup) for where in hierarchies().values()}:
            if self._cgroup and folder.is_dir():
                for file in folder.rglob("cgroup.procs"):
                    with suppress(OSError):
                        yield from (int(pid) for pid in file.read_text().split() if int(pid) > 0)
