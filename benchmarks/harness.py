"""What all benchmarks share: options, repeated measurements, the machine, and where figures go."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import report
from measure import busy_percent, flush_times, machine
from processes import HERE

Everything = dict[str, Any]
sys.path.append(str(HERE.parent))  # Engines and fakes that tests use are in tests/support.
MODEL = HERE.parent / ".models" / "SmolLM2-135M-Instruct.gguf"


@dataclass(frozen=True)
class Benchmark:
    """One script: what it can be asked, and how its figures become a page."""

    script: str
    about: str
    groups: Sequence[str]
    """What `--only` chooses from."""
    page: Callable[[Everything], str]
    repeats: int = 3
    """Of a whole run; a quick one measures once."""
    more: Sequence[str] = ()
    """Other names that `--only` takes."""
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of its own, by name, as argparse takes them."""

    def main(self, measure: Callable[[Run], dict[str, Any] | None]) -> int:
        """Measure, and publish what was found. `measure` returns None if it can't."""
        run = Run(self, self.parse(sys.argv[1:]))
        began = time.monotonic()
        look()
        results = measure(run)
        if results is None:
            return 1
        tell(f"took {time.monotonic() - began:.0f} s")
        everything = {
            "command": self.command(run.options),
            "date": time.strftime("%Y-%m-%d"),
            "machine": {**machine(), **disk(run.options.folder), **run.facts, **_quietness()},
            "notes": list(dict.fromkeys(run.notes)),
            **run.more,
            "results": results,
        }
        self._publish(everything, run.options, keep=not run.failed)
        return 1 if run.failed else 0

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.about)
        sizes = parser.add_mutually_exclusive_group()
        sizes.add_argument("--quick", action="store_true", help="small sizes: a few minutes")
        sizes.add_argument("--tiny", action="store_true", help="only to see that it runs")
        parser.add_argument(
            "--only",
            type=_some_of((*self.groups, *self.more)),
            default=self.groups,
            metavar="A,B",
            help=f"of: {', '.join((*self.groups, *self.more))}",
        )
        parser.add_argument("--repeats", type=int, metavar="N", help="medians of so many runs")
        parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
        parser.add_argument("--write", type=Path, metavar="PAGE", help="renew a page's figures")
        parser.add_argument("--folder", type=Path, metavar="DIR", help="the disk to measure")
        for name, how in self.arguments.items():
            parser.add_argument(name, **how)
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
        return " ".join(words)

    def _publish(self, everything: Everything, options: argparse.Namespace, *, keep: bool) -> None:
        figures = self.page(everything)
        print(figures)
        if options.json:
            options.json.write_text(json.dumps(everything, indent=1))
        if options.write and keep:  # a page shows only runs in which everything was right
            options.write.write_text(report.rewritten(options.write.read_text(), figures))


class Run:
    """One run of a benchmark, while it measures."""

    def __init__(self, benchmark: Benchmark, options: argparse.Namespace) -> None:
        self.options = options
        self.notes: list[str] = []
        self.failed: list[str] = []
        self.facts: dict[str, str] = {}
        """What a reader should know besides the machine."""
        self.more: dict[str, Any] = {}
        """What else to keep with the figures."""
        once = options.quick or options.tiny
        self.repeats: int = options.repeats or (1 if once else benchmark.repeats)

    @property
    def size(self) -> str:
        return "tiny" if self.options.tiny else "quick" if self.options.quick else "whole"

    def sized(self, whole: Any, quick: Any, tiny: Any) -> Any:
        return {"whole": whole, "quick": quick, "tiny": tiny}[self.size]


Figures = dict[str, Any]
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


def medians(runs: Sequence[Figures]) -> Figures:
    """The median of each figure over the runs that have it."""
    names = dict.fromkeys(name for figures in runs for name in figures)
    gathered = {
        name: [value for figures in runs if (value := figures.get(name)) is not None]
        for name in names
    }
    return {name: median(values) if values else None for name, values in gathered.items()}


def from_process(
    script: str, *arguments: str, timeout: float = 1200.0, **environment: str
) -> Figures:
    """The figures that a script prints as JSON, in a process of its own. Raises
    CalledProcessError or TimeoutExpired."""
    said = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        cwd=HERE,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": _path(), **environment},
        check=True,
    )
    figures: Figures = json.loads(said.stdout.splitlines()[-1])
    return figures


def _path() -> str:
    found = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (str(HERE), str(HERE.parent), found)))


def disk(folder: Path | None) -> dict[str, str]:
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
