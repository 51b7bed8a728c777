"""A simulation of engines on PostgreSQL, from measured costs: `python -m tools.sizing`.

It writes the tables of docs/explanation/sizing.md. Jobs arrive at random. The owner of a database
commits whatever gathered while the last commit was under way, once to accept and dispatch a job
and once to end it. It decides with one thread, most of whose work overlaps with commits.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CLIENT, ENGINE, WORKER, SERVER = 11e-6, 53e-6, 25e-6, 40e-6
"""Processor seconds a job, submitted 1,000 a call: measured, see the page."""
COMMIT = 0.7e-3
"""Seconds of a commit that holds next to nothing: round trip and flush."""
SERIAL = 0.2
"""The share of the engine's work that no commit overlaps with: deciding."""
HOP = 0.3e-3
"""Seconds to a worker and back, for a job that does nothing."""
BEAT, BEAT_EVERY = 22e-6, 3.0
"""Processor seconds of a heartbeat; seconds between two of a worker (`timeouts.lease` / 5)."""
HANDSHAKE = 2.1e-3
"""Processor seconds of a TLS connection on the engine's side."""
WAL, STORED = 1.3e3, 0.7e3
"""Bytes a job: written to the log, and kept until it is pruned."""
LOAD = 0.7
"""How busy an engine should be at most."""
LEASE = 15.0

RATES = (1_000, 5_000, 10_000, 13_000, 16_000, 18_000, 20_000)
WORKERS = (100, 1_000, 3_000, 10_000)
PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "sizing.md"
_SECONDS = 2.0


class Simulated(NamedTuple):
    rate: float
    """Jobs ended a second."""
    p50: float
    p99: float
    batch: float
    """Moves a commit."""
    busy: float
    """Share of the engine's thread."""


def simulate(rate: float, seconds: float = _SECONDS, workers: int = 0, seed: int = 1) -> Simulated:
    """One owner, to which jobs come at this rate and heartbeats from so many workers."""
    chance, arrivals, at = random.Random(seed), deque[float](), 0.0
    while at < seconds:
        at += chance.expovariate(rate)
        arrivals.append(at)
    running: deque[tuple[float, float]] = deque()
    """When a job ends on its worker, and when it came; in order."""
    beats = workers / BEAT_EVERY * BEAT
    now, worked, moves, commits = 0.0, 0.0, 0, 0
    taken: list[float] = []
    while now < seconds:
        coming = [queue[0] for queue in (arrivals, [end for end, _ in running]) if queue]
        now = max(now, min(coming, default=seconds))
        accepted = _until(arrivals, now)
        ended: list[float] = []
        while running and running[0][0] <= now:
            ended.append(running.popleft()[1])
        count = len(accepted) + len(ended)
        work = count * ENGINE / 2
        took = max(work, SERIAL * work + COMMIT + count * SERVER / 2) / (1 - beats)
        now += took
        worked += work + took * beats
        moves, commits = moves + count, commits + 1
        running.extend((now + HOP, came) for came in accepted)
        taken += [now - came for came in ended]
    taken.sort()
    return Simulated(
        len(taken) / now,
        taken[len(taken) // 2],
        taken[int(len(taken) * 0.99)],
        moves / max(commits, 1),
        min(worked / now, 1.0),
    )


def _until(arrivals: deque[float], now: float) -> list[float]:
    found = []
    while arrivals and arrivals[0] <= now:
        found.append(arrivals.popleft())
    return found


def capacity() -> float:
    """Jobs a second of one owner, at most: of its thread, or of its one connection."""
    return 1 / max(ENGINE, SERIAL * ENGINE + SERVER)


def owners(rate: float) -> int:
    return math.ceil(rate / (LOAD * capacity()))


def back(workers: int) -> float:
    """Seconds until the last of these workers is connected again over TLS."""
    return workers * HANDSHAKE


# -- the page ---------------------------------------------------------------------


def tables() -> str:
    load = []
    for rate in RATES:
        one = simulate(rate)
        load.append(
            [
                f"{rate:,}",
                f"{one.rate:,.0f}",
                f"{one.p50 * 1e3:.1f}",
                f"{one.p99 * 1e3:.1f}",
                f"{one.batch:.0f}",
                f"{one.busy:.0%}",
            ]
        )
    goal = []
    for rate in (1_000, 10_000, 100_000):
        goal.append(
            [
                f"{rate:,}",
                f"{owners(rate)}",
                f"{rate * ENGINE:.1f}",
                f"{rate * SERVER:.1f}",
                f"{rate * (CLIENT + WORKER):.1f}",
                f"{rate * WAL / 1e6:,.0f}",
                f"{rate * STORED * 3600 / 1e9:,.0f}",
            ]
        )
    fleet = []
    for workers in WORKERS:
        beats = workers / BEAT_EVERY * BEAT
        late = "yes" if back(workers) < LEASE else "**no**"
        fleet.append([f"{workers:,}", f"{beats:.1%}", f"{back(workers):.1f}", late])
    return "\n\n".join(
        [
            "One owner, simulated:",
            _table(
                [
                    "jobs/s offered",
                    "jobs/s done",
                    "p50, ms",
                    "p99, ms",
                    "moves a commit",
                    "engine busy",
                ],
                load,
            ),
            f"Owners at {LOAD:.0%} of {capacity():,.0f} jobs/s each, and what all of it costs:",
            _table(
                [
                    "jobs/s",
                    "owners",
                    "engines, cores",
                    "PostgreSQL, cores",
                    "clients and workers, cores",
                    "WAL, MB/s",
                    "kept for an hour, GB",
                ],
                goal,
            ),
            "Workers of one owner:",
            _table(
                [
                    "workers",
                    "heartbeats, share of the engine",
                    "all connected again over TLS, s",
                    "within the lease",
                ],
                fleet,
            ),
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, [":--" if n == 0 else "--:" for n in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


BEGIN, END = "<!-- simulated -->", "<!-- /simulated -->"


def rewritten(text: str) -> str:
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
    sys.stdout.write(tables() + "\n")
