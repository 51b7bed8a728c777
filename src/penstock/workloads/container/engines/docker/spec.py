"""A `ContainerSpec` as the engine API wants it: the whole sandbox, spelled out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock.workloads.container.engine import NO_NETWORK, ContainerSpec, Mount
from penstock.workloads.container.engines.docker.attach import LOG_BYTES

OPEN_FILES = 1024
LOG_OPTIONS = {"max-size": f"{LOG_BYTES}", "max-file": "2", "compress": "false"}
"""The engine keeps what a container writes while no worker reads it, within bounds."""


def create_body(
    spec: ContainerSpec,
    *,
    volumes: Collection[str] = (),
    seccomp: str | None = None,
    init: bool = True,
) -> dict[str, Any]:
    """The body of /containers/create.

    `volumes` are folders that the image declares: engines would put a folder of the disk there,
    writable and without a limit, so each becomes a tmpfs like /tmp. `seccomp` is a profile as
    JSON, in place of the engine's own. `init` says whether the engine has an init program.
    """
    body: dict[str, Any] = {
        "Image": spec.image,
        "Env": [f"{name}={value}" for name, value in {"HOME": spec.home, **spec.env}.items()],
        "User": "{}:{}".format(*spec.user),
        "Labels": dict(spec.labels),
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "NetworkDisabled": spec.network == NO_NETWORK,
        # An image's own check would run a second program beside the job.
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(spec, volumes, seccomp) | {"Init": init},
    }
    if spec.cmd:
        body["Cmd"] = list(spec.cmd)
    if spec.entrypoint is not None:
        body["Entrypoint"] = list(spec.entrypoint) or [""]  # engines take an empty list for none
    if spec.workdir:
        body["WorkingDir"] = spec.workdir
    return body


def _host_config(
    spec: ContainerSpec, volumes: Collection[str], seccomp: str | None
) -> dict[str, Any]:
    host: dict[str, Any] = {
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "NetworkMode": spec.network,
        "PublishAllPorts": False,
        "Privileged": False,
        "ReadonlyRootfs": spec.read_only_root,
        "CapAdd": [],
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", *([f"seccomp={seccomp}"] if seccomp else [])],
        "IpcMode": "private",
        "Memory": spec.memory,
        "MemorySwap": spec.memory,
        "OomKillDisable": False,
        "NanoCpus": round(spec.cpus * 1e9),
        "PidsLimit": spec.pids,
        "Ulimits": _ulimits(spec),
        "ShmSize": spec.shm,
        "Tmpfs": _tmpfs(spec, volumes),
        "Mounts": [_mount(mount) for mount in spec.mounts],
        "Devices": [],
        "LogConfig": {"Type": "local", "Config": LOG_OPTIONS},
    }
    if spec.gpus:
        host["DeviceRequests"] = [
            {
                "Driver": "",
                "Count": spec.gpus.count,
                "DeviceIDs": list(spec.gpus.ids),
                "Capabilities": [["gpu"]],
            }
        ]
    if spec.runtime:
        host["Runtime"] = spec.runtime
    return host


def _ulimits(spec: ContainerSpec) -> list[dict[str, Any]]:
    limits = {"core": 0, "nofile": OPEN_FILES}
    if spec.file_size:
        limits["fsize"] = spec.file_size
    return [{"Name": name, "Soft": most, "Hard": most} for name, most in limits.items()]


def _tmpfs(spec: ContainerSpec, volumes: Collection[str]) -> Mapping[str, str]:
    # Where the image has the folder already, its mode wins over ours: hence the owner.
    owner = "uid={},gid={}".format(*spec.user)
    options = f"rw,nosuid,nodev,noexec,size={spec.tmp},mode=1777,{owner}"
    taken = {mount.target for mount in spec.mounts}
    return {path: options for path in ("/tmp", *volumes) if path.rstrip("/") not in taken}


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": str(mount.source),
        "Target": mount.target,
        "ReadOnly": mount.read_only,
        "BindOptions": {"Propagation": "rprivate"},
    }


# -- GPUs of this machine, as container engines find them --------------------------------------

NO_GPU = (
    "this machine has no GPU that containers could use: install the driver and the NVIDIA Container"
    " Toolkit"
)
NO_CDI = "no GPU is described in /etc/cdi or /run/cdi: run nvidia-ctk cdi generate"
_CDI_FOLDERS = ("/etc/cdi", "/run/cdi", "/var/run/cdi")
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def has_gpu() -> bool:
    return any(Path(path).exists() for path in _GPU_DEVICES) or cdi_kind() != ""


def cdi_kind() -> str:
    """What the specifications of the Container Device Interface call GPUs, as `nvidia.com/gpu`;
    empty if there is none."""
    for folder in _CDI_FOLDERS:
        for path in sorted(Path(folder).glob("*")):
            if path.suffix in (".json", ".yaml", ".yml") and (kind := _kind(path)):
                return kind
    return ""


def _kind(path: Path) -> str:
    try:
        found: Any = yaml.safe_load(path.read_text())  # JSON is YAML, too
        kind = str(found["kind"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return ""
    return kind if kind.endswith("/gpu") else ""
