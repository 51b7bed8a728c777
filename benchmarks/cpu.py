"""Where the processor time of a drain goes, in the engine and in its worker process.

python benchmarks/cpu.py [drain|in-process|submit] [--jobs N] [--top N] [--topic TOPIC]

A sampling profiler: the kernel sends SIGPROF after each millisecond of processor time, and the
handler gives what each thread has used since the last sample to the stack that the thread has now.
So time in C code (SQLite, msgspec) is counted for the Python line that called it, and nothing is
slowed down by more than a few percent, unlike with cProfile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from harness import call, scratch
from report import table

_TICK = 0.001
_PACKAGE = f"{os.sep}penstock{os.sep}"
Place = tuple[str, str]
"""A module and a function."""


class Sampler:
    """Samples this process between `start` and `stop`; both belong in the main thread."""

    def __init__(self) -> None:
        self._stacks: Counter[tuple[str, tuple[Place, ...]]] = Counter()
        self._used: dict[int, float] = {}
        self._names: dict[str, str] = {}

    def start(self) -> None:
        self._sample()
        self._stacks.clear()
        signal.signal(signal.SIGPROF, lambda *_: self._sample())
        signal.setitimer(signal.ITIMER_PROF, _TICK, _TICK)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._sample()

    def _sample(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if (name := names.get(ident)) is None:
                continue
            try:
                used = time.clock_gettime(time.pthread_getcpuclockid(ident))
            except OSError:
                continue  # it ended while we looked
            spent = used - self._used.get(ident, 0.0)
            self._used[ident] = used
            if spent > 0:
                self._stacks[name, self._stack(frame)] += spent

    def _stack(self, frame: FrameType | None) -> tuple[Place, ...]:
        """From the innermost call outwards."""
        found: list[Place] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename != __file__:
                found.append((self._module(code.co_filename), code.co_qualname))
            frame = frame.f_back
        return tuple(found)

    def _module(self, file: str) -> str:
        if (name := self._names.get(file)) is None:
            _, package, tail = file.rpartition(_PACKAGE)
            name = f"penstock/{tail}" if package else f"({Path(file).stem})"
            self._names[file] = name
        return name

    def save(self, file: Path) -> None:
        rows = [[thread, stack, spent] for (thread, stack), spent in self._stacks.items()]
        file.write_text(json.dumps(rows))


def tables(file: Path, jobs: int, top: int) -> Iterable[str]:
    """What a profile that was saved here says, in microseconds a job."""
    samples = [
        (thread, [(module, function) for module, function in stack], spent / jobs * 1e6)
        for thread, stack, spent in json.loads(file.read_text())
    ]
    total = sum(spent for *_, spent in samples)

    def ranked(title: str, places: Callable[[str, list[Place]], Iterable[str]]) -> str:
        costs: Counter[str] = Counter()
        for thread, stack, spent in samples:
            for place in places(thread, stack):
                costs[place] += spent
        rows = [[place, f"{us:.2f}", f"{us / total:.0%}"] for place, us in costs.most_common(top)]
        return table([title, "µs a job", "share"], rows)

    yield ranked("thread", lambda thread, _: [thread])
    yield ranked("module (innermost of Penstock's)", lambda _, stack: [_ours(stack)])
    yield ranked("function itself", lambda _, stack: [" ".join(stack[0])] if stack else [])
    yield ranked(
        "function with what it calls",
        lambda _, stack: {" ".join(place) for place in stack if place[0].startswith("penstock/")},
    )


def _ours(stack: list[Place]) -> str:
    modules = [module for module, _ in stack if module.startswith("penstock/")]
    return modules[0] if modules else "(none: event loop, threads)"


WORK = {
    "drain": ("ours.speed:drain", {"workers": 1, "profile": True}),
    "in-process": ("ours.speed:drain_in_process", {"profile": True}),
    "submit": ("ours.speed:submit_sampled", {}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Where the processor time of a job goes.")
    parser.add_argument(
        "work",
        nargs="?",
        choices=WORK,
        default="drain",
        help="a backlog drained by a worker process, or by the engine's own worker;"
        " or jobs submitted one after another inside 'with app.run()'",
    )
    parser.add_argument("--jobs", type=int, default=60_000, metavar="N")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="lines in each table")
    parser.add_argument("--topic", default="job.bench.noop")
    options = parser.parse_args()
    function, more = WORK[options.work]
    with scratch(None) as folder:
        figures = call(function, folder / "data", jobs=options.jobs, topic=options.topic, **more)
        print(", ".join(f"{name}: {value:,.1f}" for name, value in figures.items() if value))
        for who in ("engine", "worker"):
            if (profile := folder / f"{who}.json").exists():
                print(f"\n# {who}\n")
                print("\n\n".join(tables(profile, options.jobs, options.top)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
