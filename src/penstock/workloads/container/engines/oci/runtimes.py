"""The programs that this engine is made of: runtimes, and an init to put into containers."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.workloads.container.engine import Plan
from penstock.workloads.container.engines.oci.programs import needs_loader

RUNTIMES = ("crun", "runc")
"""The faster one first."""
SANDBOX = "runsc"
ADVICE = "install one: apt-get install crun, or dnf install crun"

_INITS = ("docker-init", "tini-static", "catatonit", "tini", "/usr/libexec/podman/catatonit")
_SANDBOX_PIDS = 512
"""The threads of gVisor itself count as the container's."""
_SANDBOX_MEMORY = 32 << 20
"""And so does its memory."""


class Runtime(Struct, frozen=True):
    """One that is installed."""

    name: str
    path: str

    @property
    def is_sandbox(self) -> bool:
        return self.name == SANDBOX

    @property
    def keeps_cgroups(self) -> bool:
        """The others remove them, and what they counted, when a container ends."""
        return self.name == "runc"

    def run(self, state: Path, folder: Path, name: str) -> list[str]:
        """The command that runs a bundle and ends with the container's exit code."""
        options: tuple[str, ...]
        match self.name:
            case "runc":
                options = ("run", "--keep")
            case "crun":
                options = ("--cgroup-manager=disabled", "run")
            case _:
                options = (*_SANDBOX_OPTIONS, "run")
        log = ("--log", f"{folder}/log", "--log-format", "json")
        files = ("--bundle", str(folder), "--pid-file", f"{folder}/pid")
        return [self.path, "--root", str(state), *log, *options, *files, name]

    def fit(self, plan: Plan) -> Plan:
        """The plan with no less than what the runtime itself needs."""
        if not self.is_sandbox:
            return plan
        return msgspec.structs.replace(
            plan,
            pids=max(plan.pids, _SANDBOX_PIDS),
            memory=max(plan.memory, _SANDBOX_MEMORY),
        )


_SANDBOX_OPTIONS = ("--platform=ptrace", "--network=none", "--ignore-cgroups", "--oci-seccomp")


def installed(name: str) -> Runtime | None:
    path = shutil.which(name)
    return Runtime(name, path) if path else None


def find_init() -> Path | None:
    """A statically linked one, so that it runs in any image."""
    for name in _INITS:
        if (found := shutil.which(name)) and not needs_loader(path := Path(found).resolve()):
            return path
    return None
