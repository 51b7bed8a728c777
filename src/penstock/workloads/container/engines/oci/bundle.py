"""A specification and an image as `config.json` of the OCI runtime specification. Nothing of a
container is decided elsewhere, so its whole sandbox can be read in this one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from penstock.workloads.container.engine import NO_NETWORK, ContainerSpec, Image, Mount, Unsupported

INIT = "/dev/.init"
"""Where the host's init is bound: /dev is the container's own, so no image needs a place for it."""
MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "input", "output")
"""Folders that every root file system must have."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PERIOD = 100_000
"""Microseconds over which processor time is counted."""
_LEAST_QUOTA = 1000
_OOM_SCORE = 500
"""When the machine itself runs out of memory, a job goes before the worker does."""
_OPEN_FILES = 1024
_CAPABILITY_SETS = ("bounding", "effective", "inheritable", "permitted", "ambient")
_NAMESPACES = ("pid", "network", "ipc", "uts", "mount", "cgroup")
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_LOCKED = ("nosuid", "nodev", "noexec")


class Process(Struct, frozen=True):
    """The program that a container is about."""

    args: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str


class SandboxOptions(Struct, frozen=True, kw_only=True):
    """What a bundle takes from the machine and not from the spec."""

    init: Path | None = None
    """A statically linked program that passes signals on and reaps orphans."""
    seccomp: Mapping[str, Any]
    annotations: Mapping[str, str] = {}
    swap: bool = True
    """Whether the kernel counts swap."""


def process_of(spec: ContainerSpec, image: Image) -> Process:
    """Nothing of the worker's own environment; a writable HOME, unless the image has one."""
    env = {"PATH": _PATH}
    env.update(item.partition("=")[::2] for item in image.env)
    env.update({"HOME": spec.home, **spec.env})
    return Process(spec.args(image), env, spec.workdir or image.workdir or "/")


def bundle(
    spec: ContainerSpec, process: Process, rootfs: Path, options: SandboxOptions
) -> dict[str, Any]:
    """Raises Unsupported for what this engine does not do."""
    for asked, what in (
        (spec.network != NO_NETWORK, "network"),
        (spec.gpus, "GPU"),
        (spec.user_namespace, "user namespace"),
    ):
        if asked:
            raise Unsupported(f"The oci engine gives no {what}; use Docker or Podman for this job.")
    front = (INIT, "--") if options.init else ()
    return {
        "ociVersion": "1.0.2",
        "hostname": spec.name[:63],
        "root": {"path": str(rootfs), "readonly": spec.read_only_root},
        "process": {
            "terminal": False,
            "user": {"uid": spec.user[0], "gid": spec.user[1]},
            "args": [*front, *process.args],
            "env": [f"{name}={value}" for name, value in process.env.items()],
            "cwd": process.cwd,
            "capabilities": {name: [] for name in _CAPABILITY_SETS},
            "noNewPrivileges": True,
            "oomScoreAdj": _OOM_SCORE,
            "rlimits": _rlimits(spec),
        },
        "mounts": [*_mounts(spec, options), *(_bind(mount) for mount in spec.mounts)],
        "linux": _linux(spec, options),
        "annotations": dict(options.annotations),
    }


def _linux(spec: ContainerSpec, options: SandboxOptions) -> dict[str, Any]:
    memory = {"limit": spec.memory} | ({"swap": spec.memory} if options.swap else {})
    quota = max(int(spec.cpus * _PERIOD), _LEAST_QUOTA)
    return {
        "namespaces": [{"type": name} for name in _NAMESPACES],
        "maskedPaths": list(_MASKED),
        "readonlyPaths": list(_READ_ONLY),
        "seccomp": options.seccomp,
        "cgroupsPath": f"/{spec.name}",
        "resources": {
            "memory": memory,
            "cpu": {"quota": quota, "period": _PERIOD},
            "pids": {"limit": spec.pids},
            "devices": [{"allow": False, "access": "rwm"}],
        },
    }


def _rlimits(spec: ContainerSpec) -> list[dict[str, Any]]:
    limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": _OPEN_FILES}
    if spec.file_size:
        limits["RLIMIT_FSIZE"] = spec.file_size
    return [{"type": name, "soft": value, "hard": value} for name, value in limits.items()]


def _mounts(spec: ContainerSpec, options: SandboxOptions) -> list[dict[str, Any]]:
    uid, gid = spec.user
    mounts = [
        _mount("/proc", "proc", *_LOCKED),
        _mount("/dev", "tmpfs", "nosuid", "noexec", "strictatime", "mode=755", "size=64k"),
        _mount("/dev/shm", "tmpfs", *_LOCKED, "mode=1777", f"size={spec.shm}"),
        _mount("/sys", "sysfs", *_LOCKED, "ro"),
        _mount(
            "/tmp", "tmpfs", *_LOCKED, "mode=1777", f"uid={uid}", f"gid={gid}", f"size={spec.tmp}"
        ),
    ]
    if options.init:
        mounts.append(_bind(Mount(options.init, INIT)))
    return mounts


def _mount(target: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": kind, "options": list(options)}


def _bind(mount: Mount) -> dict[str, Any]:
    options = ["rbind", "rprivate", "nosuid", "nodev", "ro" if mount.read_only else "rw"]
    return {
        "destination": mount.target,
        "type": "bind",
        "source": str(mount.source),
        "options": options,
    }
