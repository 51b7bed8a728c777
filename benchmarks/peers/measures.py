"""What is measured of every peer, in the same way."""

from __future__ import annotations

import subprocess
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from marks import Marks
from peers.sides import DRAMATIQ, HUEY, HUEY_FSYNC, OBAN, PGQUEUER, PROCRASTINATE, TASKIQ
from processes import cpu_seconds, percentile, until, wait
from processes import kill as kill_process
from processes import running as started

Figures = dict[str, float | None]
PEERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    HUEY_FSYNC: ("huey", "HueyPeer", {"fsync": True}),
    HUEY: ("huey", "HueyPeer", {"fsync": False}),
    DRAMATIQ: ("dramatiq", "DramatiqPeer", {}),
    PGQUEUER: ("pgqueuer", "PgQueuerPeer", {}),
    PROCRASTINATE: ("procrastinate", "ProcrastinatePeer", {}),
    TASKIQ: ("taskiq", "TaskiqPeer", {}),
    OBAN: ("oban", "ObanPeer", {}),
}
"""The module and the class of each."""
_START = 40.0
"""Seconds that workers may take to start."""
_FILL = 1000
"""Jobs in one call while a backlog is made."""


class Peer(Protocol):
    """What a measurement needs of another engine."""

    bulk: bool
    """Whether it has a call that submits many jobs at once."""

    def clear(self) -> None:
        """Forget every job."""

    def submit(self, sent: int) -> None:
        """Enqueue one job that marks `sent`, and return when the engine has accepted it."""

    def submit_nap(self, sent: int) -> None:
        """The same for one that sleeps 20 ms before."""

    def submit_many(self, count: int) -> None:
        """Enqueue so many jobs: in one call if it has one, else one after another."""

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        """Start so many worker processes; one command may start them all."""

    def server_pids(self) -> list[int]:
        """Processes that work for it besides the workers."""

    def close(self) -> None: ...


def of_peer(folder: Path, side: str, measure: str, **options: Any) -> Figures:
    """One of the measures below, of a peer that is started and stopped."""
    module, name, more = PEERS[side]
    peer: Peer = getattr(import_module(f"peers.{module}"), name)(folder, **more)
    try:
        peer.clear()
        figures: Figures = globals()[measure](peer, **options)
        return figures
    finally:
        peer.close()


def drain_beside_reader(peer: Any, *, jobs: int, workers: int) -> Figures:
    """The same while another session of the database keeps a snapshot open."""
    with peer.server.long_reader():
        return drain(peer, jobs=jobs, workers=workers)


def drain(peer: Peer, *, jobs: int, workers: int) -> Figures:
    """A backlog worked off by worker processes, to the last execution."""
    marks = Marks.given()
    for begin in range(0, jobs, _FILL):
        peer.submit_many(min(_FILL, jobs - begin))
    with started(peer.start_workers(workers)) as pids:
        pids += peer.server_pids()
        all_work = f"not all of {workers} workers did anything"
        wait(lambda: marks.processes() >= workers or marks.count() >= jobs, all_work, _START)
        counted, cpu, server = jobs - marks.count(), cpu_seconds(*pids), peer.server_pids()
        server_cpu = cpu_seconds(*server)
        _all_executed(marks, jobs)
        cpu, server_cpu = cpu_seconds(*pids) - cpu, cpu_seconds(*server) - server_cpu
    done, begin = marks.since_all_worked()
    figures: Figures = {"rate": done / (marks.last() - begin) * 1e9}
    if counted * 2 > jobs:  # else most was done before we looked, and the rest says little
        figures |= {"cpu_us": cpu / counted * 1e6, "server_us": server_cpu / counted * 1e6}
    return figures


def through(peer: Peer, *, jobs: int, workers: int) -> Figures:
    """Submitted in thousands while worker processes run them, to the last execution."""
    marks = Marks.given()
    with started(peer.start_workers(workers)):
        end = time.monotonic() + _START
        while marks.processes() < workers:
            peer.submit_many(10 * workers)
            time.sleep(0.2)
            if time.monotonic() > end:
                raise TimeoutError(f"{marks.processes()} of {workers} workers did anything")
        before = _settled(marks)
        begin = time.monotonic_ns()
        for first in range(0, jobs, _FILL):
            peer.submit_many(min(_FILL, jobs - first))
        _all_executed(marks, before + jobs)
    return {"rate": jobs / (marks.last() - begin) * 1e9}


def _settled(marks: Marks) -> int:
    """The number of marks, once there are no more."""
    count = -1
    while count != marks.count():
        count = marks.count()
        time.sleep(0.5)
    return count


def submit(peer: Peer, *, seconds: float, bulk: int) -> Figures:
    """Submissions accepted a second from one synchronous producer.

    One after another without and with a worker process that runs them, and so many a call if
    the peer has such a call.
    """
    marks = Marks.given()
    count, one = _submit_for(peer, seconds, 1)
    figures: Figures = {"one": one}
    with started(peer.start_workers(1)):
        _all_executed(marks, count)
        more, figures["running_one"] = _submit_for(peer, seconds, 1)
        _all_executed(marks, count + more)
    if peer.bulk:
        _, figures["bulk"] = _submit_for(peer, seconds, bulk)
    return figures


def _submit_for(peer: Peer, seconds: float, size: int) -> tuple[int, float]:
    """How many jobs were accepted, and how many a second."""
    end, count = (begin := time.monotonic()) + seconds, 0
    while time.monotonic() < end:
        if size == 1:
            peer.submit(0)
        else:
            peer.submit_many(size)
        count += size
    return count, count / (time.monotonic() - begin)


def latency(peer: Peer, *, seconds: float, rate: int) -> Figures:
    """From before the submit until the job is executed, at a steady rate."""
    marks = Marks.given()
    with started(peer.start_workers(1)):
        peer.submit(time.monotonic_ns())
        wait(lambda: marks.count() > 0, "its worker did nothing", _START)
        time.sleep(1)
        marks.clear()
        start, jobs = time.monotonic(), int(seconds * rate)
        for n in range(jobs):
            peer.submit(time.monotonic_ns())
            time.sleep(max(0.0, start + (n + 1) / rate - time.monotonic()))
        _all_executed(marks, jobs, 15)
    times = marks.delays()
    return {"p50_ms": percentile(times, 0.5) * 1e3, "p99_ms": percentile(times, 0.99) * 1e3}


def kill(peer: Peer, *, jobs: int, after: int, window: float) -> Figures:
    """SIGKILL the worker amid short jobs, start another, and count what became of them."""
    marks = Marks.given()
    for n in range(jobs):
        peer.submit_nap(n)
    victims = peer.start_workers(1)
    try:
        until(lambda: marks.count() >= after, _START)
    finally:
        for victim in victims:
            kill_process(victim)
    begin = time.monotonic()
    with started(peer.start_workers(1)):
        all_done = until(lambda: len(set(marks.sent())) >= jobs, window)
        took = time.monotonic() - begin
        time.sleep(0.5)
    seen = marks.sent()
    return {
        "missing": jobs - len(set(seen)),
        "run_twice": len(seen) - len(set(seen)),
        "all_done_s": took if all_done else None,
    }


def _all_executed(marks: Marks, jobs: int, seconds: float = 120) -> None:
    wait(lambda: marks.count() >= jobs, f"not all of {jobs} jobs were executed", seconds)
