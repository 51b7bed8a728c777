"""The container worker beside the bare engines, on one machine in one run.

`python benchmarks/container.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import report
from contained import bare, ours
from harness import Benchmark, Experiment, Figures, Run
from tests.support.container_engines import private_docker, private_podman

from penstock.app.portal import new_event_loop
from penstock.testing.images import IMAGE, EngineMissing, busybox_tree
from penstock.workloads.container.engine import ContainerEngine
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.engines.oci.images import ImageStore

AT_ONCE = (1, 2, 4)
OURS = "beside its command"


class Side(NamedTuple):
    name: str
    bare: bare.Bare
    engine: Callable[[], ContainerEngine]
    faster: int
    """How many times more it is given to do."""
    example: bare.Bare | None = None
    """The runtime's own example of a container, which has thinner walls."""


def experiments(run: Run) -> Iterator[Experiment]:
    run.facts["engines"] = ", ".join(programs())
    for name in run.options.only:
        try:
            side = SIDES[name](run.folder, run.stack)
        except EngineMissing as missing:
            run.left_out(name, str(missing))
        else:
            yield Experiment(name, {OURS: lambda folder, side=side: measured(side, folder, run)})


# -- sides --------------------------------------------------------------------------


def docker(folder: Path, stack: ExitStack) -> Side:
    socket = stack.enter_context(private_docker(short(stack)))
    return Side("docker", bare.docker(socket), lambda: DockerEngine(socket), 1)


def podman(folder: Path, stack: ExitStack) -> Side:
    socket = stack.enter_context(private_podman(short(stack)))
    return Side("podman", bare.podman(socket), lambda: DockerEngine(socket), 1)


def runc(folder: Path, stack: ExitStack) -> Side:
    return bundles("runc", folder)


def crun(folder: Path, stack: ExitStack) -> Side:
    return bundles("crun", folder)


SIDES: dict[str, Callable[[Path, ExitStack], Side]] = {
    "docker": docker,
    "podman": podman,
    "runc": runc,
    "crun": crun,
}


def bundles(program: str, folder: Path) -> Side:
    tree, root = folder / f"{program}-tree", folder / f"{program}-oci"
    busybox_tree(tree)
    ImageStore(root / "images").import_tree(tree, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    engine = OciEngine(root, runtime=program)
    same = bare.Bundle(program, folder / f"{program}-same", bare.same(engine))
    example = bare.Bundle(program, folder / f"{program}-example", bare.example(program, tree))
    return Side(program, same, lambda: OciEngine(root, runtime=program), 4, example)


def short(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pb-")))


def measured(side: Side, folder: Path, run: Run) -> Figures:
    few = run.sized(25 * side.faster, 10 * side.faster, 3)
    many = run.sized(40 * side.faster, 12 * side.faster, 4)
    megabytes = run.sized(100, 100, 5)
    side.bare.run("true")
    figures = {"bare_ms": side.bare.one_by_one(few) * 1e3}
    if side.example is not None:
        side.example.run("true")
        figures["example_ms"] = side.example.one_by_one(few) * 1e3

    async def with_engine(work: Callable[[ContainerEngine], Any]) -> Any:
        engine = side.engine()
        try:
            return await work(engine)
        finally:
            await engine.close()

    def of_ours(work: Callable[[ContainerEngine], Any]) -> Any:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:  # as the command does
            return runner.run(with_engine(work))

    figures |= of_ours(lambda e: ours.one_by_one(e, folder / "one", few))
    for at_once in AT_ONCE:
        figures[f"bare_rate_{at_once}"] = side.bare.rate(many, at_once)
        figures[f"rate_{at_once}"] = of_ours(
            lambda e, n=at_once: ours.rate(e, folder / f"many-{n}", many, n)
        )
    figures["bare_output_s"] = side.bare.run("head", "-c", str(megabytes * 10**6), "/dev/zero")
    figures["output_s"] = of_ours(lambda e: ours.output(e, folder / "output", megabytes))
    return figures


def programs() -> Iterator[str]:
    for program in ("dockerd", "podman", "runc", "crun"):
        try:
            said = subprocess.run([program, "--version"], capture_output=True, text=True)
        except FileNotFoundError:
            continue
        yield said.stdout.splitlines()[0].split(",")[0]


# -- the page -----------------------------------------------------------------------


def page(everything: dict[str, Any]) -> str:
    results = {name: by[OURS] for name, by in everything["results"].items()}
    parts = ["One container after another (`true`):"]
    rows = [
        [
            name,
            f"{f['bare_ms']:.1f}",
            f"{f['run_ms']:.1f}",
            f"{f['run_ms'] / f['bare_ms']:.2f}x",
            f"{f['end_ms']:.1f}",
            report.shown(f.get("example_ms"), "{:.1f}"),
            f"{f['wait_p50_ms']:.2f}",
            f"{f['wait_p99_ms']:.2f}",
        ]
        for name, f in results.items()
    ]
    head = ["engine", "its command, ms", "ours, start to exit, ms", ""]
    head += ["ours, submission to recorded end, ms", "its example, ms"]
    head += ["queue wait p50, ms", "p99, ms"]
    parts += [report.table(head, rows), "Containers a second, so many at once:"]
    rows = [
        [
            name,
            *(f"{f[f'bare_rate_{n}']:.1f} / {f[f'rate_{n}']:.1f}" for n in AT_ONCE),
        ]
        for name, f in results.items()
    ]
    head = ["engine: its command / Penstock", *(f"{n} at once" for n in AT_ONCE)]
    parts += [
        report.table(head, rows),
        "100 MB of output (5 with `--tiny`), from the call to the end:",
    ]
    rows = [
        [
            name,
            f"{f['bare_output_s']:.2f}",
            f"{f['output_s']:.2f}",
            f"{f['output_s'] / f['bare_output_s']:.2f}x",
        ]
        for name, f in results.items()
    ]
    parts += [report.table(["engine", "its command, s", "Penstock, s", ""], rows)]
    return report.page(everything, goals(results), *parts)


GOALS = {"docker": 1.15, "podman": 1.15, "runc": 1.15, "crun": 1.1}
"""Start to exit, as a multiple of the engine's own command."""
FASTER = {"runc": 4, "crun": 6}
"""Containers a second, as a multiple of the Docker path."""
BEYOND_MS = 4
"""Between the end of a container and its record, with the submission before its start."""


def goals(results: dict[str, Any]) -> report.Goals:
    goals = report.Goals()
    for name, f in results.items():
        said = f"{name}: start to exit at most {GOALS[name]} times its own command"
        goals.at_most(said, f["run_ms"] / f["bare_ms"], GOALS[name])
    for name, f in results.items():
        said = f"{name}: submission to recorded end at most {BEYOND_MS} ms beyond start to exit"
        goals.at_most(said, f["end_ms"] - f["run_ms"], BEYOND_MS, "{:.1f} ms")
    for name, f in results.items():
        most = AT_ONCE[-1]
        said = f"{name}: {most} at once, at least 0.9 of the containers/s of its own command"
        goals.at_least(said, f[f"rate_{most}"] / f[f"bare_rate_{most}"], 0.9, "{:.2f}")
    for name, f in results.items():
        said = f"{name}: 100 MB of output in at most 1.15 times the time of its own command"
        goals.at_most(said, f["output_s"] / f["bare_output_s"], 1.15)
    for name, f in results.items():
        said = f"{name}: queue wait with a slot free, p99 under 20 ms"
        goals.at_most(said, f["wait_p99_ms"], 20, "{:.1f} ms")
    for name, times in FASTER.items():
        if name in results and "docker" in results:
            said = f"{name}: containers/s of the Docker path, one at a time: {times} times"
            ratio = results[name]["rate_1"] / results["docker"]["rate_1"]
            goals.at_least(said, ratio, times, "{:.1f}x")
    return goals


BENCHMARK = Benchmark(
    "container.py",
    "The container worker beside the bare engines.",
    tuple(SIDES),
    experiments,
    page,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
