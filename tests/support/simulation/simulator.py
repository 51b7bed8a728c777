"""Runs seeded histories of a whole engine and checks each one.

    python -m tests.support.simulation.simulator                  a thousand, from a random seed
    python -m tests.support.simulation.simulator --seed 7         one, telling all that happens
    python -m tests.support.simulation.simulator --sqlite         over SQLite instead of memory

The same seed makes the same history with the same code, so a failure can be looked at for
as long as it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct
from tests.support.simulation.family_check import check_families
from tests.support.simulation.gate_check import check_gate
from tests.support.simulation.history import History, Violation, check, job_of
from tests.support.simulation.world import World

from penstock.testing.clock import VirtualLoop


class Simulated(Struct, frozen=True):
    """One history, and what is wrong with it."""

    seed: int
    history: History
    violations: tuple[Violation, ...]
    failures: tuple[BaseException, ...]
    """What a service or a caller died of."""
    sqlite: bool = False

    @property
    def ok(self) -> bool:
        return not (self.violations or self.failures)

    def report(self) -> str:
        store = " --sqlite" if self.sqlite else ""
        lines = [f"python -m tests.support.simulation.simulator{store} --seed {self.seed}"]
        lines += [f"  {violation}" for violation in self.violations]
        lines += [f"  {type(error).__name__}: {error}" for error in self.failures]
        return "\n".join(lines)


def simulate(
    seed: int, say: Callable[[str], None] = lambda text: None, *, sqlite: bool = False
) -> Simulated:
    """Make the history of one seed, over memory or SQLite, and check it."""
    loop = VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        with TemporaryDirectory(prefix="penstock-") if sqlite else nullcontext() as folder:
            try:
                world = loop.run_until_complete(_live(seed, say, Path(folder) if folder else None))
            except RuntimeError as error:
                return Simulated(seed, History(), (), (error,), sqlite)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    history = world.history
    found = (*check(history), *check_gate(history), *check_families(history))
    return Simulated(seed, history, found, tuple(world.failures), sqlite)


async def _live(seed: int, say: Callable[[str], None], folder: Path | None) -> World:
    world = World(seed, say, folder)
    await world.run()
    return world


def failing(seeds: Iterable[int], *, sqlite: bool = False) -> Iterator[Simulated]:
    """The histories of these seeds in which something is wrong."""
    for seed in seeds:
        simulated = simulate(seed, sqlite=sqlite)
        if not simulated.ok:
            yield simulated


def _tell_life(job_id: str, history: History) -> None:
    """All that was seen of one job, in order."""
    print(f"\n{job_id}: {history.records.get(job_id)}")
    for event in history.events:
        if job_of(event) in (job_id, None):
            print(f"  {event}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="replay this one, telling all that happens")
    parser.add_argument("--first", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--sqlite", action="store_true", help="over SQLite instead of memory")
    options = parser.parse_args()
    if options.seed is not None:
        simulated = simulate(options.seed, print, sqlite=options.sqlite)
        for violation in simulated.violations:
            _tell_life(violation.job_id, simulated.history)
        print(simulated.report() if not simulated.ok else "every promise was kept")
        return 0 if simulated.ok else 1
    logging.disable(logging.CRITICAL)
    begin, bad = time.monotonic(), 0
    seeds = range(options.first, options.first + options.count)
    for simulated in failing(seeds, sqlite=options.sqlite):
        bad += 1
        print(simulated.report())
    took = time.monotonic() - begin
    print(f"{options.count} histories from seed {options.first} in {took:.1f} s, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
