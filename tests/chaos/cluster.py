"""Real processes for the crash tests: an engine, workers, clients, and ways to hurt them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import penstock

HERE = Path(__file__).parent
PENSTOCK = Path(sys.executable).parent / "penstock"
PATIENCE = 60.0


def eventually(claim: Callable[[], bool], what: str, within: float = PATIENCE) -> None:
    """Wait for another process to do something; fail with what it should have done."""
    end = time.monotonic() + within
    while not claim():
        assert time.monotonic() < end, f"not within {within:g} s: {what}"
        time.sleep(0.01)


class Cluster:
    """One data directory and the processes that use it."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.marks_file = folder / "marks"
        self.marks_file.touch()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(HERE),
            "PENSTOCK_DATA_DIR": str(self.data),
            "PENSTOCK_X_MARKS": str(self.marks_file),
            "PENSTOCK_LEASE": "1.5",
            "PENSTOCK_LOST_GRACE": "0.5",
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
        done = self.run("workers", "--json")
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

    def marks(self) -> list[tuple[str, str, int, int]]:
        """(begin or end, job_id, attempt, pid), in order."""
        rows = [line.split() for line in self.marks_file.read_text().splitlines()]
        return [(word, job_id, int(attempt), int(pid)) for word, job_id, attempt, pid in rows]

    def began(self, job_id: str, attempt: int = 1) -> bool:
        return any(m[:3] == ("begin", job_id, attempt) for m in self.marks())

    def check_runs(self) -> None:
        """No two runs under one fence."""
        begun = Counter(
            (job_id, attempt) for word, job_id, attempt, _ in self.marks() if word == "begin"
        )
        twice = {key: count for key, count in begun.items() if count > 1}
        assert not twice, f"run twice under one fence: {twice}"


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
