"""The container worker beside the bare engines, on one machine in one run.

`python benchmarks/container.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness import Benchmark, Experiment, Figures, Measure, Run, new_event_loop
from processes import percentile
from report import Goal, by_figure, judged
from report import page as paged
from tests.support.container_engines import private_docker, private_podman

from penstock.api.container.facade import ContainerFacade
from penstock.app.container_worker import container_worker
from penstock.config import Settings
from penstock.testing.images import IMAGE, EngineMissing, busybox_tree
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import ContainerEngine, ContainerSpec
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.engines.oci.images import ImageStore

AT_ONCE = (1, 2, 4)
PENSTOCK, COMMAND, EXAMPLE = "penstock", "command", "example"
TITLES = {PENSTOCK: "Penstock", COMMAND: "its command", EXAMPLE: "its example"}
ENGINES = ("docker", "podman", "runc", "crun")
SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Of a whole, a quick and a tiny run; the runtimes alone are given four times as many.
    "few": (25, 10, 1),
    "many": (40, 12, 1),
    "megabytes": (100, 100, 5),
}


def experiments(run: Run) -> Iterator[Experiment]:
    run.facts["engines"] = ", ".join(programs())
    plan = run.plan(SIZES)
    for name in run.options.only:
        try:
            tried = start(name, run.folder, run.stack)
        except EngineMissing as missing:
            run.left_out(name, str(missing))
            continue
        more = 4 if name in ("runc", "crun") else 1
        sizes = {"few": more * plan.few, "many": more * plan.many, "megabytes": plan.megabytes}
        sides: dict[str, Measure] = {
            COMMAND: lambda _, one=tried.command, sizes=sizes: by_command(one, **sizes),
            PENSTOCK: lambda folder, make=tried.engine, sizes=sizes: ours(make, folder, **sizes),
        }
        if tried.example is not None:
            few = sizes["few"]
            sides[EXAMPLE] = lambda _, one=tried.example, few=few: one_by_one(one, few)
        yield Experiment(name, sides)


def programs() -> Iterator[str]:
    for program in ("dockerd", "podman", "runc", "crun"):
        if shutil.which(program):
            said = subprocess.run([program, "--version"], capture_output=True, text=True)
            yield said.stdout.splitlines()[0].split(",")[0]


# -- engines ----------------------------------------------------------------------------

Command = Callable[..., float]
"""Runs one container with these words as its command; seconds from the start to the end."""


class Tried(NamedTuple):
    command: Command
    engine: Callable[[], ContainerEngine]
    example: Command | None = None
    """The runtime's own example of a container, which has thinner walls."""


def start(name: str, folder: Path, stack: ExitStack) -> Tried:
    """A private engine of the run's own, state in memory; or the runtime alone."""
    if name in ("runc", "crun"):
        return of_runtime(name, folder)
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pb-")))
    run = ["run", "--rm", "--network", "none", IMAGE]
    if name == "docker":
        socket = stack.enter_context(private_docker(home))
        argv = [shutil.which("docker") or "docker", "-H", f"unix://{socket}", *run]
        return Tried(lambda *words: timed([*argv, *words]), lambda: DockerEngine(socket))
    socket = stack.enter_context(private_podman(home))
    folder, state = socket.parent, socket.parent / "t"
    # In the namespaces of the service, where its images are.
    argv = ["nsenter", "-t", (folder / "pid").read_text(), "-m", "-n", "podman"]
    argv += ["--root", f"{state}/root", "--runroot", f"{state}/run", "--tmpdir", f"{state}/tmp"]
    argv += ["--cgroup-manager=cgroupfs", "--events-backend=file", *run]
    settings = {"CONTAINERS_CONF": str(folder / "containers.conf")}
    return Tried(lambda *words: timed([*argv, *words], settings), lambda: DockerEngine(socket))


def timed(argv: list[str], environment: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    # No input, but not /dev/null: crun would give the host's own to the container's user.
    env = {**os.environ, **(environment or {})}
    subprocess.run(argv, check=True, input=b"", stdout=subprocess.DEVNULL, env=env)
    return time.perf_counter() - began


def of_runtime(program: str, folder: Path) -> Tried:
    tree, root = folder / f"{program}-tree", folder / f"{program}-oci"
    busybox_tree(tree)
    ImageStore(root / "images").import_tree(tree, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    engine = OciEngine(root, runtime=program)
    return Tried(
        Bundle(program, folder / f"{program}-same", lambda words: same(engine, words)),
        lambda: OciEngine(root, runtime=program),
        Bundle(program, folder / f"{program}-example", example(program, tree)),
    )


Config = Callable[[tuple[str, ...]], dict[str, Any]]
"""What makes a bundle's config.json, given the command."""


class Bundle:
    """`runc run` of a bundle."""

    def __init__(self, program: str, folder: Path, config: Config) -> None:
        folder.mkdir()
        self._file, self._config = folder / "config.json", config
        self._written: tuple[str, ...] = ()
        self._count = 0
        self._argv = [program, "run", "--bundle", str(folder)]
        if program == "crun" and (unified := beside_cgroup_v1()):
            umount = f'umount {unified}; exec "$@"'
            self._argv = ["unshare", "-m", "sh", "-c", umount, "sh", *self._argv]

    def __call__(self, *words: str) -> float:
        if self._written != words:
            self._file.write_text(json.dumps(self._config(words)))
            self._written = words
        self._count += 1
        return timed([*self._argv, f"{self._file.parent.name}-{os.getpid()}-{self._count}"])


LIMITS = {
    "memory": {"limit": 256 << 20, "swap": 256 << 20},
    "pids": {"limit": 128},
    "cpu": {"quota": 100_000, "period": 100_000},
}


def same(engine: OciEngine, words: tuple[str, ...]) -> dict[str, Any]:
    """The very container that ours would be, with its limits set by the runtime."""
    name = f"penstock-{os.getpid()}{len(words)}"

    async def made() -> dict[str, Any]:
        image = (await engine.image(IMAGE)).id
        limits = {"memory": 256 << 20, "cpus": 1, "pids": 128, "tmp": 64 << 20}
        await engine.create(ContainerSpec(name=name, image=image, cmd=words, **limits))
        file = Path(engine._root) / "live" / "run" / name / "config.json"
        config: dict[str, Any] = json.loads(file.read_text())
        await engine.remove(name)
        await engine.close()  # the next one has another event loop
        return config

    config = asyncio.run(made())
    config["linux"]["resources"] = LIMITS
    config["linux"].pop("cgroupsPath", None)
    return config


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
    return lambda words: {
        **spec,
        "process": {**spec["process"], "args": ["/bin/busybox", *words]},
    }


def beside_cgroup_v1() -> str:
    """Where cgroup v2 is mounted beside v1; crun wants only one of them."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2" and target != "/sys/fs/cgroup":
            return target
    return ""


# -- measuring --------------------------------------------------------------------------


def loud(megabytes: int) -> tuple[str, ...]:
    return "head", "-c", str(megabytes * 10**6), "/dev/zero"


def one_by_one(run: Command, count: int) -> Figures:
    run("true")
    return {"run_ms": median(run("true") for _ in range(count)) * 1e3}


def by_command(run: Command, *, few: int, many: int, megabytes: int) -> Figures:
    figures = one_by_one(run, few)
    for at_once in AT_ONCE:
        began = time.perf_counter()
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda _: run("true"), range(many)))
        figures[f"rate_{at_once}"] = many / (time.perf_counter() - began)
    return {**figures, "output_s": run(*loud(megabytes))}


def ours(
    make: Callable[[], ContainerEngine], folder: Path, *, few: int, many: int, megabytes: int
) -> Figures:
    """Our worker: the same containers, with queue, records, limits and output."""

    def with_worker(at_once: int, work: Callable[[ContainerFacade], Awaitable[Any]]) -> Any:
        async def do() -> Any:
            engine = make()
            try:
                place = Path(tempfile.mkdtemp(dir=folder))
                async with worker(engine, place, at_once) as one:
                    await ended(one, "warm", "true")
                    return await work(one)
            finally:
                await engine.close()

        with asyncio.Runner(loop_factory=new_event_loop) as runner:  # as the command does
            return runner.run(do())

    async def each(one: ContainerFacade) -> Figures:
        times = [await ended(one, f"one-{n}", "true") for n in range(few)]
        jobs = [found.job for n in range(few) if (found := await one.get(f"one-{n}"))]
        # `started_at` is when the engine heard of it; the worker has measured the run itself.
        runs = median(job.result.execution_ms for job in jobs if job.result)
        waits = [job.started_at - job.accepted_at for job in jobs if job.started_at]
        assert len(waits) == few
        return {
            "run_ms": runs,
            "end_ms": median(times) * 1e3,
            "beyond_ms": median(times) * 1e3 - runs,
            "wait_p50_ms": median(waits) * 1e3,
            "wait_p99_ms": percentile(waits, 0.99) * 1e3,
        }

    async def all_at_once(one: ContainerFacade) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(ended(one, f"many-{n}", "true") for n in range(many)))
        return many / (time.perf_counter() - began)

    figures: Figures = with_worker(2, each)
    for at_once in AT_ONCE:
        figures[f"rate_{at_once}"] = with_worker(at_once, all_at_once)
    figures["output_s"] = with_worker(1, lambda one: ended(one, "loud", *loud(megabytes)))
    return figures


@asynccontextmanager
async def worker(
    engine: ContainerEngine, folder: Path, at_once: int
) -> AsyncIterator[ContainerFacade]:
    room = {"max_concurrent_jobs": at_once, "cpus": 64, "memory_mb": 16_000}
    config = WorkerConfig(port=0, jobs_dir=folder / "containers", **room)
    async with container_worker(config, Settings(data_dir=folder), engine) as (facade, _):
        yield facade


async def ended(one: ContainerFacade, number: str, *command: str) -> float:
    """Seconds from submission to a record that says finished."""
    runtime = {"mode": "image", "image": IMAGE, "cmd": list(command)}
    job = {"protocol_version": 1, "job_id": number, "runtime": runtime}
    began = time.perf_counter()
    await one.submit(json.dumps(job).encode())
    record = await one.wait(number, 120)
    assert record is not None
    assert record.state == "finished", record
    return time.perf_counter() - began


# -- the page ---------------------------------------------------------------------------

ROWS = {name: name for name in ENGINES}
ONE = {
    "its command, ms": (f"run_ms @{COMMAND}", "{:.1f}"),
    "ours, start to exit, ms": ("run_ms", "{:.1f}"),
    "ratio": (f"run_ms/run_ms @{COMMAND}", "{:.2f}x"),
    "ours, submission to recorded end, ms": ("end_ms", "{:.1f}"),
    "its example, ms": (f"run_ms @{EXAMPLE}", "{:.1f}"),
    "queue wait p50, ms": ("wait_p50_ms", "{:.2f}"),
    "p99, ms": ("wait_p99_ms", "{:.2f}"),
}
RATES = {
    f"{n} at once{whose}": (f"rate_{n}{side}", "{:.1f}")
    for n in AT_ONCE
    for whose, side in ((", its command", f" @{COMMAND}"), (", Penstock", ""))
}
OUTPUT = {
    "its command, s": (f"output_s @{COMMAND}", "{:.2f}"),
    "Penstock, s": ("output_s", "{:.2f}"),
    "ratio": (f"output_s/output_s @{COMMAND}", "{:.2f}x"),
}
OVERHEAD = {"docker": 1.15, "podman": 1.15, "runc": 1.15, "crun": 1.1}
"""Start to exit, as a multiple of the engine's own command."""
FASTER = {"runc": 4, "crun": 6}
"""Containers a second, as a multiple of the Docker path."""


def page(everything: dict[str, Any]) -> str:
    results, loudness = everything["results"], everything["plan"]["megabytes"]
    return paged(
        everything,
        judged(goals(loudness), results, TITLES),
        by_figure(results, ROWS, ONE, "one container after another (`true`)"),
        by_figure(results, ROWS, RATES, "containers a second"),
        by_figure(results, ROWS, OUTPUT, f"{loudness} MB of output, from the call to the end"),
    )


def goals(megabytes: int) -> Iterator[Goal]:
    for name in ENGINES:
        ms, command = "{:.1f} ms", f"@{COMMAND}"
        figure = f"{name} run_ms"
        work = f"{name}: start to exit"
        yield Goal(work, figure, f"{figure} {command}", most=OVERHEAD[name], form=ms)
        work = f"{name}: submission to recorded end, beyond start to exit"
        yield Goal(work, f"{name} beyond_ms", most=4, form=ms)
        work, figure = f"{name}: {AT_ONCE[-1]} at once", f"{name} rate_{AT_ONCE[-1]}"
        yield Goal(work, figure, f"{figure} {command}", least=0.9, form="{:.1f}/s")
        work, figure = f"{name}: {megabytes} MB of output", f"{name} output_s"
        yield Goal(work, figure, f"{figure} {command}", most=1.15, form="{:.2f} s")
        work = f"{name}: queue wait with a slot free, p99"
        yield Goal(work, f"{name} wait_p99_ms", most=20, form=ms)
    for name, least in FASTER.items():
        work, rate = f"{name}: one at a time, beside the Docker path", "docker rate_1"
        yield Goal(work, f"{name} rate_1", rate, least=least, form="{:.1f}/s", peer="docker")


BENCHMARK = Benchmark(
    "container.py",
    "The container worker beside the bare engines.",
    ENGINES,
    experiments,
    page,
    titles=TITLES,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
