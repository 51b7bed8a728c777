"""Real processes for the crash tests: an engine, workers, clients, and ways to hurt them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.support.simulation.history import Began, Event, Finished, History, check
from tests.support.waiting import eventually

import penstock
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.control.ledger import Ledger
from penstock.core.job import Job
from penstock.core.journal import Transition
from penstock.ports.store import Backend, JobQuery

HERE = Path(__file__).parent
PENSTOCK = Path(sys.executable).parent / "penstock"
PATIENCE = 60.0


class Cluster:
    """One data directory and the processes that use it."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.marks_file = folder / "marks"
        self.marks_file.touch()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
            "PENSTOCK_DATA_DIR": str(self.data),
            "PENSTOCK_X_MARKS": str(self.marks_file),
            "PENSTOCK_TIMEOUTS__LEASE": "1.5",
            "PENSTOCK_TIMEOUTS__LOST_GRACE": "0.5",
            **settings,
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    # -- processes ----------------------------------------------------------------

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        number = len(self.processes)
        log = open(self.folder / f"{number}-{words[0]}.log", "wb")  # noqa: SIM115 given to the child
        process = subprocess.Popen(
            [str(PENSTOCK), *words],
            env={**self.environment, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        log.close()
        self.processes.append(process)
        return process

    def up(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start an engine and wait until it answers."""
        process = self.start("up", *words, **environment)

        def answers() -> bool:
            assert process.poll() is None, self.log_of(process)
            with contextlib.suppress(penstock.PenstockError), self.client():
                return True
            return False

        eventually(answers, "the engine answers")
        return process

    def worker(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a worker and wait until the engine knows it."""
        process = self.start("worker", "--app", "jobs:app", "--id", name, *words)
        eventually(
            lambda: any(w["worker_id"] == name and w["status"] == "ready" for w in self.workers()),
            f"{name} joins",
        )
        return process

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(PENSTOCK), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE * 2,
        )

    def client(self) -> penstock.app.Session:  # type: ignore[name-defined]
        return penstock.connect(data=self.data)

    def workers(self) -> list[dict[str, object]]:
        done = self.run("worker", "list", "--json")
        return [] if done.returncode else list(json.loads(done.stdout))

    def log_of(self, process: subprocess.Popen[bytes]) -> str:
        number = self.processes.index(process)
        (path,) = self.folder.glob(f"{number}-*.log")
        return path.read_text(errors="replace")

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    # -- what happened ------------------------------------------------------------

    def marks(self) -> list[Mark]:
        return marks_in(self.marks_file)

    def began(self, job_id: str, attempt: int = 1) -> bool:
        return any(m[:3] == ("begin", job_id, attempt) for m in self.marks())

    def check_history(self, *, quiescent: bool = True) -> None:
        """What ran, what was acknowledged and what the store holds, before the one checker."""
        judge(self.marks(), self.acknowledged(), *self.stored(), quiescent=quiescent)

    def stored(self) -> tuple[dict[str, Job], dict[str, list[Transition]]]:
        return stored_in(SqliteBackend(self.data / "penstock.db"))

    def acknowledged(self) -> list[str]:
        """The ids that clients wrote down after they were told."""
        files = self.folder.glob("acknowledged-*")
        return [line for path in files for line in path.read_text().splitlines()]


Mark = tuple[str, str, int, int]
"""(begin or end, job_id, attempt, pid)"""


def marks_in(file: Path) -> list[Mark]:
    """What jobs said of themselves, in order."""
    rows = [line.split() for line in file.read_text().splitlines()]
    return [(word, job_id, int(attempt), int(pid)) for word, job_id, attempt, pid in rows]


def stored_in(backend: Backend) -> tuple[dict[str, Job], dict[str, list[Transition]]]:
    """The jobs of a store, and their logs."""

    async def read() -> tuple[dict[str, Job], dict[str, list[Transition]]]:
        reader = Ledger(backend, own=False)
        try:
            jobs = await reader.find(JobQuery(tries=True, limit=1_000_000))
            logs = {job.job_id: await reader.history(job.job_id) for job in jobs}
        finally:
            await reader.close()
        return {job.job_id: job for job in jobs}, logs

    return asyncio.run(read())


def judge(
    marks: Sequence[Mark],
    acknowledged: Iterable[str],
    records: dict[str, Job],
    logs: dict[str, list[Transition]],
    *,
    quiescent: bool = True,
) -> None:
    """What ran, what was acknowledged and what the store holds, before the one checker."""
    events: list[Event] = [
        Began(job_id, attempt, f"process {pid}")
        if word == "begin"
        else Finished(job_id, attempt, f"process {pid}")
        for word, job_id, attempt, pid in marks
    ]
    history = History(events, records, logs, quiescent=quiescent)
    violations = [str(violation) for violation in check(history)]
    lost = [
        f"{job_id} was acknowledged and is gone" for job_id in acknowledged if job_id not in records
    ]
    assert not violations + lost


@contextlib.contextmanager
def cluster(folder: Path, **settings: str) -> Iterator[Cluster]:
    made = Cluster(folder, **settings)
    try:
        yield made
    finally:
        made.stop()


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the process and whatever it started: nothing can be cleaned up."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
