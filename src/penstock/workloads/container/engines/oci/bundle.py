"""A plan and an image as `config.json` of the OCI runtime specification. Nothing is read or
written here, so everything about a container's cage can be read in this one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from penstock.workloads.container.engine import Image, Mount, Plan, Unsupported

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


class Cage(Struct, frozen=True, kw_only=True):
    """What a bundle takes from the machine and not from the plan."""

    init: Path | None = None
    """A statically linked program that passes signals on and reaps orphans."""
    seccomp: Mapping[str, Any]
    annotations: Mapping[str, str] = {}
    swap: bool = True
    """Whether the kernel counts swap."""
    limits: bool = True
    """False if whoever starts the runtime is already in a cgroup that has the plan's limits."""


def process_of(plan: Plan, image: Image) -> Process:
    """Nothing of the worker's own environment; a writable HOME, unless the image has one."""
    env = {"PATH": _PATH, "HOME": "/tmp"}
    env.update(item.partition("=")[::2] for item in image.env)
    env.update(plan.env)
    args = (*image.entrypoint, *(plan.cmd or image.cmd))
    return Process(args, env, plan.workdir or image.workdir or "/")


def bundle(plan: Plan, process: Process, rootfs: Path, cage: Cage) -> dict[str, Any]:
    """Raises Unsupported for a plan with a network."""
    if plan.network:
        raise Unsupported("The oci engine gives no network; use Docker or Podman for this job.")
    front = (INIT, "--") if cage.init else ()
    return {
        "ociVersion": "1.0.2",
        "hostname": plan.name[:63],
        "root": {"path": str(rootfs), "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": plan.user[0], "gid": plan.user[1]},
            "args": [*front, *process.args],
            "env": [f"{name}={value}" for name, value in process.env.items()],
            "cwd": process.cwd,
            "capabilities": {name: [] for name in _CAPABILITY_SETS},
            "noNewPrivileges": True,
            "oomScoreAdj": _OOM_SCORE,
            "rlimits": _rlimits(plan),
        },
        "mounts": [*_mounts(plan, cage), *(_bind(mount) for mount in plan.mounts)],
        "linux": _linux(plan, cage),
        "annotations": dict(cage.annotations),
    }


def cpu_quota(cpus: float) -> tuple[int, int]:
    """Microseconds of processor time in each period, and the period."""
    return max(int(cpus * _PERIOD), _LEAST_QUOTA), _PERIOD


def _linux(plan: Plan, cage: Cage) -> dict[str, Any]:
    quota, period = cpu_quota(plan.cpus)
    memory = {"limit": plan.memory} | ({"swap": plan.memory} if cage.swap else {})
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in _NAMESPACES],
        "maskedPaths": list(_MASKED),
        "readonlyPaths": list(_READ_ONLY),
        "seccomp": cage.seccomp,
    }
    if cage.limits:
        linux["cgroupsPath"] = f"/{plan.name}"
        linux["resources"] = {
            "memory": memory,
            "cpu": {"quota": quota, "period": period},
            "pids": {"limit": plan.pids},
            "devices": [{"allow": False, "access": "rwm"}],
        }
    return linux


def _rlimits(plan: Plan) -> list[dict[str, Any]]:
    limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": _OPEN_FILES}
    if plan.file_size:
        limits["RLIMIT_FSIZE"] = plan.file_size
    return [{"type": name, "soft": value, "hard": value} for name, value in limits.items()]


def _mounts(plan: Plan, cage: Cage) -> list[dict[str, Any]]:
    uid, gid = plan.user
    mounts = [
        _mount("/proc", "proc", *_LOCKED),
        _mount("/dev", "tmpfs", "nosuid", "noexec", "strictatime", "mode=755", "size=64k"),
        _mount("/dev/shm", "tmpfs", *_LOCKED, "mode=1777", f"size={plan.tmp}"),
        _mount("/sys", "sysfs", *_LOCKED, "ro"),
        _mount(
            "/tmp", "tmpfs", *_LOCKED, "mode=700", f"uid={uid}", f"gid={gid}", f"size={plan.tmp}"
        ),
    ]
    if cage.init:
        mounts.append(_bind(Mount(cage.init, INIT)))
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
