"""Where Podman's engine API is not Docker's."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.workloads.container.engine import ContainerSpec, Unsupported
from penstock.workloads.container.engines.docker.answers import Waited
from penstock.workloads.container.engines.docker.api import Api, container
from penstock.workloads.container.engines.docker.spec import NO_CDI, cdi_kind

REMOVE = {"timeout": 0}
"""A forced removal would else give the container ten seconds to end by itself."""

INIT = "catatonit"
INIT_FOLDERS = (
    *("/usr/libexec/podman", "/usr/local/libexec/podman"),
    *("/usr/lib/podman", "/usr/local/lib/podman"),
)
_CLOSELY = 2.0
_CDI_VERSION = 5
LOG_BYTES = 256 << 20
"""When a log has this size, all of it is dropped."""
_MOST_PROCESSES = 1 << 14
"""Of one user, in all containers together; a container has its own limit (`pids`)."""


def adapt(body: dict[str, Any], profile: str) -> None:
    """Make a body of /containers/create one for Podman; `profile` is a file with seccomp rules."""
    host = body["HostConfig"]
    # Its own default for nproc is more than an engine without CAP_SYS_RESOURCE may give.
    most = _processes()
    host["Ulimits"].append({"Name": "nproc", "Soft": most, "Hard": most})
    host["SecurityOpt"].append(f"seccomp={profile}")
    host["LogConfig"] = {"Type": "k8s-file", "Config": {"max-size": f"{LOG_BYTES}b"}}
    for request in host.get("DeviceRequests", ()):
        request |= {"Driver": "cdi", "Count": 0, "Capabilities": [], "DeviceIDs": _cdi_ids(request)}
    host["Tmpfs"] = {**_CLOSED, **{path: _owned(text) for path, text in host["Tmpfs"].items()}}


_CLOSED: Mapping[str, str] = dict.fromkeys(("/run", "/var/tmp"), "ro,nosuid,nodev,noexec,size=4k")
"""With a read-only root it would make these writable, without a limit."""


def _owned(options: str) -> str:
    """It knows no uid and gid of a tmpfs, but a word for the container's own."""
    return ",".join([*(o for o in options.split(",") if o[:4] not in ("uid=", "gid=")), "U"])


def _cdi_ids(request: Mapping[str, Any]) -> list[str]:
    count = request["Count"]
    names = request["DeviceIDs"] or (["all"] if count < 0 else [f"{n}" for n in range(count)])
    return [f"{cdi_kind()}={name}" for name in names]


def _processes() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return _MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, _MOST_PROCESSES)


def has_init() -> bool:
    """Whether its init program is where it is usually installed."""
    return any(Path(folder, INIT).exists() for folder in INIT_FOLDERS)


def gpus_problem(version: str) -> str:
    """Why a container can't have GPUs; older versions ignore a request for them."""
    if int(version.partition(".")[0] or 0) < _CDI_VERSION:
        return f"Podman {version} passes no GPUs on through its API; Podman {_CDI_VERSION} does"
    return "" if cdi_kind() else NO_CDI


def check_runtime(spec: ContainerSpec, default: str) -> None:
    """Which runtime it uses is a matter of its configuration, not of a container."""
    if spec.runtime not in ("", default):
        raise Unsupported(f"this Podman runs containers with {default}, not with {spec.runtime}")


async def wait(api: Api, name: str, silent: Coroutine[Any, Any, None]) -> Waited:
    """Docker's request keeps a whole processor busy here, for as long as the container runs. Its
    own looks as often as it is told: now and then, and closely once the container is `silent`."""
    rarely = asyncio.create_task(_look(api, name, "1s"))
    silence = asyncio.create_task(silent)
    try:
        await asyncio.wait((rarely, silence), return_when=asyncio.FIRST_COMPLETED)
        if not rarely.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSELY):
                    return await _look(api, name, "20ms")
        return await rarely
    finally:
        rarely.cancel()
        silence.cancel()
        await asyncio.gather(rarely, silence, return_exceptions=True)


async def _look(api: Api, name: str, interval: str) -> Waited:
    query = {"condition": "exited", "interval": interval}
    path = f"/libpod{container(name, '/wait')}"
    code = await api.wait(int, path, query, patient=True)
    return Waited(code, {"Message": "Podman can't tell its exit code"} if code < 0 else None)
