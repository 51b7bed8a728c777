"""A specification and an image as `config.json` of the OCI runtime specification. Nothing of a
container is decided elsewhere, so its whole sandbox can be read in this one file."""

from __future__ import annotations

import base64
import ctypes
import os
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
    limits: bool = True
    """False if whoever starts the runtime is already in a cgroup that has the spec's limits."""


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


def cpu_quota(cpus: float) -> tuple[int, int]:
    """Microseconds of processor time in each period, and the period."""
    return max(int(cpus * _PERIOD), _LEAST_QUOTA), _PERIOD


def _linux(spec: ContainerSpec, options: SandboxOptions) -> dict[str, Any]:
    quota, period = cpu_quota(spec.cpus)
    memory = {"limit": spec.memory} | ({"swap": spec.memory} if options.swap else {})
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in _NAMESPACES],
        "maskedPaths": list(_MASKED),
        "readonlyPaths": list(_READ_ONLY),
        "seccomp": options.seccomp,
    }
    if options.limits:
        linux["cgroupsPath"] = f"/{spec.name}"
        linux["resources"] = {
            "memory": memory,
            "cpu": {"quota": quota, "period": period},
            "pids": {"limit": spec.pids},
            "devices": [{"allow": False, "access": "rwm"}],
        }
    return linux


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


ANNOTATION = "run.oci.seccomp_bpf_data"

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_OPTIMIZE, _TREE = 8, 2
_COMPARE = {"SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
_ONE_FILTER = 8
"""Bytes of one instruction."""


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def compiled(profile: Mapping[str, Any]) -> str:
    """For this machine, in base64; empty if that can't be done here."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return ""
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    context = library.seccomp_init(_ERRNO | profile["defaultErrnoRet"])
    if not context:
        return ""
    try:
        return _compile(library, ctypes.c_void_p(context), profile)
    finally:
        library.seccomp_release(ctypes.c_void_p(context))


def _compile(library: ctypes.CDLL, context: ctypes.c_void_p, profile: Mapping[str, Any]) -> str:
    # An older library knows no tree; a list does the same.
    library.seccomp_attr_set(context, _OPTIMIZE, _TREE)
    for rule in profile["syscalls"]:
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            # Negative is a call that this architecture, or this library, does not have.
            if number >= 0 and not _add(library, context, number, rule):
                return ""
    return _exported(library, context)


def _add(
    library: ctypes.CDLL, context: ctypes.c_void_p, number: int, rule: Mapping[str, Any]
) -> bool:
    action = _ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else _ERRNO | rule["errnoRet"]
    args = rule.get("args", ())
    comparisons = (_Comparison * max(len(args), 1))(
        *(
            _Comparison(arg["index"], _COMPARE[arg["op"]], arg["value"], arg.get("valueTwo", 0))
            for arg in args
        )
    )
    add = library.seccomp_rule_add_array
    add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    return bool(add(context, action, number, len(args), ctypes.byref(comparisons)) == 0)


def _exported(library: ctypes.CDLL, context: ctypes.c_void_p) -> str:
    file = os.memfd_create("penstock-seccomp")
    try:
        if library.seccomp_export_bpf(context, file) != 0:
            return ""
        size = os.lseek(file, 0, os.SEEK_END)
        data = os.pread(file, size, 0)
    finally:
        os.close(file)
    return base64.b64encode(data).decode() if data and size % _ONE_FILTER == 0 else ""
