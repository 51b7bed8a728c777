"""What this machine offers to the engine: runtimes, cgroups, an init, seccomp."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from penstock.workloads.container.engine import ContainerSpec, EngineUnavailable, Unsupported
from penstock.workloads.container.engines import seccomp
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.oci.bundle import SandboxOptions
from penstock.workloads.container.engines.oci.shim import LOG, PID
from penstock.workloads.container.engines.programs import run_program

RUNTIMES = ("crun", "runc")
"""The faster one first."""
SANDBOX = "runsc"
ADVICE = "install one: apt-get install crun, or dnf install crun"

_INITS = ("docker-init", "tini-static", "catatonit", "/usr/libexec/podman/catatonit")
"""Statically linked, so that they run in any image."""
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

    def create(self, state: str, folder: Path, name: str) -> list[str]:
        """The command that makes a container from a bundle; gVisor also starts it."""
        how = (*_SANDBOX_OPTIONS, "run", "--detach") if self.is_sandbox else ("create",)
        log = ("--log", f"{folder}/{LOG}", "--log-format", "json")
        files = ("--bundle", f"{folder}", "--pid-file", f"{folder}/{PID}")
        return [self.path, "--root", state, *log, *how, *files, name]

    def gate(self, state: str, name: str) -> str:
        """Where the first process of a container waits for its start, if it does."""
        return "" if self.is_sandbox else f"{state}/{name}/exec.fifo"

    def fit(self, spec: ContainerSpec) -> ContainerSpec:
        """The spec with no less than what the runtime itself needs."""
        if not self.is_sandbox:
            return spec
        return msgspec.structs.replace(
            spec,
            pids=max(spec.pids, _SANDBOX_PIDS),
            memory=max(spec.memory, _SANDBOX_MEMORY),
        )


_SANDBOX_OPTIONS = ("--platform=ptrace", "--network=none", "--oci-seccomp")


def installed(name: str) -> Runtime | None:
    path = shutil.which(name)
    return Runtime(name, path) if path else None


def find_init() -> Path | None:
    found = (shutil.which(name) for name in _INITS)
    return next((Path(path).resolve() for path in found if path), None)


class OciMachine:
    """Found out once. Raises EngineUnavailable if no container can run here."""

    def __init__(self, wanted: str = "") -> None:
        if os.geteuid() != 0:
            raise EngineUnavailable(
                "The oci engine needs root: run the worker as root, or use Docker or Podman."
            )
        names = (wanted,) if wanted else RUNTIMES
        self._installed = {
            name: found for name in (*names, *RUNTIMES, SANDBOX) if (found := installed(name))
        }
        self.candidates = [self._installed[name] for name in names if name in self._installed]
        if not self.candidates:
            raise EngineUnavailable(f"No {' or '.join(names)} is installed here; {ADVICE}.")
        self.cgroups = Cgroups.here()
        self.cgroups.check()
        self.init = find_init()
        self._seccomp = self._profile()
        filters = seccomp.compiled(self._seccomp)
        self._compiled = {seccomp.ANNOTATION: filters} if filters else {}

    @property
    def runtime(self) -> Runtime:
        """For specs that name none."""
        return self.candidates[0]

    def runtimes(self) -> tuple[str, ...]:
        """Those that a spec may name."""
        return tuple(dict.fromkeys((self.runtime.name, *self._installed)))

    def choose(self, name: str) -> Runtime:
        if not name:
            return self.runtime
        if name not in self._installed:
            raise Unsupported(f"The runtime {name!r} is not installed here.")
        return self._installed[name]

    def options(self, runtime: Runtime) -> SandboxOptions:
        is_crun = runtime.name == "crun"
        return SandboxOptions(
            init=self.init,
            seccomp=self._seccomp,
            annotations=self._compiled if is_crun else {},
            swap=self.cgroups.counts_swap,
        )

    @property
    def hidden(self) -> str:
        """A mount that crun must not see: it refuses cgroups of version 1 and 2 side by side."""
        return self.cgroups.unified if self.cgroups.is_hybrid else ""

    def _profile(self) -> Mapping[str, Any]:
        try:
            return seccomp.profile()
        except KeyError:
            kind = platform.machine()
            raise EngineUnavailable(f"There is no seccomp profile for {kind} here.") from None


async def version_of(runtime: Runtime) -> str:
    """`crun 1.8.1`. Raises EngineUnavailable."""
    said = await output_of(runtime.path, "--version")
    words = said.splitlines()[0].split() if said else []
    if len(words) < 2:
        raise EngineUnavailable(f"{runtime.path} does not tell its version.")
    return f"{runtime.name} {words[-1]}"


async def output_of(*command: str) -> str:
    try:
        ended = await run_program(*command, timeout=10)
    except TimeoutError:
        raise EngineUnavailable(f"{command[0]} does not answer.") from None
    except OSError as error:
        raise EngineUnavailable(f"{command[0]} can't be started: {error}.") from error
    return ended.stdout.decode(errors="replace")
