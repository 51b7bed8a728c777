"""Engines by their own commands: what a container costs without us."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from penstock.testing.images import IMAGE
from penstock.workloads.container.engine import ContainerEngine, ContainerSpec

Config = Callable[[tuple[str, ...]], dict[str, Any]]


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
            # Not /dev/null: crun would give the host's own to the container's user.
            input=b"",
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
    prefix += ["run", "--rm", "--network", "none", IMAGE]
    return Bare("podman run", prefix, {"CONTAINERS_CONF": str(folder / "containers.conf")})


class Bundle(Bare):
    """`runc run` of a bundle. `config` makes its config.json, given the command."""

    def __init__(self, program: str, folder: Path, config: Config) -> None:
        folder.mkdir()
        self._file, self._config = folder / "config.json", config
        self._written: tuple[str, ...] = ()
        prefix = [
            program,
            "run",
            "--bundle",
            str(folder),
            f"bare-{folder.name}-{os.getpid()}-{{n}}",
        ]
        if program == "crun" and (unified := _unified()):
            prefix = ["unshare", "-m", "sh", "-c", f'umount {unified}; exec "$@"', "sh", *prefix]
        super().__init__(f"{program} run", prefix, {})

    def run(self, *command: str) -> float:
        if self._written != command:
            self._file.write_text(json.dumps(self._config(command)))
            self._written = command
        return super().run()


def same(engine: ContainerEngine) -> Config:
    """The very container that ours would be, with its limits set by the runtime."""

    async def made(command: tuple[str, ...]) -> dict[str, Any]:
        image = await engine.image(IMAGE)
        plan = ContainerSpec(
            name=f"penstock-{os.getpid()}{len(command)}",
            image=image.id,
            cmd=command,
            memory=256 << 20,
            cpus=1,
            pids=128,
            tmp=64 << 20,
        )
        await engine.create(plan)
        config: dict[str, Any] = json.loads(bundle_of(engine, plan.name).read_text())
        await engine.remove(plan.name)
        await engine.close()  # the next one has another event loop
        config["linux"]["resources"] = LIMITS
        config["linux"].pop("cgroupsPath", None)
        return config

    return lambda command: asyncio.run(made(command))


def bundle_of(engine: ContainerEngine, name: str) -> Path:
    return Path(engine._root) / "live" / "run" / name / "config.json"  # type: ignore[attr-defined]


def example(program: str, tree: Path) -> Config:
    """The runtime's own example of a container, without rights and with limits: thinner walls
    than ours, with no filter of system calls and no init."""
    for name in ("dev", "proc", "sys"):
        (tree / name).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([program, "spec"], cwd=folder, check=True)
        spec: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    sets = ("bounding", "effective", "permitted", "inheritable", "ambient")
    spec["process"] |= {
        "terminal": False,
        "user": {"uid": 65534, "gid": 65534},
        "capabilities": {name: [] for name in sets},
        "noNewPrivileges": True,
        "rlimits": [],
    }
    spec["root"] = {"path": str(tree), "readonly": True}
    spec["linux"]["resources"] |= LIMITS

    def config(command: tuple[str, ...]) -> dict[str, Any]:
        spec["process"]["args"] = ["/bin/busybox", *command]
        return spec

    return config


LIMITS = {
    "memory": {"limit": 256 << 20, "swap": 256 << 20},
    "pids": {"limit": 128},
    "cpu": {"quota": 100_000, "period": 100_000},
}


def _unified() -> str:
    """Where cgroup v2 is mounted beside v1; crun wants only one of them."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2" and target != "/sys/fs/cgroup":
            return target
    return ""
