"""Engines by their own commands: what a container costs without us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from penstock.testing.engines import IMAGE


class Bare:
    """Runs one container by one command line."""

    def __init__(self, name: str, prefix: list[str], env: dict[str, str]) -> None:
        self.name = name
        self._prefix = prefix
        self._env = {**os.environ, **env}
        self._count = 0

    def run(self, *command: str) -> float:
        """Seconds from the command's start to its end."""
        self._count += 1
        argv = [part.replace("{n}", f"{self._count}") for part in self._prefix]
        began = time.perf_counter()
        subprocess.run(
            [*argv, *command],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=self._env,
        )
        return time.perf_counter() - began

    def one_by_one(self, count: int) -> float:
        return median(self.run("true") for _ in range(count))

    def rate(self, count: int, at_once: int) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda _: self.run("true"), range(count)))
        return count / (time.perf_counter() - began)


def docker(socket: Path) -> Bare:
    program = shutil.which("docker") or "docker"
    prefix = [program, "-H", f"unix://{socket}", "run", "--rm", "--network", "none", IMAGE]
    return Bare("docker run", prefix, {})


def podman(socket: Path) -> Bare:
    """In the namespaces of the service, where its images are."""
    folder, state = socket.parent, socket.parent / "t"
    pid = (folder / "pid").read_text()
    prefix = ["nsenter", "-t", pid, "-m", "-n", "podman"]
    prefix += ["--root", f"{state}/root", "--runroot", f"{state}/run", "--tmpdir", f"{state}/tmp"]
    prefix += ["--cgroup-manager=cgroupfs", "--events-backend=file"]
    prefix += ["run", "--rm", "--network", "none", "--log-driver", "none", IMAGE]
    return Bare("podman run", prefix, {"CONTAINERS_CONF": str(folder / "containers.conf")})


class Bundle(Bare):
    """`runc run` of a bundle with the limits that ours has."""

    def __init__(self, program: str, folder: Path, tree: Path) -> None:
        folder.mkdir()
        for name in ("dev", "proc", "sys"):
            (tree / name).mkdir()
        subprocess.run([program, "spec"], cwd=folder, check=True)
        self._folder, self._tree = folder, tree
        self._written: tuple[str, ...] = ()
        prefix = [program, "run", "--bundle", str(folder), f"bare-{os.getpid()}-{{n}}"]
        if program == "crun" and (unified := _unified()):
            prefix = ["unshare", "-m", "sh", "-c", f'umount {unified}; exec "$@"', "sh", *prefix]
        super().__init__(f"{program} run", prefix, {})

    def run(self, *command: str) -> float:
        if self._written != command:
            file = self._folder / "config.json"
            spec = _spec(json.loads(file.read_text()), self._tree, ["/bin/busybox", *command])
            file.write_text(json.dumps(spec))
            self._written = command
        return super().run()


def _unified() -> str:
    """Where cgroup v2 is mounted beside v1; crun wants only one of them."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2" and target != "/sys/fs/cgroup":
            return target
    return ""


def _spec(example: dict[str, Any], tree: Path, args: list[str]) -> dict[str, Any]:
    """The runtime's own example, with limits and without rights, as ours."""
    sets = ("bounding", "effective", "permitted", "inheritable", "ambient")
    example["process"] |= {
        "terminal": False,
        "user": {"uid": 65534, "gid": 65534},
        "args": args,
        "capabilities": {name: [] for name in sets},
        "noNewPrivileges": True,
        "rlimits": [],
    }
    example["root"] = {"path": str(tree), "readonly": True}
    example["linux"]["resources"] |= {
        "memory": {"limit": 256 << 20, "swap": 256 << 20},
        "pids": {"limit": 128},
        "cpu": {"quota": 100_000, "period": 100_000},
    }
    return example
