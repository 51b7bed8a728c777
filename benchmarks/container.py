"""The container worker beside the bare engines, on one machine in one run.

`python benchmarks/container.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import report
from contained import bare, ours
from measure import busy_percent, flush_times, machine
from options import add_options, command, publish, tell, verdict
from run import scratch

from penstock.testing.engines import (
    IMAGE,
    EngineMissing,
    busybox_tree,
    private_docker,
    private_podman,
)
from penstock.workloads.container.engine import ContainerEngine
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.engine import OciEngine
from penstock.workloads.container.engines.oci.images import ImageStore

GROUPS = ("docker", "podman", "runc", "crun")
AT_ONCE = (1, 2, 4)


class Side(NamedTuple):
    name: str
    bare: bare.Bare
    engine: Callable[[], ContainerEngine]
    faster: int
    """How many times more it is given to do."""
    example: bare.Bare | None = None
    """The runtime's own example of a container, which has thinner walls."""


def main() -> int:
    options = parse(sys.argv[1:])
    began, notes = time.monotonic(), list[str]()
    busy = [busy_percent()]
    with scratch(options.folder) as folder, ExitStack() as stack:
        sides = []
        for name in options.only:
            try:
                sides.append(SIDES[name](folder, stack))
            except EngineMissing as missing:
                notes.append(f"{name} was left out: {missing}")
        runs: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
        for turn in range(options.repeats or (1 if options.quick or options.tiny else 3)):
            for side in sides:
                busy.append(busy_percent())
                tell(f"{side.name} ({turn + 1})")
                runs[side.name].append(measured(side, folder / f"{side.name}-{turn}", options))
        flush = median(flush_times(folder)) * 1e3
    results = {
        name: {key: median(run[key] for run in several) for key in several[0]}
        for name, several in runs.items()
    }
    everything = {
        "command": command("container.py", GROUPS, options),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            **machine(),
            "disk": f"4 KiB appended and flushed in {flush:.2f} ms (median)",
            "engines": ", ".join(versions()),
            "others": f"kept the cores {median(busy):.0f}% busy (median), at most {max(busy):.0f}%",
        },
        "results": results,
        "notes": notes,
    }
    tell(f"took {time.monotonic() - began:.0f} s")
    publish(everything, page(everything), options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The container worker beside the bare engines.")
    parser.add_argument("--quick", action="store_true", help="fewer containers: a minute or two")
    parser.add_argument("--tiny", action="store_true", help="a few, to see that it works")
    add_options(parser, GROUPS)
    return parser.parse_args(arguments)


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


def measured(side: Side, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    few = 3 if options.tiny else (10 if options.quick else 25) * side.faster
    many = 4 if options.tiny else (12 if options.quick else 40) * side.faster
    megabytes = 5 if options.tiny else 100
    folder.mkdir()
    side.bare.run("true")
    figures = {"bare_ms": side.bare.one_by_one(few) * 1e3}
    if side.example is not None:
        side.example.run("true")
        figures["example_ms"] = side.example.one_by_one(few) * 1e3

    async def of_ours(work: Callable[[ContainerEngine], Any]) -> Any:
        engine = side.engine()
        try:
            return await work(engine)
        finally:
            await engine.close()

    figures |= asyncio.run(of_ours(lambda e: ours.one_by_one(e, folder / "one", few)))
    for at_once in AT_ONCE:
        figures[f"bare_rate_{at_once}"] = side.bare.rate(many, at_once)
        figures[f"rate_{at_once}"] = asyncio.run(
            of_ours(lambda e, n=at_once: ours.rate(e, folder / f"many-{n}", many, n))
        )
    figures["bare_output_s"] = side.bare.run("head", "-c", str(megabytes * 10**6), "/dev/zero")
    figures["output_s"] = asyncio.run(
        of_ours(lambda e: ours.output(e, folder / "output", megabytes))
    )
    return figures


def versions() -> Iterator[str]:
    for program in ("dockerd", "podman", "runc", "crun"):
        try:
            said = subprocess.run([program, "--version"], capture_output=True, text=True)
        except FileNotFoundError:
            continue
        yield said.stdout.splitlines()[0].split(",")[0]


# -- the page -----------------------------------------------------------------------


def page(everything: dict[str, Any]) -> str:
    results = everything["results"]
    parts = [*report.origin(everything), targets(results)]
    parts += ["One container after another (`true`):"]
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
    parts += [f"- {note}" for note in everything["notes"]]
    return "\n\n".join(parts)


GOALS = {"docker": 1.15, "podman": 1.15, "runc": 1.15, "crun": 1.1}
"""Start to exit, as a multiple of the engine's own command."""
FASTER = {"runc": 4, "crun": 6}
"""Containers a second, as a multiple of the Docker path."""
BEYOND_MS = 4
"""Between the end of a container and its record, with the submission before its start."""


def targets(results: dict[str, Any]) -> str:
    rows = []
    for name, f in results.items():
        ratio, goal = f["run_ms"] / f["bare_ms"], GOALS[name]
        said = f"{name}: start to exit at most {goal} times its own command"
        rows.append([said, f"{ratio:.2f}x", verdict(ratio <= goal)])
    for name, f in results.items():
        beyond = f["end_ms"] - f["run_ms"]
        said = f"{name}: submission to recorded end at most {BEYOND_MS} ms beyond start to exit"
        rows.append([said, f"{beyond:.1f} ms", verdict(beyond <= BEYOND_MS)])
    for name, f in results.items():
        most = AT_ONCE[-1]
        ratio = f[f"rate_{most}"] / f[f"bare_rate_{most}"]
        said = f"{name}: {most} at once, at least 0.9 of the containers/s of its own command"
        rows.append([said, f"{ratio:.2f}", verdict(ratio >= 0.9)])
    for name, f in results.items():
        ratio = f["output_s"] / f["bare_output_s"]
        said = f"{name}: 100 MB of output in at most 1.15 times the time of its own command"
        rows.append([said, f"{ratio:.2f}x", verdict(ratio <= 1.15)])
    for name, f in results.items():
        said = f"{name}: queue wait with a slot free, p99 under 20 ms"
        rows.append([said, f"{f['wait_p99_ms']:.1f} ms", verdict(f["wait_p99_ms"] < 20)])
    for name, goal in FASTER.items():
        if name in results and "docker" in results:
            ratio = results[name]["rate_1"] / results["docker"]["rate_1"]
            said = f"{name}: containers/s of the Docker path, one at a time: {goal} times"
            rows.append([said, f"{ratio:.1f}x", verdict(ratio >= goal)])
    return report.table(["to reach", "figure", ""], rows) if rows else ""


if __name__ == "__main__":
    sys.exit(main())
