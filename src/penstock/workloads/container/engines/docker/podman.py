"""Where Podman's engine API is not Docker's."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

from penstock.workloads.container.engine import Plan, Unsupported

REMOVE = {"timeout": 0}
"""A forced removal would else give the container ten seconds to end by itself."""
BUILD_PATH = "/libpod/build"
"""Docker's own path can't say that nothing may be pulled."""
BUILD: dict[str, str | int] = {"pullpolicy": "never", "layers": 0}

_MOST_PROCESSES = 1 << 14
"""Of one user, in all containers together; how many a container may have is `Plan.pids`."""


def adapt(body: dict[str, Any], profile: str) -> None:
    """Make a body of /containers/create one for Podman; `profile` is a file with seccomp rules."""
    host = body["HostConfig"]
    # Its own default for nproc is more than an engine without CAP_SYS_RESOURCE may give.
    most = _processes()
    host["Ulimits"].append({"Name": "nproc", "Soft": most, "Hard": most})
    host["SecurityOpt"].append(f"seccomp={profile}")
    host["Tmpfs"] = {**_CLOSED, **{path: _owned(text) for path, text in host["Tmpfs"].items()}}


_CLOSED: Mapping[str, str] = dict.fromkeys(("/run", "/var/tmp"), "ro,nosuid,nodev,noexec,size=4k")
"""With a read-only root it would make these writable, without a limit."""


def _owned(options: str) -> str:
    """It knows no uid and gid of a tmpfs, but a word for the container's own."""
    return ",".join([*(o for o in options.split(",") if o[:4] not in ("uid=", "gid=")), "U"])


def _processes() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return _MOST_PROCESSES if hard == resource.RLIM_INFINITY else min(hard, _MOST_PROCESSES)


def check_runtime(plan: Plan, default: str) -> None:
    """Which runtime it uses is a matter of its configuration, not of a container."""
    if plan.runtime not in ("", default):
        raise Unsupported(f"this Podman runs containers with {default}, not with {plan.runtime}")
