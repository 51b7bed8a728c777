"""The harness of all benchmarks.

A benchmark declares its experiments: a name, and for each side what measures it. The harness reads
the options, lets the sides take turns, runs measurements in processes, and makes the page.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import IO, Any

import report
from marks import Marks
from processes import HERE, PATH, busy_percent, flush_times, kill, machine

Figures = dict[str, Any]
Measure = Callable[[Path], Figures]
"""Takes one measurement; it has the folder to itself."""
MODEL = HERE.parent / ".models" / "SmolLM2-135M-Instruct.gguf"
_TOO_LONG = 1200.0
sys.path.append(str(HERE.parent))  # Engines and fakes that tests use are in tests/support.


class MeasurementFailed(Exception):
    pass


@dataclass(frozen=True)
class Experiment:
    """One workload and the sides that do it; their figures stand under its name."""

    name: str
    sides: Mapping[str, Measure]
    group: str = ""
    """What `--only` chooses it by, besides its name."""
    once: bool | Collection[str] = False
    """Measured in the first turn only: all of it, or these sides."""


@dataclass(frozen=True)
class Benchmark:
    """One script: what it can be asked, what it measures, and how its figures become a page."""

    script: str
    about: str
    groups: Sequence[str]
    """What `--only` chooses from."""
    experiments: Callable[[Run], Iterable[Experiment]]
    page: Callable[[Figures], str]
    repeats: int = 3
    """Of a whole run; a quick one measures once."""
    names: Sequence[str] = ()
    """Names of single experiments that `--only` takes."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Of the sides, where they are not called by their names."""
    peers: Collection[str] = ()
    """Sides that may be missing or fail: it is noted. If another fails, the run has failed."""
    missing: Callable[[str], str | None] = lambda _: None
    """Why a peer can't be measured here, if so."""
    arguments: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Options of its own, by name, as argparse takes them."""

    def main(self) -> int:
        """Measure, and publish what was found."""
        began = time.monotonic()
        look()
        with scratch((options := self.parse(sys.argv[1:])).folder) as folder, ExitStack() as stack:
            run = Run(self, options, folder, stack)
            results = run.measure(self.experiments(run))
        tell(f"took {time.monotonic() - began:.0f} s")
        everything = {
            "command": self.command(options),
            "date": time.strftime("%Y-%m-%d"),
            "machine": {**machine(), **_disk(options.folder), **run.facts, **_quietness()},
            "notes": list(dict.fromkeys(run.notes)),
            **run.more,
            "results": results,
        }
        print(figures := self.page(everything))
        if options.json:
            options.json.write_text(json.dumps(everything, indent=1))
        if options.write and not run.failed:  # a page shows only runs in which all was right
            options.write.write_text(report.rewritten(options.write.read_text(), figures))
        return 1 if run.failed else 0

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.about)
        sizes = parser.add_mutually_exclusive_group()
        sizes.add_argument("--quick", action="store_true", help="small sizes: a few minutes")
        sizes.add_argument("--tiny", action="store_true", help="only to see that it runs")
        names = (*self.groups, *self.names)
        parser.add_argument(
            "--only",
            type=_some_of(names),
            default=self.groups,
            metavar="A,B",
            help=f"of: {', '.join(names)}",
        )
        parser.add_argument("--repeats", type=int, metavar="N", help="medians of so many runs")
        parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
        parser.add_argument("--write", type=Path, metavar="PAGE", help="renew a page's figures")
        parser.add_argument("--folder", type=Path, metavar="DIR", help="the disk to measure")
        for name, how in self.arguments.items():
            parser.add_argument(name, **how)
        parser.set_defaults(no_peers=False)
        if self.peers:
            parser.add_argument("--no-peers", action="store_true", help="Penstock alone")
        return parser.parse_args(arguments)

    def command(self, options: argparse.Namespace) -> str:
        """What makes the same figures again; without the paths of this machine."""
        words = ["python", f"benchmarks/{self.script}"]
        words += ["--quick"] if options.quick else ["--tiny"] if options.tiny else []
        words += [] if options.only == self.groups else ["--only", ",".join(options.only)]
        words += ["--repeats", str(options.repeats)] if options.repeats else []
        for name in self.arguments:
            value = getattr(options, name.lstrip("-").replace("-", "_"))
            if value is True or (isinstance(value, int) and value):
                words += [name] if value is True else [name, str(value)]
            elif isinstance(value, str):
                words += [name, self.arguments[name]["metavar"]]
        words += ["--no-peers"] if options.no_peers else []
        return " ".join(words)


class Run:
    """One run of a benchmark, while it measures."""

    def __init__(
        self, benchmark: Benchmark, options: argparse.Namespace, folder: Path, stack: ExitStack
    ) -> None:
        self.options, self.folder, self.stack = options, folder, stack
        self.notes: list[str] = []
        self.failed: list[str] = []
        self.facts: dict[str, str] = {}
        """What a reader should know besides the machine."""
        self.more: dict[str, Any] = {}
        """What else to keep with the figures."""
        once = options.quick or options.tiny
        self.repeats: int = options.repeats or (1 if once else benchmark.repeats)
        self._benchmark = benchmark
        self._peers: dict[str, bool] = {}

    @property
    def size(self) -> str:
        return "tiny" if self.options.tiny else "quick" if self.options.quick else "whole"

    def sized(self, whole: Any, quick: Any, tiny: Any) -> Any:
        return {"whole": whole, "quick": quick, "tiny": tiny}[self.size]

    def plan(self, sizes: Mapping[str, tuple[Any, Any, Any]]) -> SimpleNamespace:
        """The sizes of this run, of those of a whole, a quick and a tiny one; kept with the
        figures."""
        self.more["plan"] = {name: self.sized(*each) for name, each in sizes.items()}
        return SimpleNamespace(**self.more["plan"])

    def left_out(self, what: str, why: str) -> None:
        self.notes.append(f"{what} was left out: {why}")

    def wants(self, *names: str) -> bool:
        return bool({*names} & {*self.options.only})

    def can(self, side: str) -> bool:
        """Whether to measure a side; what a peer lacks here is noted."""
        if side not in self._benchmark.peers:
            return True
        if side not in self._peers:
            why = None if self.options.no_peers else self._benchmark.missing(side)
            if why is not None:
                self.left_out(self._benchmark.titles.get(side, side), why)
            self._peers[side] = why is None and not self.options.no_peers
        return self._peers[side]

    def measure(self, experiments: Iterable[Experiment]) -> dict[str, dict[str, Figures]]:
        """Medians by experiment and side. Sides take turns, so that a bad moment is everybody's."""
        results: dict[str, dict[str, Figures]] = {}
        for experiment in experiments:
            if not self.wants(experiment.name, experiment.group):
                continue
            runs: dict[str, list[Figures]] = {}
            sides = {side: one for side, one in experiment.sides.items() if self.can(side)}
            for turn in range(1 if experiment.once is True else self.repeats):
                for side, measure in sides.items():
                    if turn and experiment.once and side in experiment.once:
                        continue
                    look(f"{experiment.name}: {self._benchmark.titles.get(side, side)}", turn)
                    with scratch(self.options.folder) as folder:
                        try:
                            figures = measure(folder)
                        except (MeasurementFailed, AssertionError) as error:
                            self._failed(experiment.name, side, error)
                        else:
                            runs.setdefault(side, []).append(figures)
            if {*experiment.sides} <= {*runs, *self._benchmark.peers}:  # else ours has no figures
                results[experiment.name] = {side: medians(found) for side, found in runs.items()}
        return results

    def _failed(self, name: str, side: str, error: Exception) -> None:
        """Note it, which fails the run if it was not a peer; the rest is measured all the same."""
        tell(str(error))
        if side in self._benchmark.peers:
            self.notes.append(f"{self._benchmark.titles.get(side, side)} failed at {name}")
            return
        self.failed.append(name)
        self.notes.append(f"**Penstock failed at {name}**: {str(error).splitlines()[-1]}")


# -- processes ----------------------------------------------------------------------


def call(
    function: str,
    *arguments: Any,
    timeout: float = _TOO_LONG,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    **options: Any,
) -> Any:
    """What `module:function` returns, in a process of its own; a coroutine is run to its end.

    A process each, so that no side carries another's memory or leaves anything behind for the
    next. Raises MeasurementFailed with what the process said.
    """
    marks = Marks.fresh()
    environment = {**marks.environment, **(environment or {})}
    child = _start("", environment, python, stderr=subprocess.PIPE)
    try:
        said, complaint = child.communicate(_task(function, arguments, options), timeout)
    except BaseException as error:
        child.terminate()  # it ends its own workers, which a kill would leave behind
        said, complaint = child.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        complaint += f"\ntook more than {timeout:.0f} s".encode()
    finally:
        marks.close()
    if child.returncode != 0:
        last = complaint.decode().strip().splitlines()[-12:]
        raise MeasurementFailed(f"{function}\n" + "\n".join(last))
    return json.loads(said.splitlines()[-1])


def measured(function: str, *arguments: Any, **options: Any) -> Measure:
    """A side whose measurement is such a call, with its folder as the first argument."""
    return lambda folder: call(function, folder, *arguments, **options)


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[bytes]
    told: Any
    """What it said when it was ready."""
    output: IO[bytes]
    """What it says from then on."""

    @property
    def pid(self) -> int:
        return self.process.pid


@contextmanager
def serving(
    function: str,
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Iterator[Server]:
    """A server: `module:function` returns an asynchronous context manager, which another process
    enters, and leaves when the server is to end (or when this process does). It may be killed."""
    process = _start("stay=True", environment or {}, start_new_session=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(_task(function, arguments, options))
        process.stdin.flush()
        if not (line := process.stdout.readline()):
            raise MeasurementFailed(f"{function} ended with {process.wait()} and was not ready")
        yield Server(process, json.loads(line), process.stdout)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            tell(f"{function} did not end by itself")
        kill(process)
        process.stdout.close()


def _start(
    how: str, environment: Mapping[str, str], python: str = sys.executable, **more: Any
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [python, "-c", f"import harness; harness.child({how})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATH, **environment},
        **more,
    )


def _task(function: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bytes:
    wanted = [function, arguments, options]
    return json.dumps(wanted, default=lambda path: {"path": str(path)}).encode() + b"\n"


def child(*, stay: bool = False) -> None:
    """The other end of `call` and `serving`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwind, so that nothing is left
    function, arguments, options = json.loads(
        sys.stdin.readline(),
        object_hook=lambda found: Path(found["path"]) if [*found] == ["path"] else found,
    )
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)(*arguments, **options)
    if stay:
        from penstock.app.service import run_service

        run_service(_stay(found))
    else:
        if inspect.iscoroutine(found):
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                found = runner.run(found)
        print(json.dumps(found), flush=True)
    atexit._run_exitfuncs()
    os._exit(0)  # llama.cpp takes its time to clear up


def new_event_loop() -> asyncio.AbstractEventLoop:
    """What 'penstock up' runs on; every side has the same."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _stay(server: Any) -> None:
    """Until whoever started it closes its input, or ends."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    async with server as told:
        print(json.dumps(told), flush=True)
        loop.add_reader(sys.stdin.fileno(), over.set)
        await over.wait()
        loop.remove_reader(sys.stdin.fileno())


@contextmanager
def scratch(root: Path | None) -> Iterator[Path]:
    """A folder for one measurement; its path is short, for a socket's sake."""
    folder = Path(tempfile.mkdtemp(prefix="pb-", dir=root)).absolute()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- figures ------------------------------------------------------------------------


def medians(runs: Sequence[Figures]) -> Figures:
    """The median of each figure that is a number, over the runs that have it."""
    numbers: dict[str, list[float]] = {}
    for figures in runs:
        for name, value in figures.items():
            if value is None or isinstance(value, int | float):
                numbers.setdefault(name, []).extend([] if value is None else [value])
    return {name: median(values) if values else None for name, values in numbers.items()}


_busy: list[float] = []
"""How busy others kept the machine just before each measurement, in percent."""


def look(what: str = "", turn: int = 0) -> None:
    """Note how busy others keep the machine, and tell what is measured next."""
    _busy.append(busy_percent())
    if what:
        tell(what + (f" ({turn + 1})" if turn else ""))


def _quietness() -> dict[str, str]:
    """Whether this run had the machine to itself."""
    usual, most = median(_busy), max(_busy)
    return {"others": f"kept the cores {usual:.0f}% busy (median), at most {most:.0f}%"}


def _disk(folder: Path | None) -> dict[str, str]:
    flush = median(flush_times(folder or Path(tempfile.gettempdir()))) * 1e3
    return {"disk": f"4 KiB appended and flushed in {flush:.2f} ms (median)"}


def versions(*names: str) -> Iterator[str]:
    """Those packages that are installed."""
    for name in names:
        if importlib.util.find_spec(name) is not None:
            yield f"{name} {importlib.metadata.version(name)}"


def _some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads a list with commas; each must be one of the names."""

    def read(text: str) -> tuple[str, ...]:
        chosen = tuple(text.split(","))
        if unknown := set(chosen) - set(names):
            raise argparse.ArgumentTypeError(f"nothing is called {', '.join(sorted(unknown))}")
        return chosen

    return read


def tell(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)
