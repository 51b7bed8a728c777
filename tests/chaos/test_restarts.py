"""An engine that is stopped or killed and started again goes unnoticed by those at work."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.chaos.cluster import Cluster, cluster, kill
from tests.support.waiting import eventually

import penstock
from penstock import JobState
from penstock.lifecycles.canonical import TERMINAL
from penstock.ports.engine_api import Moved

RESTARTS = 10
JOB = "job.chaos.quick"


class Clients:
    """Callers of every kind, each in a thread of its own, until they are told to stop."""

    def __init__(self, c: Cluster, tcp: str, http: str) -> None:
        self._c, self._stopped = c, threading.Event()
        self.calls: Counter[str] = Counter()
        self.job_ids: list[str] = []
        self._threads = ThreadPoolExecutor(16)
        self.running: dict[str, Future[None]] = {}
        token = (c.data / "token").read_text().strip()
        connect: dict[str, Callable[[], penstock.app.Session]] = {  # type: ignore[name-defined]
            "unix": lambda: penstock.connect(data=c.data),
            "tcp": lambda: penstock.connect(tcp, token=token),
            "http": lambda: penstock.connect(http, token=token),
        }
        for name, session in connect.items():
            self._start(f"sync {name}", self._sync, session)
            self._start(f"async {name}", lambda n, s: asyncio.run(self._async(n, s)), session)
        self._start("events", self._events, connect["unix"])
        self._start("events http", self._events, connect["http"])

    def _start(self, name: str, work: Callable[..., None], session: object) -> None:
        self.running[name] = self._threads.submit(work, name, session)

    def _sync(self, name: str, session: Callable[[], penstock.app.Session]) -> None:  # type: ignore[name-defined]
        with session() as ps:
            while not self._stopped.is_set():
                job = ps.submit(JOB, {"n": 21})
                self.job_ids.append(job.job_id)
                assert job.result(timeout=60) == 42
                assert job.state is JobState.SUCCEEDED
                many = ps.submit_many(JOB, [{"n": 1}] * 3)
                self.job_ids += [one.job_id for one in many]
                assert penstock.gather(*many, timeout=60) == [2, 2, 2]
                self.calls[name] += 1

    async def _async(self, name: str, session: Callable[[], penstock.app.Session]) -> None:  # type: ignore[name-defined]
        async with session() as ps:
            while not self._stopped.is_set():
                jobs = await asyncio.gather(*(ps.asubmit(JOB, {"n": n}) for n in range(3)))
                self.job_ids += [job.job_id for job in jobs]
                assert await asyncio.gather(*(job.aresult() for job in jobs)) == [0, 2, 4]
                ended = [job async for job in penstock.as_completed(jobs, timeout=60)]
                assert set(ended) == set(jobs)
                self.calls[name] += 1

    def _events(self, name: str, session: Callable[[], penstock.app.Session]) -> None:  # type: ignore[name-defined]
        """Every event once, in order."""
        versions: Counter[str] = Counter()
        with session() as ps:
            for batch in ps.events(after=0):
                for event in batch.events:
                    moved = event.transition
                    versions[moved.job_id] += 1
                    assert moved.n == versions[moved.job_id], moved
                self.calls[name] += 1
                if self._stopped.is_set():
                    return

    def see_all(self) -> None:
        """Wait until each has been answered again."""
        done = self.calls.copy()

        def is_answered() -> bool:
            for name, running in self.running.items():
                assert not running.done(), (name, running.result())
            return all(self.calls[name] > done[name] for name in self.running)

        eventually(is_answered, "every client was answered")

    def stop(self) -> None:
        self._stopped.set()
        errors = [running.exception(timeout=60) for running in self.running.values()]
        self._threads.shutdown()
        assert errors == [None] * len(errors)


@contextmanager
def at_work(c: Cluster, tcp: str, http: str) -> Iterator[Clients]:
    clients = Clients(c, tcp, http)
    try:
        yield clients
    finally:
        clients.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def restart(c: Cluster, engine: subprocess.Popen[bytes], how: int) -> subprocess.Popen[bytes]:
    os.kill(engine.pid, how)
    engine.wait(timeout=60)
    assert engine.returncode in (0, -how)
    return c.up("--no-worker")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nobody_notices_that_the_engine_is_started_again(tmp_path: Path, how: int) -> None:
    tcp, http = f"tcp://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    gate = tmp_path / "gate"
    settings = {
        "PENSTOCK_LISTEN": f"unix:,{tcp}",
        "PENSTOCK_HTTP__LISTEN": http,
        "PENSTOCK_TIMEOUTS__LEASE": "10",
        "PENSTOCK_TIMEOUTS__LOST_GRACE": "10",
        "PENSTOCK_CONCURRENCY": "20",
    }
    with cluster(tmp_path, **settings) as c:
        engine = c.up("--no-worker")
        c.worker("keeper")
        with c.client() as ps, at_work(c, tcp, f"http://{http}") as clients:
            parents = [
                ps.submit(f"job.chaos.{kind}", {"gate": str(gate), "children": 3})
                for kind in ("waiting_parent", "thread_parent")
            ]
            followed = ps.submit("job.chaos.gated", {"gate": str(gate)})
            with ThreadPoolExecutor(4) as threads:
                following = threads.submit(lambda: list(followed.follow()))
                waiting = [threads.submit(parent.result) for parent in parents]
                eventually(lambda: c.began(parents[1].job_id), "the parents wait")
                clients.see_all()
                for _ in range(RESTARTS):
                    engine = restart(c, engine, how)
                    clients.see_all()
                gate.touch()
                assert [one.result(timeout=60) for one in waiting] == [3, 3]
                moves = [u.transition.n for u in following.result(60) if isinstance(u, Moved)]
                last = followed.refresh().version
            assert moves == list(range(moves[0], last + 1))
        with c.client() as ps:
            eventually(lambda: set(ps.status().tally) <= TERMINAL, "every job has ended")
            states = {job.job_id: job.record.state for job in ps.jobs(limit=100_000)}
            assert set(states.values()) == {JobState.SUCCEEDED}
            assert set(clients.job_ids) <= set(states)
            assert len(states) == len(clients.job_ids) + 2 + 2 * 3 + 1
        begun = Counter(job_id for word, job_id, _, _ in c.marks() if word == "begin")
        assert set(begun) == set(states)
        assert set(begun.values()) == {1}
        c.check_history()


@pytest.mark.parametrize("way", ["unix", "http"])
def test_a_timeout_holds_although_the_engine_answers_nothing(tmp_path: Path, way: str) -> None:
    http = f"127.0.0.1:{free_port()}"
    with cluster(tmp_path, PENSTOCK_HTTP__LISTEN=http, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        engine = c.up("--no-worker")
        token = (c.data / "token").read_text().strip()
        address = f"http://{http}" if way == "http" else f"unix:{c.data}/penstock.sock"
        with penstock.connect(address, token=token) as ps:
            job = ps.submit("job.nobody")
            os.kill(engine.pid, signal.SIGSTOP)
            try:
                waiters: list[Callable[[], object]] = [
                    lambda: job.result(timeout=0.5),
                    lambda: asyncio.run(_await_result(job, 0.5)),
                    lambda: job.cancel(timeout=0.5),
                ]
                for wait in waiters:
                    began = time.monotonic()
                    with pytest.raises(penstock.EngineUnavailable):
                        wait()
                    assert time.monotonic() - began < 10
            finally:
                os.kill(engine.pid, signal.SIGCONT)
            assert ps.status().pid == engine.pid


async def _await_result(job: penstock.JobHandle[object], timeout: float) -> object:
    return await job.aresult(timeout=timeout)


def test_a_call_says_how_long_it_tried(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        engine = c.up("--no-worker")
        with penstock.connect(data=c.data, reconnect_timeout=0.5) as ps:
            job = ps.submit("job.nobody")
            kill(engine)
            for call in (ps.status, lambda: ps.submit("job.nobody"), lambda: job.result(0.5)):
                with pytest.raises(penstock.EngineUnavailable, match=r"again for 0\.\d s"):
                    call()
            c.up("--no-worker")
            assert job.state is JobState.PENDING or job.state is JobState.SCHEDULED
        kill(c.processes[-1])
        with pytest.raises(penstock.PenstockError) as refused, penstock.connect(data=c.data):
            pass
        assert refused.value.code == "NOT_RUNNING"


def test_what_must_not_be_done_twice_is_done_once_after_a_restart(tmp_path: Path) -> None:
    """Over a connection that was idle while the engine was started again."""
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        engine = c.up("--no-worker")
        with c.client() as ps:
            job = ps.submit("job.nobody")
            job.cancel()
            kill(engine)
            c.up("--no-worker")
            again = job.retry()
            assert {one.job_id for one in ps.jobs(tries=True)} == {job.job_id, again.job_id}
