"""Several web processes over one data folder: one has the engine, the others take it over."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from tests.support.chaos.cluster import HERE, PATIENCE, Cluster, cluster
from tests.support.waiting import eventually

from penstock.lifecycles.canonical import JobState

KILLS = 10


@pytest.fixture
def web(tmp_path: Path) -> Iterator[Web]:
    # Each kill takes a worker, too: an unlucky job loses its own every time, and must not end.
    with cluster(tmp_path, PENSTOCK_LIMITS__MAX_ATTEMPTS=str(KILLS + 1)) as made:
        yield Web(made)
        for process in made.processes:
            print(made.log_of(process))  # shown if the test failed


class Web:
    """uvicorn with several processes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def serve(self, workers: int, how: str) -> subprocess.Popen[bytes]:
        words = [
            "-m",
            "uvicorn",
            "tests.support.chaos.web:web",
            "--port",
            str(self.port),
            "--workers",
            str(workers),
            "--lifespan",
            "on",  # a process that can't start says why, and answers nobody
        ]
        log = open(self.cluster.folder / "0-uvicorn.log", "wb")  # noqa: SIM115 given to the child
        process = subprocess.Popen(
            [sys.executable, *words, "--no-access-log"],
            env={**self.cluster.environment, "PENSTOCK_X_HOW": how},
            cwd=HERE.parents[2],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        log.close()
        self.cluster.processes.append(process)
        return process

    def submit(self, number: int) -> dict[str, object] | None:
        """What the web application answers; None if the process that was asked died."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
            connection.request("POST", f"/{number}")
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        assert answer.status == 200, (answer.status, body, self.log)
        return dict(json.loads(body))

    def pids(self, count: int) -> set[int]:
        """The processes that answer, once there are so many."""
        found: set[int] = set()

        def are_there() -> bool:
            if (answer := self.submit(0)) is not None:
                found.add(int(str(answer["pid"])))
            return len(found) >= count

        eventually(are_there, f"{count} processes answer")
        return found

    @property
    def owner(self) -> int:
        """The process that has the engine, or had it last."""
        text = (self.cluster.data / "penstock.lock").read_text()
        return int(text or 0)

    def is_taken_over(self, owner: int) -> bool:
        return self.owner not in (0, owner)

    @property
    def log(self) -> str:
        return self.cluster.log_of(self.cluster.processes[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["run", "start"])
def test_the_engine_moves_on_when_its_process_is_killed_and_no_job_is_lost(
    web: Web, how: str
) -> None:
    web.serve(3, how)
    web.pids(3)
    acknowledged: dict[int, str] = {}
    stop = threading.Event()
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        """One caller of several: asks again what nobody answered, as a browser does."""
        try:
            while not stop.is_set():
                while (answer := web.submit(number)) is None:
                    time.sleep(0.02)
                acknowledged[number] = str(answer["job_id"])
                number += 4
                time.sleep(0.005)
        except BaseException as error:
            failures.append(error)

    def accepted(enough: int) -> bool:
        return bool(failures) or len(acknowledged) >= enough

    callers = [threading.Thread(target=ask, args=(number,)) for number in range(1, 5)]
    for caller in callers:
        caller.start()
    try:
        for _ in range(KILLS):
            owner, done = web.owner, len(acknowledged)
            with suppress(ProcessLookupError):
                os.kill(owner, signal.SIGKILL)
            eventually(partial(web.is_taken_over, owner), "another takes over")
            enough = done + 20
            eventually(partial(accepted, enough), "jobs are accepted again")
    finally:
        stop.set()
        for caller in callers:
            caller.join()
    assert not failures, web.log
    assert len(acknowledged) > 20 * KILLS
    with web.cluster.client() as client:
        for number, job_id in acknowledged.items():
            job = client.get(job_id)
            assert job.result(timeout=PATIENCE) == number
            assert job.refresh().state is JobState.SUCCEEDED
    web.cluster.check_history()


@pytest.mark.timeout(120)
def test_each_process_runs_jobs_and_all_end_with_the_server(web: Web) -> None:
    server = web.serve(2, "run")
    processes = web.pids(2)
    number = 1

    def have_run_jobs() -> bool:
        nonlocal number
        for _ in range(40):
            web.submit(number)
            number += 1
        return {pid for *_, pid in web.cluster.marks()} == processes

    eventually(have_run_jobs, "both run jobs")
    server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) in (0, -signal.SIGTERM)
    assert "Traceback" not in web.log
    assert "Task was destroyed" not in web.log
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)
