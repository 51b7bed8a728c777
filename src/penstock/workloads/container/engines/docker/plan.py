"""A `Plan` as the engine API wants it: the whole enclosure, spelled out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from penstock.workloads.container.engine import Mount, Plan

OPEN_FILES = 1024
SHARED_MEMORY = 16 << 20
"""Bytes of /dev/shm; they count as memory."""


def create_body(
    plan: Plan, *, volumes: Collection[str] = (), seccomp: str | None = None, init: bool = True
) -> dict[str, Any]:
    """The body of /containers/create.

    `volumes` are folders that the image declares: engines would put a folder of the disk there,
    writable and without a limit, so each becomes a tmpfs like /tmp. `seccomp` is a profile as
    JSON, in place of the engine's own. `init` says whether the engine has an init program.
    """
    body: dict[str, Any] = {
        "Image": plan.image,
        "Env": [f"{name}={value}" for name, value in plan.env.items()],
        "User": "{}:{}".format(*plan.user),
        "Labels": dict(plan.labels),
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "NetworkDisabled": not plan.network,
        # An image's own check would run a second program beside the job.
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(plan, volumes, seccomp) | {"Init": init},
    }
    if plan.cmd:
        body["Cmd"] = list(plan.cmd)
    if plan.workdir:
        body["WorkingDir"] = plan.workdir
    return body


def _host_config(plan: Plan, volumes: Collection[str], seccomp: str | None) -> dict[str, Any]:
    host: dict[str, Any] = {
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "NetworkMode": "bridge" if plan.network else "none",
        "PublishAllPorts": False,
        "Privileged": False,
        "ReadonlyRootfs": True,
        "CapAdd": [],
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", *([f"seccomp={seccomp}"] if seccomp else [])],
        "IpcMode": "private",
        "Memory": plan.memory,
        "MemorySwap": plan.memory,
        "OomKillDisable": False,
        "NanoCpus": round(plan.cpus * 1e9),
        "PidsLimit": plan.pids,
        "Ulimits": _ulimits(plan),
        "ShmSize": SHARED_MEMORY,
        "Tmpfs": _tmpfs(plan, volumes),
        "Mounts": [_mount(mount) for mount in plan.mounts],
        "Devices": [],
        "LogConfig": {"Type": "none", "Config": {}},
    }
    if plan.runtime:
        host["Runtime"] = plan.runtime
    return host


def _ulimits(plan: Plan) -> list[dict[str, Any]]:
    limits = {"core": 0, "nofile": OPEN_FILES}
    if plan.file_size:
        limits["fsize"] = plan.file_size
    return [{"Name": name, "Soft": most, "Hard": most} for name, most in limits.items()]


def _tmpfs(plan: Plan, volumes: Collection[str]) -> Mapping[str, str]:
    # Where the image has the folder already, its mode wins over ours: hence the owner.
    owner = "uid={},gid={}".format(*plan.user)
    options = f"rw,nosuid,nodev,noexec,size={plan.tmp},mode=1777,{owner}"
    taken = {mount.target for mount in plan.mounts}
    return {path: options for path in ("/tmp", *volumes) if path.rstrip("/") not in taken}


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": str(mount.source),
        "Target": mount.target,
        "ReadOnly": mount.read_only,
        "BindOptions": {"Propagation": "rprivate"},
    }
